#!/usr/bin/env bash
# Makes .venv-docs ready: Zensical, which builds the site of docs/. Does nothing when it is complete for these pins;
# PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(zensical==0.0.73)
python=${PYTHON:-python3}
venv=.venv-docs
key=$(printf '%s\n' "${pins[@]}" "$PWD" "$("$python" --version)" | sha256sum | cut -c 1-16)
stamp=$venv/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "docs: installing ${pins[*]} into $venv (seconds)"
rm -rf $venv
"$python" -m venv $venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
$venv/bin/pip install --quiet "${pins[0]}"
touch "$stamp"
echo "docs: ready"
