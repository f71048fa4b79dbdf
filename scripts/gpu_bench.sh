#!/usr/bin/env bash
# Measures the GPU backend on this machine's card: the cases of docs/performance.md, each against the
# ceilings of its own run.   scripts/gpu_bench.sh [OUT_DIR]
# Runs in a source tree, where it builds what is missing, or in an unpacked bundle. Leaves one JSON
# file a case and prints the table. OMNIKV names another program to run.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_bench}
mkdir -p "$out"
omnikv=${OMNIKV:-}
if [ -z "$omnikv" ] && [ -x bin/omnikv ]; then omnikv=bin/omnikv; fi
if [ -z "$omnikv" ]; then
  cmake -S . -B build/gpu -DOMNIKV_CUDA=ON -DOMNIKV_TESTS=OFF >/dev/null
  cmake --build build/gpu --target omnikv -j "$(nproc)"
  omnikv=build/gpu/tools/omnikv
fi

bench() {  # NAME ARGUMENTS...
  local name=$1
  shift
  echo "== $name"
  if ! "$omnikv" bench --geometry llama3-8b --format bf16 --device cuda --json "$@" \
    >"$out/$name.json" 2>"$out/$name.err"; then
    echo "   failed: $(tail -1 "$out/$name.err")"
    return
  fi
  python3 - "$out/$name.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
for case in report["cases"]:
    line = f"   {case['policy']:10}"
    if "context" in case:
        line += (f" context {case['context']:>7} {case['ms_per_token']:8.3f} ms "
                 f"{case['tokens_per_s']:8.1f} tok/s {100 * case['share_of_read']:5.1f} % of read")
        if case.get("host_layers"):
            line += (f", {case['host_layers']} layers on the host, "
                     f"{case['transfer_bytes'] / 1e6:.1f} MB a step")
        if "hit_rate" in case:
            line += f", {100 * case['hit_rate']:.0f} % hits"
            line += " (simulated)" if case.get("simulated") else ""
    else:
        line += (f" prefill {case['prefill_tokens']:>7} {case['prefill_tok_s']:9.0f} tok/s "
                 f"{case['tflop_s']:7.1f} TFLOP/s {100 * case['share_of_gemm']:5.1f} % of GEMM")
    print(line)
c = report["ceiling"]
print(f"   ceiling: read {c['read_gb_s']:.0f} GB/s, GEMM {c['gemm_tflop_s']['bf16']:.0f} TFLOP/s, "
      f"PCIe {c.get('pcie_gb_s')}")
PYTHON
}

filters="--policies omnikv --set filters=2,8,18 --set budget=2048"
bench full --context 16,4096,131072 --policies full --steps 48
bench omnikv_after1 --context 131072 $filters --set dense_after_filter=1 --steps 48
bench omnikv_after0 --context 131072 $filters --set dense_after_filter=0 --steps 48
for hits in 0 0.3 0.6; do
  bench "host_after1_hits$hits" --context 131072 $filters --set dense_after_filter=1 --place host \
    --hit-rate $hits --steps 48
done
for hits in 0.6 0.9; do
  bench "host_after0_hits$hits" --context 131072 $filters --set dense_after_filter=0 --place host \
    --hit-rate $hits --steps 48
done
bench omnikv_128k_24g --context 131072 $filters --set dense_after_filter=0 --gpu-memory 24GiB \
  --steps 48
bench omnikv_450k_40g --context 460800 $filters --set dense_after_filter=0 --gpu-memory 40GiB \
  --steps 48
bench prefill --prefill 32768,131072 --policies full --repeats 2
bench prefill_host --prefill 131072 $filters --place host --repeats 2
