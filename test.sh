#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test. The last line is ctest's summary.
set -euo pipefail
cd "$(dirname "$0")"
scripts/install_deps.sh tests
cmake -S . -B build/test -G Ninja -DCMAKE_BUILD_TYPE=Release -DOMNIKV_TESTS=ON >/dev/null
cmake --build build/test
# ctest's closing lines come last; on failure its report names the tests.
ctest --test-dir build/test --output-on-failure -j "$(nproc)"
