#!/usr/bin/env bash
# Makes .venv ready: `scripts/setup.sh dev` for tests and tools, `run` for running mtgrpo alone, `smollm2` for running it
# on the real model of the second demo.
#
# Instant when nothing changed: .venv/.setup-<kind>-<key> stands for a finished install, the key being the hash of
# pyproject.toml, constraints.txt and the Python version. A .venv that this script made is built again from nothing when
# it was left half installed, was moved or lost its interpreter. One that somebody else made is used if it works, and
# never removed. PYTHON=python3.12 chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?usage: scripts/setup.sh dev|run|smollm2}
case $kind in
    dev) target='.[dev]' ;;
    run) target='.' ;;
    smollm2) target='.[smollm2]' ;;
    *) echo "setup: '$kind' is none of dev, run, smollm2" >&2 && exit 2 ;;
esac
torch_range=$(sed -n 's/^ *"\(torch>=[^"]*\)".*/\1/p' pyproject.toml)
venv_python=.venv/bin/python

say() { echo "setup: $*"; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# .venv/.made holds the folder of .venv, the interpreter it is made with, and "adopted" if somebody else made it.
made_in() { sed -n 1p .venv/.made 2>/dev/null || true; }
made_with() { sed -n 2p .venv/.made 2>/dev/null || true; }
ours() { [ -e .venv/.made ] && [ "$(sed -n 3p .venv/.made)" != adopted ]; }

supported() { case $1 in 3.11 | 3.12 | 3.13) ;; *) return 1 ;; esac }

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
    elif [ -x "$(made_with)" ]; then
        made_with
    elif supported "$(version_of $venv_python)" && ! ours; then
        echo $venv_python
    else
        echo python3
    fi
}

check_python() {
    local found
    found=$(version_of "$python") || found=""
    if ! supported "$found"; then
        echo "setup: mtgrpo needs Python 3.11, 3.12 or 3.13, but '$python' is ${found:-no working Python}." >&2
        echo "setup: choose another with, for example: PYTHON=python3.12 make setup" >&2
        exit 1
    fi
}

usable() {
    [ "$(made_in)" = "$PWD" ] && [ ! -e .venv/.installing ] && [ "$(version_of $venv_python)" = "$(version_of "$python")" ]
}

# Also one whose last install was interrupted: pip can take that up again.
adoptable() {
    [ ! -e .venv/.made ] || [ "$(made_in)" = "$PWD" ] || return 1
    [ "$(version_of $venv_python)" = "$(version_of "$python")" ] && "$venv_python" -m pip --version >/dev/null 2>&1
}

make_venv() {
    local interpreter
    interpreter=$("$python" -c 'import sys; print(sys.executable)')
    if [ ! -e .venv ] || ours; then
        if [ -e .venv ]; then
            say "the .venv here is unfinished, was moved or has another Python: making it again"
            rm -rf .venv
        fi
        # Marked before it is filled, so that one left half made is known as ours.
        mkdir .venv
        printf '%s\n%s\n' "$PWD" "$interpreter" >.venv/.made
        touch .venv/.installing
        "$python" -m venv .venv
    elif adoptable; then
        say "using the .venv that is here"
        printf '%s\n%s\nadopted\n' "$PWD" "$interpreter" >.venv/.made
    else
        echo "setup: the .venv here was not made by this script, and it was moved or is no working" \
            "Python $(version_of "$python") with pip: remove it or move it away, then try again" >&2
        exit 1
    fi
}

key() {
    "$venv_python" - <<'PY'
import hashlib, pathlib, sys
parts = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"\0".join([*parts, sys.version.encode()])).hexdigest()[:16])
PY
}

install() {
    # A bar for people; nothing but errors where nobody watches.
    local quiet=--quiet
    if [ -t 1 ]; then quiet=; fi
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv_python" -m pip install $quiet "$@"
}

torch_version() { "$venv_python" -c 'import torch; print(torch.__version__.partition("+")[0])' 2>/dev/null; }

install_torch() {
    if torch_version >/dev/null; then
        say "keeping torch $(torch_version), if it is $torch_range"
        install "$torch_range"
    elif nvidia-smi -L >/dev/null 2>&1; then
        say "installing torch for this machine's NVIDIA GPU"
        install "$torch_range" -c constraints.txt
    # A machine with a folder of wheels of its own takes torch from there: the option below would replace the indexes it
    # is configured with, and the CPU build it names may be out of reach.
    elif [ "$(uname)" != Linux ] || [[ "$("$venv_python" -m pip config list)" == *find-links* ]]; then
        say "installing torch"
        install "$torch_range" -c constraints.txt
    else
        say "installing torch for the CPU (no NVIDIA driver answers here)"
        install "$torch_range" -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu
    fi
}

install_all() {
    rm -f .venv/.setup-*
    touch .venv/.installing
    install_torch
    # The torch that is there stays, whichever version within the range it is.
    { grep -v '^torch==' constraints.txt && echo "torch==$(torch_version)"; } >.venv/constraints.txt
    say "installing mtgrpo and what it needs (minutes the first time)"
    install -e "$target" -c .venv/constraints.txt
    rm .venv/.installing
}

# One set-up at a time; the lock lives as long as this script and what it started.
lock() {
    exec 9>.venv.lock
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

python=$(choose_python)
check_python
lock
usable || make_venv
key=$(key)
if [ -e ".venv/.setup-$kind-$key" ] || [ -e ".venv/.setup-dev-$key" ]; then
    exit 0
fi
install_all
say "compiling the kernels of decoding for this processor"
"$venv_python" - <<'PY' || true
from mtgrpo.engines.local.decode_kernels import NoKernelsError, load_kernels

try:
    load_kernels(32)
except NoKernelsError as error:
    print(f"setup: without them, for {error}; decoding on a CPU takes longer")
PY
touch ".venv/.setup-$kind-$key"
say "ready: .venv/bin/mtgrpo"
