#!/usr/bin/env bash
# Makes .venv ready: `scripts/setup.sh dev` for tests and tools, `scripts/setup.sh run` for running mtgrpo alone.
#
# Instant when nothing changed: .venv/.setup-<kind>-<key> stands for a finished install, the key being the hash of
# pyproject.toml, constraints.txt and the Python version. A .venv that was left half installed, that belongs to another
# place or that lost its interpreter is built again from nothing. PYTHON=python3.12 chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?usage: scripts/setup.sh dev|run}
case $kind in
    dev) target='.[dev]' ;;
    run) target='.' ;;
    *) echo "setup: '$kind' is neither dev nor run" >&2 && exit 2 ;;
esac
torch_range=$(sed -n 's/^ *"\(torch>=[^"]*\)".*/\1/p' pyproject.toml)
venv_python=.venv/bin/python

say() { echo "setup: $*"; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# .venv/.made holds the folder and the interpreter that .venv was made with; it is written when .venv is complete.
made_in() { sed -n 1p .venv/.made 2>/dev/null || true; }
made_with() { sed -n 2p .venv/.made 2>/dev/null || true; }

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
    elif [ -x "$(made_with)" ]; then
        made_with
    else
        echo python3
    fi
}

check_python() {
    local found
    found=$(version_of "$python") || found=""
    case $found in
        3.11 | 3.12 | 3.13) ;;
        *)
            echo "setup: mtgrpo needs Python 3.11, 3.12 or 3.13, but '$python' is ${found:-no working Python}." >&2
            echo "setup: choose another with, for example: PYTHON=python3.12 make setup" >&2
            exit 1
            ;;
    esac
}

usable() {
    [ "$(made_in)" = "$PWD" ] && [ ! -e .venv/.installing ] && [ "$(version_of $venv_python)" = "$(version_of "$python")" ]
}

make_venv() {
    if [ -e .venv ]; then
        say "the .venv here is unfinished, was moved or has another Python: making it again"
        rm -rf .venv
    fi
    "$python" -m venv .venv
    printf '%s\n%s\n' "$PWD" "$("$python" -c 'import sys; print(sys.executable)')" >.venv/.made
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
touch ".venv/.setup-$kind-$key"
say "ready: .venv/bin/mtgrpo"
