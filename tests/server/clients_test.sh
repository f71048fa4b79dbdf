#!/usr/bin/env bash
# Runs clients_test.py with the clients of requirements.txt in a virtual environment of the build.
# Exits with 77 (skipped) where PyPI cannot be reached.
# Usage: clients_test.sh SOURCE BUILD OMNIKV
set -euo pipefail
source=$1 build=$2 omnikv=$3
here=$source/tests/server
environment=$build/clients
if ! cmp -s "$here/requirements.txt" "$environment/installed.txt"; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  if ! "$environment/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"; then
    echo "skipped: the clients cannot be installed from PyPI"
    exit 77
  fi
  cp "$here/requirements.txt" "$environment/installed.txt"
fi
exec "$environment/bin/python" "$here/clients_test.py" "$source" "$omnikv"
