#!/usr/bin/env bash
# Makes .venv-docs ready: Zensical, which builds the site of docs/, and axe, by which a test looks whether all can read
# it. Does nothing when it is complete for these pins; PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(zensical==0.0.73 axe-playwright-python==0.1.8)
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
$venv/bin/pip install --quiet --no-deps "${pins[1]}" # for its file axe.min.js alone
touch "$stamp"
echo "docs: ready"
