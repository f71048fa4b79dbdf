#!/usr/bin/env bash
# From nothing to an answer: installs what is missing, builds, and lets the shipped model read a
# document of 24,000 tokens and answer from it, with three cache policies side by side.
set -euo pipefail
cd "$(dirname "$0")"
scripts/install_deps.sh
cmake -S . -B build/release -G Ninja -DCMAKE_BUILD_TYPE=Release -DOMNIKV_TESTS=OFF \
  -DOMNIKV_FLASHINFER=OFF -DOMNIKV_WERROR=OFF >/dev/null  # a newer compiler warns of more
cmake --build build/release
build/release/tools/omnikv eval quickstart
echo "To answer on http://127.0.0.1:8080, for the clients that you use: build/release/tools/omnikv serve" >&2
