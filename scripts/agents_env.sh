#!/usr/bin/env bash
# Makes .venv-agents ready: agents of others, which tests/test_foreign_agents.py lets play and train. An environment of
# their own, since they pin what .venv has in other versions. Does nothing when it is complete for these pins;
# PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(smolagents[openai]==1.26.0 openai-agents==0.24.0 langgraph==1.2.22 langchain-openai mini-swe-agent==2.4.6)
python=${PYTHON:-python3}
venv=.venv-agents
key=$(printf '%s\n' "${pins[@]}" "$PWD" "$("$python" --version)" | sha256sum | cut -c 1-16)
stamp=$venv/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "agents: installing ${pins[*]} into $venv (minutes)"
rm -rf $venv
"$python" -m venv $venv
PIP_DISABLE_PIP_VERSION_CHECK=1 $venv/bin/pip install --quiet "${pins[@]}"
touch "$stamp"
echo "agents: ready"
