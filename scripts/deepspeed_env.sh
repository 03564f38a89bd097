#!/usr/bin/env bash
# Makes .venv-deepspeed ready: DeepSpeed for parallel=zero3, a folder for the end of PYTHONPATH, apart from .venv because
# transformers imports it wherever it is installed. Nothing of it is compiled. Does nothing when it is complete for these
# pins.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(deepspeed==0.19.8 hjson==3.1.0 ninja==1.13.2 py-cpuinfo==9.0.0 msgpack==1.2.4 einops==0.8.2 psutil==7.2.2)
python=${PYTHON:-.venv/bin/python}
folder=.venv-deepspeed
key=$(printf '%s\n' "${pins[@]}" "$PWD" "$("$python" --version)" | sha256sum | cut -c 1-16)
stamp=$folder/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "deepspeed: installing ${pins[0]} into $folder (a minute)"
rm -rf $folder
DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install --quiet --no-deps --no-build-isolation \
    --target $folder "${pins[@]}"
touch "$stamp"
echo "deepspeed: ready"
