#!/usr/bin/env bash
# Runs page_test.py in a headless Chromium against a server of its own, with Playwright in a virtual
# environment of the build. Exits with 77 (skipped) where there is no Chromium, or PyPI cannot be
# reached. Screenshots go to BUILD/page_test.
# Usage: page_test.sh SOURCE BUILD OMNIKV
set -euo pipefail
source=$1 build=$2 omnikv=$3
chromium=${CHROMIUM:-/usr/bin/chromium}
[ -x "$chromium" ] || {
  echo "skipped: there is no Chromium at $chromium"
  exit 77
}
environment=$build/page_client
if ! [ -e "$environment/installed" ]; then
  rm -rf "$environment"
  python3 -m venv "$environment"
  if ! "$environment/bin/pip" install --quiet --disable-pip-version-check playwright==1.65.2; then
    echo "skipped: Playwright cannot be installed from PyPI"
    exit 77
  fi
  touch "$environment/installed"
fi
said=$(mktemp)
trap 'kill "$server" 2>/dev/null || true; rm -f "$said"' EXIT
"$omnikv" serve --port 0 --ctx 24k 2>"$said" &
server=$!
for _ in $(seq 300); do
  url=$(sed -n 's/.* answers on \(http:[^ ]*\).*/\1/p' "$said")
  [ -n "$url" ] && break
  sleep 0.1
done
mkdir -p "$build/page_test"
CHROMIUM=$chromium "$environment/bin/python" "$source/tests/server/page/page_test.py" "$url" "$build/page_test"
