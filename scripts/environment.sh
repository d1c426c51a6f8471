# shellcheck shell=bash
# Sourced by the two commands: enter the project's folder and its .venv, made and filled on demand.
# Usage: source scripts/environment.sh EXTRA

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "error: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python" >&2
  exit 2
fi
if ! .venv/bin/python -c '' 2>/dev/null; then
  echo "Making .venv ..."
  "$python" -m venv --clear .venv
fi
# The stamp holds what was installed, so that a second run needs no network.
stamp=".venv/installed-$1"
if ! cmp -s pyproject.toml "$stamp"; then
  echo "Installing multimodal[$1] into .venv (a few minutes the first time) ..."
  .venv/bin/python -m pip install -qq --disable-pip-version-check --editable ".[$1]"
  cp pyproject.toml "$stamp"
fi
source .venv/bin/activate
