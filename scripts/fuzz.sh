#!/usr/bin/env bash
# Fuzzes every target for SECONDS each (default 600), from its stored corpus; new inputs are kept in
# build/fuzz-corpus/. Needs clang.   scripts/fuzz.sh [SECONDS] [TARGET ...]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-600}
shift || true
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(ls fuzz/*_fuzz.cc | sed 's#fuzz/##; s#_fuzz.cc##')
for target in "${targets[@]}"; do
  mkdir -p "build/fuzz-corpus/$target"
  echo "== $target for $seconds s"
  "build/fuzz/fuzz/${target}_fuzz" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 "build/fuzz-corpus/$target" "fuzz/corpus/$target"
done
