#!/usr/bin/env bash
# Makes .venv-verifiers ready: the package verifiers for agent=verifiers, apart from .venv because it pins other versions
# of what it needs, and uv, by which its harnesses start their programs. Does nothing when it is complete for these pins;
# PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(verifiers==0.4.0 uv==0.13.9)
python=${PYTHON:-python3}
venv=.venv-verifiers
key=$(printf '%s\n' "${pins[@]}" "$PWD" "$("$python" --version)" | sha256sum | cut -c 1-16)
stamp=$venv/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "verifiers: installing ${pins[*]} into $venv (a minute)"
rm -rf $venv
"$python" -m venv $venv
PIP_DISABLE_PIP_VERSION_CHECK=1 $venv/bin/pip install --quiet "${pins[@]}"
touch "$stamp"
echo "verifiers: ready"
