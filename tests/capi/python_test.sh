#!/usr/bin/env bash
# Builds the wheel on a build of the project, installs it into a clean virtual environment, and runs
# python_test.py there: python_test.sh BUILD_DIR. Ends with 77 where PyPI cannot be
# reached, or Python has no headers.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(realpath "$1")
work=$build/python_test
rm -rf "$work"
mkdir -p "$work"
echo "== $(date +%T) the wheel"
status=0
"$here/../../scripts/wheel.sh" --build "$build" "$work" >"$work/wheel.log" 2>"$work/wheel.err" || status=$?
cat "$work/wheel.err"
if [ $status -eq 77 ]; then
  echo "skipped: $(tail -1 "$work/wheel.err")"
  exit 77
fi
[ $status -eq 0 ] || exit $status
wheel=$(tail -1 "$work/wheel.log")
echo "== $(date +%T) $wheel: $(stat -c %s "$wheel") bytes; its virtual environment"
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" -q --disable-pip-version-check --retries 2 install --no-compile "${wheel}[openai]" || {
  echo "skipped: PyPI cannot be reached, which has NumPy and openai"
  exit 77
}
echo "== $(date +%T) its tests"
# Elsewhere, so that nothing is found in the source tree.
cd "$work"
status=0
"$work/venv/bin/python" "$here/python_test.py" || status=$?
echo "== $(date +%T) end"
rm -rf "$work"  # 200 MB
exit $status
