#!/usr/bin/env bash
# Usage: tools/setup.sh EXTRA      Makes .venv with a Python >= 3.12 and installs the project with one of its extras.
# Does nothing when that is already done for the present pyproject.toml and constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:?name an extra of pyproject.toml, such as dev}

fail() { echo "setup: $*" >&2; exit 1; }

# A pyenv shim can be on PATH and still refuse to run, so each candidate has to prove itself.
works() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate root
  for candidate in python3.12 python3.13 python3.14 python3 python; do
    works "$candidate" && { echo "$candidate"; return; }
  done
  root=${PYENV_ROOT:-${HOME:-}/.pyenv}
  for candidate in "$root"/versions/3.1[2-9]*/bin/python; do
    works "$candidate" && { echo "$candidate"; return; }
  done
  if command -v uv >/dev/null 2>&1; then
    candidate=$(uv python find '>=3.12' 2>/dev/null) && works "$candidate" && { echo "$candidate"; return; }
  fi
  return 1
}

stamp=.venv/installed-$extra
wanted=$(cat pyproject.toml constraints.txt | cksum)
made() { [ -x .venv/bin/python ] && works .venv/bin/python && .venv/bin/python -c 'import pip' 2>/dev/null; }
made && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

if ! made; then
  python=${PYTHON:-$(find_python)} || fail "no Python >= 3.12 found (looked for python3.12 to 3.14 on PATH, pyenv, uv);" \
    "install one, for example with 'uv python install 3.12' or 'pyenv install 3.12', or set PYTHON, and run make again"
  works "$python" || fail "PYTHON=$python is no Python >= 3.12 with venv; name another one or leave PYTHON unset"
  echo "setup: making .venv with $("$python" --version) ($python)"
  rm -rf .venv
  "$python" -m venv .venv || fail "$python could not make .venv; is the disk full or the folder read-only?"
fi
echo "setup: installing sparse-lm[$extra] (about a minute)"
# Byte-compiling every file of every package takes longer than compiling the few that are imported.
.venv/bin/python -m pip install --no-compile -c constraints.txt -e ".[$extra]" >.venv/install.log 2>&1 ||
  fail "pip could not install sparse-lm[$extra]: $(grep -m1 '^ERROR' .venv/install.log || tail -n 1 .venv/install.log) (whole log: .venv/install.log)"
echo "$wanted" >"$stamp"
