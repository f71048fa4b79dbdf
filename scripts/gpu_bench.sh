#!/usr/bin/env bash
# Measures the GPU backend on this machine's card: the cases of docs/performance.md, each against the
# ceilings of its own run, in named parts of at most eight minutes each.
#
#     scripts/gpu_bench.sh [--parts a,b] [--out DIR]      --list: the names of all parts
#
# Runs in a source tree, where it builds what is missing, or in an unpacked bundle. DIR (default
# ./gpu_bench) gets a file PART.jsonl for each part: its result with commit and card, then a line for
# each case, the program's report. scripts/gpu_join.py joins parts of several runs. The printed table
# takes python3. OMNIKV names another program to run, OMNIKV_PYTHON the Python that has PyTorch.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
kind=bench
all_parts=(full omnikv host batches serving seats store capped disk brutal prefill shapes policies
  kcache_1024 kcache_4096 kcache_7168 kcache_15360 kcache_8b attention hits)
out=gpu_bench
# shellcheck source=scripts/gpu_lib.sh
. "$root/scripts/gpu_lib.sh"
read_arguments "$@"
cd "$root" || exit 1
omnikv=${OMNIKV:-}
if [ -z "$omnikv" ] && [ -x bin/omnikv ]; then omnikv=bin/omnikv; fi
if [ -z "$omnikv" ]; then
  build=${OMNIKV_BUILD:-build/gpu}
  if [ ! -x "$build/tools/omnikv" ] || [ ! -x "$build/bench/cuda_attend_bench" ]; then
    cmake -S . -B "$build" -DOMNIKV_CUDA=ON -DOMNIKV_TESTS=OFF >/dev/null &&
      cmake --build "$build" --target omnikv cuda_attend_bench cuda_prefill_bench -j "$(nproc)" ||
      exit 1
  fi
  omnikv=$build/tools/omnikv
fi
kernels=$(dirname "$omnikv")  # the kernels' own benchmarks: beside the program, or where cmake builds
[ -x "$kernels/cuda_attend_bench" ] || kernels=$(dirname "$kernels")/bench

shapes=bench/geometries
[ -d "$shapes" ] || shapes=share/omnikv/geometries  # of a bundle

