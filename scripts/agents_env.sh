#!/usr/bin/env bash
# Makes .venv-agents ready: agents of others, which tests/test_foreign_agents.py lets play and train, and inspect_ai, which
# reads the log that is exported for it. It lies on top of .venv, so that they run in the process that trains; where both
# have a package, its own version counts. Does nothing when it is complete for these pins.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(smolagents==1.26.0 openai-agents==0.24.0 langgraph==1.2.22 langchain-openai mini-swe-agent==2.4.6 inspect-ai==0.3.285)
python=${PYTHON:-.venv/bin/python}
venv=.venv-agents
key=$(printf '%s\n' "${pins[@]}" "$PWD" "$("$python" --version)" "$(cat constraints.txt)" | sha256sum | cut -c 1-16)
stamp=$venv/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "agents: installing ${pins[*]} into $venv (minutes)"
rm -rf $venv
"$python" -m venv $venv
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" >"$(echo $venv/lib/python3*/site-packages)/below.pth"
PIP_DISABLE_PIP_VERSION_CHECK=1 $venv/bin/python -m pip install --quiet "${pins[@]}" anthropic
touch "$stamp"
echo "agents: ready"