have_python() { command -v python3 >/dev/null || { echo "   python3 is not installed: see $out"; false; }; }
# measure PART: what follows is of this part, which begins; false where it is not wanted.
measure() {
  wanted "$1" || return 1
  begin "$1"
  cases=0
  bad=()
}
# One report, of one JSON object, as a line of the part's file.
keep() { # NAME FILE
  cases=$((cases + 1))
  note "\"case\": $(quote "$1"), \"report\": $(tr '\n' ' ' <"$2")"
}
done_measuring() {
  if [ ${#bad[@]} -gt 0 ]; then
    finish FAILED "${#bad[@]} cases failed: ${bad[*]}" "\"cases\": $cases"
  else
    finish ok "$cases cases" "\"cases\": $cases"
  fi
}

geometry=llama3-8b
format=bf16
bench() {  # NAME ARGUMENTS..., of $geometry in $format
  local name=$1
  shift
  echo "== $name"
  if ! timeout "$(left)" "$omnikv" bench --geometry "$geometry" --format "$format" --device cuda --json "$@" </dev/null \
    >"$logs/$name.json" 2>"$logs/$name.err"; then
    echo "   failed: $(tail -1 "$logs/$name.err")"
    bad+=("$name ($(tail -1 "$logs/$name.err"))")
    return
  fi
  keep "$name" "$logs/$name.json"
  have_python || return 0
  python3 - "$logs/$name.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
for case in report["cases"]:
    line = f"   {case['policy']:14}"
    if "together" in case:
        held = case["held_bytes"]
        line += (f" {case['together']} of {case['requests']} requests of {case['context']} at a time: "
                 f"{case['ms_per_step']:.3f} ms a step, {case['tokens_per_s']:.1f} tok/s, 95 % of tokens in "
                 f"{case['p95_ms']:.3f} ms; {held['device'] / 2**30:.2f} GiB on the card, "
                 f"{held['host'] / 2**30:.2f} beside it, {case['fetched_bytes'] / 1e6:.1f} MB a step; prompts in "
                 f"{case['prompts_s']:.1f} s")
        if "beside_p95_ms" in case:
            prompt = case["prompt_s"]
            line += (f"; with a prompt of {case['beside_tokens']} 95 % in {case['beside_p95_ms']:.3f} ms, "
                     f"{case['beside_p95_ms'] / case['p95_ms']:.2f} x; the prompt in {prompt['beside']:.2f} s, "
                     f"{prompt['beside'] / prompt['alone']:.2f} x of alone")
    elif "p95_ms" in case:
        p95, prompt = case["p95_ms"], case["prompt_s"]
        line += (f" {case['batch']} x {case['context']} with a prompt of {case['beside_tokens']}: 95 % of tokens in "
                 f"{p95['beside']:.3f} ms, {p95['beside'] / p95['alone']:.2f} x of alone; the prompt "
                 f"{prompt['beside'] / prompt['alone']:.2f} x of alone")
    elif "context" in case:
        batch = f" x {case['batch']}" if case["batch"] > 1 else ""
        line += (f" context {case['context']:>7}{batch} {case['ms_per_token']:8.3f} ms "
                 f"{case['tokens_per_s']:8.1f} tok/s {100 * case['share_of_read']:5.1f} % of read")
        if "card_peak_bytes" in report:
            line += f", {report['card_peak_bytes'] / 2**30:.2f} GiB in use on the card"
        if case.get("host_layers"):
            line += (f", {case['host_layers']} layers on the host, "
                     f"{case['transfer_bytes'] / 1e6:.1f} MB a step")
        if "disk" in case:
            disk = case["disk"]
            wanted = case["transfer_bytes"] / case["ms_per_token"] / 1e6
            read = disk["bytes"] / case["ms_per_token"] / 1e6
            line += (f", {disk['layers']} of them on the disk: {wanted:.3f} GB/s of rows, {read:.3f} past the page "
                     f"cache; the disk gives {disk['random_gb_s']:.3f} at random ({read / disk['random_gb_s']:.2f} "
                     f"of it), {disk['sequential_gb_s']:.3f} in order")
        if "share_of_h2d" in case:
            line += f", {100 * case['share_of_h2d']:.1f} % of the bus"
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

# Our attention and PyTorch's, alone, on the same shapes: ours by the kernels' own benchmarks.
attention() {
  echo "== attention"
  local of
  for of in attend prefill; do
    if ! "$kernels/cuda_${of}_bench" --json >"$logs/attention_$of.json" \
      2>"$logs/attention_$of.err"; then
      echo "   failed: cuda_${of}_bench: $(tail -1 "$logs/attention_$of.err")"
      bad+=("cuda_${of}_bench")
      return
    fi
    keep "attention_$of" "$logs/attention_$of.json"
  done
  have_python || return 0
  local read
  read=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["read_gb_s"])' \
    "$logs/attention_attend.json")
  "${OMNIKV_PYTHON:-python3}" scripts/gpu_attention_peer.py --read-gb-s "$read" >"$logs/attention_torch.json" \
    2>"$logs/attention_torch.err" || echo "   PyTorch failed: $(tail -1 "$logs/attention_torch.err")"
  python3 - "$logs" <<'PYTHON'
import json, sys
folder = sys.argv[1]
def cases(name):
    try:
        return json.load(open(f"{folder}/attention_{name}.json"))["cases"]
    except ValueError:  # a line that says why there is nothing
        print("   PyTorch:", open(f"{folder}/attention_{name}.json").read().strip() or "nothing")
        return []
key = lambda c: (c["kind"], c.get("rows", 1), c["context"])
peers = {}
for case in cases("torch"):
    peers.setdefault(key(case), []).append(case)
table = []
for ours in cases("attend") + cases("prefill"):
    unit, name = ("gb_s", "GB/s") if ours["kind"] == "decode" else ("tflop_s", "TFLOP/s")
    line = f"   {ours['kind']:8} {ours.get('rows', 1):>6} x {ours['context']:<7} {ours[unit]:7.0f} {name}"
    row = dict(ours)
    for peer in peers.get(key(ours), []):
        if unit not in peer:
            line += f", {peer['backend']}: {list(peer['not_run'].values())[0]}"
            continue
        row["times_" + peer["backend"]] = ours[unit] / peer[unit]
        line += (f", {peer['backend']} ({peer['form']}) {peer[unit]:.0f}: "
                 f"ours {ours[unit] / peer[unit]:.2f} x")
    table.append(row)
    print(line)
json.dump({"cases": table}, open(f"{folder}/attention.json", "w"))
PYTHON
}

# Hits by the size of working sets, of the shipped model on real text; the card's own sets beside them.
hits() {
  echo "== hits"
  local ask=("$omnikv" bench --hits --device cuda --place host --context "8192,24576" --working-set 2048)
  if ! "${ask[@]}" --json >"$logs/hits.json" 2>"$logs/hits.err"; then
    echo "   failed: $(tail -1 "$logs/hits.err")"
    bad+=("hits")
    return
  fi
  keep hits "$logs/hits.json"
  "${ask[@]}" 2>>"$logs/hits.err" | sed 's/^/   /'
}

filters=(--policies omnikv --set "filters=2,8,18" --set budget=2048)
if measure full; then
  bench full --context 16,4096,131072 --policies full --steps 48
  done_measuring
fi
if measure omnikv; then
  bench omnikv_after1 --context 131072 "${filters[@]}" --set dense_after_filter=1 --steps 48
  bench omnikv_after0 --context 131072 "${filters[@]}" --set dense_after_filter=0 --steps 48
  bench omnikv_32k_batch8 --context 32768 --batch 8 "${filters[@]}" --set dense_after_filter=1 --steps 48
  done_measuring
fi
if measure host; then
  for hits in 0 0.3 0.6; do
    bench "host_after1_hits$hits" --context 131072 "${filters[@]}" --set dense_after_filter=1 --place host \
      --hit-rate $hits --steps 48
  done
  for hits in 0.6 0.9; do
    bench "host_after0_hits$hits" --context 131072 "${filters[@]}" --set dense_after_filter=0 --place host \
      --hit-rate $hits --steps 48
  done
  done_measuring
fi
# Eight sequences, with sparse layers on the card and on the host: scripts/fetch_model.py reads it.
if measure batches; then
  batch=(--context 32768 --batch 8 --steps 48)
  bench full_batch8 "${batch[@]}" --policies full
  bench omnikv_batch8 "${batch[@]}" "${filters[@]}" --set dense_after_filter=1
  for hits in 0.95 0.85 0.6; do
    bench "host_batch8_hits$hits" "${batch[@]}" "${filters[@]}" --set dense_after_filter=1 --place host \
      --hit-rate $hits
  done
  bench full_2k_batch64 --context 2048 --batch 64 --policies full --steps 48
  bench full_2k_batch16 --context 2048 --batch 16 --policies full --steps 48
  # Two policies in one step; a prompt beside decoding sequences.
  mix=(--context 8192 --steps 48 --set "filters=2,8,18" --set budget=2048 --set dense_below=0)
  bench mix_full16 --batch 16 --context 8192 --steps 48 --policies full
  bench mix_omnikv16 --batch 16 "${mix[@]}" --policies omnikv
  bench mix_8_and_8 --batch 8 "${mix[@]}" --policies full,omnikv --mix
  beside=(--batch 8 --context 8192 --policies full --beside 32768)
  for rows in 120 248; do bench "beside_32k_rows$rows" "${beside[@]}" --beside-rows $rows; done
  bench beside_32k_rows120_together "${beside[@]}" --beside-rows 120 --together
  bench beside_32k_paced_together "${beside[@]}" --beside-limit 1.9 --together
  done_measuring
  if have_python; then python3 "$root/scripts/fetch_model.py" "$out/batches.jsonl" | sed 's/^/   /'; fi
fi
# The scheduler of the server: what it costs beside the same sequences without it, and a prompt that
# comes while others decode.
if measure serving; then
  for policy in full omnikv; do
    set_flags=()
    [ $policy = full ] || set_flags=("${filters[@]:2}")
    served=(--context 32768 --batch 8 --policies $policy "${set_flags[@]}" --steps 96)
    bench "batch8_$policy" "${served[@]}"
    bench "scheduler8_$policy" "${served[@]}" --scheduler --token-ms 1000
  done
  bench scheduler16_beside --context 8192 --batch 16 --policies full --steps 96 --scheduler --beside 32768 --together \
    --token-ms 1
  done_measuring
fi
# Requests of 32,000 tokens and their answers within 38 GiB of the card and 96 GiB beside it.
if measure seats; then
  seats=(--ctx 32256 --context 32000 --batch 26 --kv-dtype f16 --gpu-memory 38GiB --host-memory 96GiB
    --chunk 512 --steps 96 --scheduler --token-ms 1000)
  bench seats_full "${seats[@]}" --policies full --place device --kv-tokens $((5 * 32256))
  sparse=(--policies omnikv --set "filters=2,8,18" --set budget=1024 --set dense_after_filter=0 --place host
    --hit-rate 0.85)
  bench seats_omnikv "${seats[@]}" "${sparse[@]}" --working-set 2048 --kv-tokens $((26 * 32256))
  done_measuring
fi
# A context of 130,000 tokens with the K/V of an 8B model (its weights are smaller): computed, and read
# from the store, beside the disk's rate. Writes 20 GB to the disk of the working folder.
if measure store; then
  folder=$(mktemp -d -p .)
  if python3 scripts/make_geometry_model.py "$folder/model" 32 2048 16 8 128 4096 32000 >"$logs/store.err" 2>&1 &&
    timeout "$(left)" python3 scripts/store_speed.py "$omnikv" --tokens 130000 --runs 2 --folder "$folder" -- \
      -m "$folder/model" --device cuda --policy full >"$logs/store.txt" 2>>"$logs/store.err"; then
    cases=1
    while read -r line; do note "\"figure\": $(quote "$line")"; done <"$logs/store.txt"
    sed 's/^/   /' "$logs/store.txt"
  else
    echo "   failed: $(tail -1 "$logs/store.err")"
    bad+=("store ($(tail -1 "$logs/store.err"))")
  fi
  rm -rf "$folder"
  done_measuring
fi
if measure capped; then
  bench omnikv_128k_24g --context 131072 "${filters[@]}" --set dense_after_filter=0 --gpu-memory 24GiB \
    --steps 48
  bench omnikv_450k_40g --context 460800 "${filters[@]}" --set dense_after_filter=0 --gpu-memory 40GiB \
    --steps 48
  done_measuring
fi
# A context that fits neither the card nor the host's memory, with made-up K/V: rows come from the
# disk of the working folder (or OMNIKV_KV_FOLDER), beside its rate in the same run. Writes as many
# bytes there as K/V of OMNIKV_DISK_CONTEXT tokens take (262,144: up to 27 GB). Where the page cache
# has room for them, OMNIKV_DROP_CACHES=1 empties it all the time, as root.
if measure disk; then
  folder=${OMNIKV_KV_FOLDER:-$(mktemp -d -p .)}
  context=${OMNIKV_DISK_CONTEXT:-262144}
  there=(--context "$context" --gpu-memory 24GiB --host-memory 8GiB --kv-folder "$folder" --kv-dtype f16)
  sparse=("${filters[@]}" --set dense_after_filter=0 --steps 32)
  dropping=''
  if [ -n "${OMNIKV_DROP_CACHES:-}" ]; then
    while sync -f "$folder" && echo 1 >/proc/sys/vm/drop_caches; do sleep 0.05; done &
    dropping=$!
  fi
  bench disk_in_memory "${there[@]:0:4}" --host-memory 96GiB --kv-dtype f16 "${sparse[@]}" --hit-rate 0.85
  for hits in 0.85 0.95; do bench "disk_hits$hits" "${there[@]}" "${sparse[@]}" --hit-rate $hits; done
  bench disk_brutal "${there[@]}" --policies brutal_offload --steps 3
  [ -z "$dropping" ] || kill "$dropping"
  [ -n "${OMNIKV_KV_FOLDER:-}" ] || rm -rf "$folder"
  done_measuring
fi
if measure brutal; then
  for ahead in 1 4; do
    bench "brutal_ahead$ahead" --context 131072 --policies brutal_offload --set layers=24 \
      --set ahead=$ahead --steps 16
  done
  bench brutal_paper --context 131072 --policies brutal_offload --set layers=20 --set ahead=4 --steps 16
  bench brutal_128k_24g --context 131072 --policies brutal_offload --gpu-memory 24GiB --steps 16
  done_measuring
fi
if measure prefill; then
  bench prefill --prefill 32768,131072 --policies full --repeats 2
  bench prefill_host --prefill 131072 "${filters[@]}" --place host --repeats 2
  done_measuring
fi
# Published shapes beside the one of the other parts, batches and Q8_0.
if measure shapes; then
  for shape in qwen2.5-7b llama-3.2-3b phi-3-mini gemma-2-2b; do
    geometry=$shapes/$shape.json
    bench "$shape" --context 4096,32768 --prefill 16384 --policies full --steps 48 --repeats 2
  done
  geometry=$shapes/llama-3.2-3b.json
  bench llama-3.2-3b_omnikv --context 4096,8192 --policies full,omnikv --steps 48
  geometry=llama3-8b
  bench batch16 --context 8192 --batch 16 --policies full --steps 48
  format=q8_0
  bench q8_0 --context 4096 --policies full --steps 64
  format=bf16
  done_measuring
fi
# Every policy at two lengths, each in a process of its own, so that the most memory in use on the
# card is the policy's. What differs between the lengths is what a token holds.
if measure policies; then
  gates=$logs/gates.tsv  # half of the heads stream, no two layers alike
  awk 'BEGIN {for (l = 0; l < 32; ++l) for (h = 0; h < 8; ++h)
    printf "%s%s", (5 * l + 3 * h) % 8 < 4, h < 7 ? "\t" : "\n"}' >"$gates"
  while read -r name policy settings; do
    set_flags=()
    for setting in $settings; do set_flags+=(--set "$setting"); done
    for context in 32768 131072; do
      bench "policy_${name}_$context" --policies "$policy" "${set_flags[@]}" --context "$context" --steps 24 \
        --watch-memory
    done
  done <<POLICIES
full full
omnikv omnikv
omnikv_per_head omnikv lists=per_kv_head
omnikv_top_p omnikv top_p=0.95
omnikv_indexed omnikv dense=indexed
kascade kascade
quest quest
quest_mean_std quest score=mean_std
blocks blocks
blocks_quest blocks representative=quest
infllm infllm
kcache kcache
duo duo gates=$gates
omnikv_duo omnikv_duo gates=$gates
kvzip kvzip
streaming streaming
strided strided
h2o h2o
tova tova
snapkv snapkv
pyramidkv pyramidkv
expected_attention expected_attention
knorm knorm
keydiff keydiff
full_again full
POLICIES
  done_measuring
fi
# The table of KCache's paper: the largest batch, of at most 64, that fits in 64 GiB. Chunks are short,
# since what a prompt works with takes room from K/V.
bench_largest() { # NAME CONTEXT BYTES_PER_TOKEN ARGUMENTS...
  local name=$1 context=$2 batch=$(((64 * 2**30 - 13476831232) / ($2 * $3)))
  shift 3
  for ((batch = batch > 64 ? 64 : batch; batch > 0; --batch)); do
    bench "$name" --context "$context" --batch "$batch" --gpu-memory 64GiB --chunk 512 --steps 16 \
      --kv-dtype f16 "$@"
    grep -q "does not fit" "$logs/$name.err" || return 0
    unset 'bad[-1]'  # refused in a second
  done
  bad+=("$name (no batch fits)")
}
for context in 1024 4096 7168 15360; do
  measure kcache_$context || continue
  geometry=$shapes/llama-2-7b.json
  bench_largest "kcache_full_$context" $context 524288 --policies full
  for first in 0 1 2 3; do
    for budget in 32 64 128; do
      bench_largest "kcache_${context}_L${first}_N$budget" $context $((262144 + 8192 * first)) \
        --policies kcache --set budget=$budget --set first_layers=$first
    done
  done
  done_measuring
done
geometry=llama3-8b
if measure kcache_8b; then
  bench kcache_8b_full --context 15360 --batch 16 --policies full --steps 16
  bench kcache_8b --context 15360 --batch 16 --policies kcache --steps 16
  done_measuring
fi
if measure attention; then
  attention
  if [ -s "$logs/attention.json" ]; then keep attention_compared "$logs/attention.json"; fi
  done_measuring
fi
if measure hits; then
  hits
  done_measuring
fi
exit $failed
