#!/usr/bin/env bash
# Checks omnikv on this machine's NVIDIA card, unattended, in named parts of at most eight minutes
# each, and prints a table; exits 1 if anything failed.
#
#     scripts/gpu_check.sh [--parts a,b] [--out DIR]      --list: the names of all parts
#
# Runs in a source tree (built first, into build/gpu or $OMNIKV_BUILD) or in an unpacked bundle
# (scripts/bundle.sh). Needs a driver and nothing else where the programs are built. DIR (default
# ./gpu_check) gets a file PART.jsonl for each part (its result with commit, card and counts, then a
# line for each figure) and all logs in logs_*.tar.gz. Parts may come from different runs on one
# commit: scripts/gpu_join.py joins them, and says which are missing.
#   machine    the card, its driver
#   build      cmake, of a source tree
#   parity     every op against the double-precision reference
#   backend    memory, recorded steps, leaks; that a machine without a card is told so
#   goldens    every family against transformers, tiny and with published heads, with the kernels
#              that served; the policies against their oracle in NumPy
#   policies   what every policy must keep
#   engine     sessions, batches, steps that run ahead, working sets of other sizes
#   scheduler  requests in a full house get what they get alone: joins, leaves, preemption, the store
#   pictures   what each layer reads, as the page shows it
#   passes     the policy that reads its prompt again
#   held       what every policy holds, as the driver counts it, against formulas
#   formats    logits of every policy with K/V in blocks of few bits, beside f16
#   tiers      sessions with layers on the host, or on a disk, answer what others do
#   robust     late transfers change no bit; every failure ends in a sentence and leaks nothing
#   answers    prompts to the shipped model, every policy: the same tokens as on the CPU
#   text       the same of the program itself, in the fast precision too
#   memory     what the driver says the process takes stays under --gpu-memory, in prefill and decode
#   memcheck, racecheck, initcheck    compute-sanitizer's, on a sample of the cases
#
# OMNIKV_MODEL names the model of robust, answers, text and memory; OMNIKV_SANITIZER_STRIDE is how
# sparse the sanitizers' sample is, OMNIKV_PART_SECONDS (480) how long a part may take.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
kind=check
all_parts=(machine build parity backend goldens policies engine scheduler pictures passes held formats tiers robust
  answers text memory memcheck racecheck initcheck)
out=gpu_check
# shellcheck source=scripts/gpu_lib.sh
. "$root/scripts/gpu_lib.sh"
read_arguments "$@"
min_cases=2000

# The value of a member of a JSON object on one line: of an array of numbers, and of a string.
array_of() { sed -n "s/.*\"$1\": *\(\[[-0-9, ]*\]\).*/\1/p" "$2" | tr -d ' '; }
string_of() { sed -n "s/.*\"$1\": *\"\(\([^\"\\\\]\|\\\\.\)*\)\".*/\1/p" "$2"; }
number_of() { sed -n "s/.*\"$1\": *\([-0-9.e+]*\).*/\1/p" "$2"; }

# --- gtest programs.

tests_of() { # PROGRAM FILTER: the names of its tests
  "$1" --gtest_list_tests --gtest_filter="$2" | awk '/^[^ ]/ && /\.$/ {suite = $1} /^  / {print suite $1}'
}
# run_tests PROGRAM [FILTER]: runs it and, if a test ended the program, the tests one by one, so that
# the others are heard of too. Sets log, passed, failures and skipped.
run_tests() {
  local program=$1 filter=${2:-*} name
  log=$logs/$part.log
  timeout "$(left)" "$program" --gtest_filter="$filter" >"$log" 2>&1
  if [ $? -eq 124 ]; then
    name=$(sed -n 's/^\[ RUN      \] //p' "$log" | tail -1)
    echo "[  FAILED  ] $name (stuck)" >>"$log"
  elif ! grep -q '^\[==========\].* ran' "$log"; then
    printf '\n%s ended early; its tests one by one:\n' "$program" >>"$log"
    for name in $(tests_of "$program" "$filter"); do
      timeout "$(left)" "$program" --gtest_filter="$name" >"$log.one" 2>&1 ||
        grep -q "^\[  FAILED  \] $name" "$log.one" || echo "[  FAILED  ] $name (ended)" >>"$log.one"
      cat "$log.one" >>"$log"
    done
    rm -f "$log.one"
  fi
  passed=$(sed -n 's/^\[       OK \] \([^ ]*\).*/\1/p' "$log" | sort -u | wc -l)
  mapfile -t failures < <(sed -n 's/^\[  FAILED  \] \([^ ,]*\.[^ ,]*\).*/\1/p' "$log" | sort -u)
  mapfile -t skipped < <(sed -n 's/^\[  SKIPPED \] \([^ ,]*\.[^ ,]*\).*/\1/p' "$log" | sort -u)
}
# finish_tests [NOTE] [LEAST]: of what run_tests found; LEAST tests, 1 by default, must have passed.
finish_tests() {
  local members
  members="\"tests_passed\": $passed, \"failed\": $(list "${failures[@]}"), \
\"skipped\": $(list "${skipped[@]}")"
  if [ ${#failures[@]} -gt 0 ]; then
    show_failures "$log"
    finish FAILED "${#failures[@]} tests: ${failures[*]}" "$members"
  elif [ ${#skipped[@]} -gt 0 ] || [ "$passed" -lt "${2:-1}" ]; then
    finish FAILED "$passed tests ran, ${#skipped[@]} were skipped, expected at least ${2:-1}" "$members"
  else
    finish ok "$passed tests${1:-}" "$members"
  fi
}
# Lines of the log that begin so, one figure each.
figures() { # PREFIX...
  local prefix line
  for prefix in "$@"; do
    while read -r line; do note "\"figure\": $(quote "$line")"; done < <(grep "^$prefix" "$log")
  done
}
# The largest number that stands before "of the largest logit" in lines with these prefixes.
worst() { # REGEX
  grep -E "$1" "$log" | grep -oE '[0-9.]+e[-+][0-9]+' | sort -g | tail -1
}
# Failures of a log one by one, as "case | backend | what"; the first for whoever sees no more than
# this output.
show_failures() { # LOG
  awk '/ of the maximum|, expected |not repeatable|replay differs|wrote outside|check failed/ {what = $0}
       /parity.cc:[0-9]+: cuda/ {sub(/.*parity.cc:[0-9]+: /, ""); who = $0; next}
       /parity.cc:[0-9]+: / && what {sub(/.*parity.cc:[0-9]+: /, ""); print $0 " | " who " | " what
                                     what = ""}
       /^in the case: / {print $0 " | " what; what = ""}' "$1" >"${1%.log}.failures"
  echo "$(wc -l <"${1%.log}.failures") failures in ${1%.log}.failures, the first of them:" >&2
  cut -c1-240 "${1%.log}.failures" | head -25 >&2
  [ -s "${1%.log}.failures" ] || grep -A12 ': Failure$' "$1" | head -60 >&2
  local line
  while read -r line; do note "\"failure\": $(quote "$line")"; done \
    < <({ head -40 "${1%.log}.failures"; grep -A6 ': Failure$' "$1" | head -120; } | cut -c1-300)
}

# --- machine

if wanted machine; then
  begin machine
  smi=$(nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader \
    2>"$logs/machine.log" | head -1)
  { nvidia-smi; uname -a; lscpu; } >>"$logs/machine.log" 2>&1
  if ! command -v nvidia-smi >/dev/null; then
    finish skipped "nvidia-smi is not installed; $(nproc) cores"
  elif [ -n "$smi" ]; then
    finish ok "$smi, $(nproc) cores" "\"card\": $(quote "$smi"), \"cores\": $(nproc)"
  else
    finish FAILED "nvidia-smi shows no card: $(head -1 "$logs/machine.log")"
  fi
fi

# --- build

tests=(parity_cuda_test cuda_backend_test engine_test scheduler_test read_picture_test policy_test kvzip_test
  kv_format_test held_memory_test robustness_test host_layers_test card_text_test)
if [ -x "$root/bin/parity_cuda_test" ]; then
  program() { echo "$root/bin/$1"; }
  export OMNIKV_TEST_DATA=$root/test_data
else
  build=${OMNIKV_BUILD:-$root/build/gpu}
  program() {
    local folder
    for folder in tools tests/backend tests/engine tests/policy; do
      [ -x "$build/$folder/$1" ] && echo "$build/$folder/$1" && return
    done
    echo "$build/$1"
  }
  if wanted build; then
    begin build
    log=$logs/build.log
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
    [ "$arch" = 90 ] && arch=90a
    generator=()
    command -v ninja >/dev/null && generator=(-G Ninja)
    if cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DOMNIKV_CUDA=ON \
      -DOMNIKV_CUDA_ARCHS="${arch:-90a}-real" -DOMNIKV_WERROR=OFF >"$log" 2>&1 &&
      cmake --build "$build" -j "$(nproc)" --target omnikv "${tests[@]}" >>"$log" 2>&1; then
      finish ok "for sm_${arch:-90a}; $(sed -n 's/^-- \(FlashInfer: o[nf].*\)/\1/p' "$log")"
    else
      tail -20 "$log" >&2
      finish FAILED "$(grep -m1 -iE 'error|not found' "$log")"
    fi
  fi
fi
omnikv=$(program omnikv)

# --- parity

if wanted parity; then
  begin parity
  run_tests "$(program parity_cuda_test)"
  cases=$(sed -n 's/^parity: \([0-9]*\) cases ran on .*/\1/p' "$log" |
    awk '{n += $1} END {print n + 0}')
  tested=$(sed -n 's/^parity: testing //p' "$log" | head -1)
  ops=$(awk '/^parity:   [A-Za-z]+ [0-9]+$/ {n[$2] += $3}
             END {for (op in n) {printf "%s\"%s\": %d", sep, op, n[op]; sep = ", "}}' "$log")
  members="\"cases\": $cases, \"ops\": {$ops}, \"card\": $(quote "$tested"), \"tests_passed\": $passed, \
\"failed\": $(list "${failures[@]}"), \"skipped\": $(list "${skipped[@]}")"
  if [ ${#failures[@]} -gt 0 ]; then
    show_failures "$log"
    finish FAILED "${#failures[@]} tests: ${failures[*]}" "$members"
  elif [ ${#skipped[@]} -gt 0 ] || [ "$cases" -lt $min_cases ]; then
    finish FAILED "only $cases cases ran, ${#skipped[@]} tests were skipped" "$members"
  else
    finish ok "$cases cases on $tested" "$members"
  fi
fi

# --- backend

if wanted backend; then
  begin backend
  run_tests "$(program cuda_backend_test)"
  # As on a machine whose driver finds no card.
  CUDA_VISIBLE_DEVICES='' "$(program cuda_backend_test)" --gtest_filter='NoCudaTest.*' \
    >"$logs/backend_no_card.log" 2>&1 || failures+=("NoCudaTest without a card")
  finish_tests
fi

# --- goldens, policies, engine: the same tests as on the CPU, on the card

if wanted goldens; then
  begin goldens
  run_tests "$(program engine_test)" '*Family*_cuda:*Heads*_cuda:*PolicyOracle*cuda*'
  figures golden: heads: kernels: oracle:
  finish_tests "; largest errors of a logit: tiny $(worst '^golden: .*full, K/V f32') in f32, \
$(worst '^golden: .*fast') fast; published heads $(worst '^heads: .*f32 K/V') in f32, \
$(worst '^heads: .*f16 K/V, (f32|8|16)') over f16 K/V, $(worst '^heads: .*fast') fast; \
oracle $(worst '^oracle:')" 50
fi
if wanted policies; then
  begin policies
  run_tests "$(program policy_test)" '*EveryPolicy*_cuda'
  # Some tests have nothing to do for a policy, on any device.
  mapfile -t skipped < <(awk '/: Skipped$/ {getline; why = $0}
    /^\[  SKIPPED \] .*ms\)/ && why !~ /is exempt|has no layers that read a selection|drops nothing|tells no KV heads apart/ {print $4}' "$log")
  figures house:
  finish_tests "; $(worst '^house:') of the largest logit at most" 20
fi
if wanted engine; then
  begin engine
  run_tests "$(program engine_test)" '*/cuda'
  finish_tests "" 30
fi

if wanted scheduler; then
  begin scheduler
  run_tests "$(program scheduler_test)" '*/cuda*'
  finish_tests "" 15
fi
if wanted pictures; then
  begin pictures
  run_tests "$(program read_picture_test)" '*/cuda*'
  finish_tests "" 5
fi

if wanted passes; then
  begin passes
  run_tests "$(program kvzip_test)" '*cuda*'
  finish_tests
fi
if wanted held; then
  begin held
  # brutal_offload says why it is left out.
  run_tests "$(program held_memory_test)" '*_cuda:-*brutal_offload*'
  finish_tests "" 30
fi
if wanted formats; then
  begin formats
  run_tests "$(program kv_format_test)" '*cuda_*'
  finish_tests "" 20
fi

model=${OMNIKV_MODEL:-}
for place in "$root/share/omnikv/models" "$root/models" "$PWD/models"; do
  [ -z "$model" ] && [ -f "$place/omnikv-tiny-q8_0.gguf" ] && model=$place/omnikv-tiny-q8_0.gguf
done
document=''
for place in "$root/share/omnikv/examples" "$root/examples"; do
  [ -f "$place/quickstart/document.txt" ] && document=$place/quickstart/document.txt
done

# --- robust

if wanted robust; then
  begin robust
  if [ -z "$model" ]; then
    finish skipped "the shipped model is not here: give OMNIKV_MODEL=FILE.gguf"
  else
    export OMNIKV_MODEL=$model
    run_tests "$(program robustness_test)" 'Delays.*:*cuda*'
    finish_tests "; $(sed -n 's/^\([0-9]* steps after .*\)/\1/p' "$log" | head -1)"
  fi
fi

# --- tiers

if wanted tiers; then
  begin tiers
  run_tests "$(program host_layers_test)" '*cuda*'
  finish_tests
fi

# --- answers

if wanted answers; then
  begin answers
  if [ -z "$model" ] || [ -z "$document" ]; then
    finish skipped "the shipped model or document is not here: give OMNIKV_MODEL=FILE.gguf"
  else
    export OMNIKV_MODEL=$model OMNIKV_DOCUMENT=$document
    run_tests "$(program card_text_test)" "*cuda*"
    finish_tests "; $(sed -n 's/^\([0-9]* of [0-9]* answers are .*\)/\1/p' "$log" | head -1)"
  fi
fi

# --- text

# answer DEVICE POLICY PRECISION [flags]: to the prompt, one JSON object in DEVICE.json.
answer() {
  local to=$work/$1.json
  timeout "$(left)" "$omnikv" run -m "$model" --device "$1" --policy "$2" --precision "$3" "${@:4}" \
    -f "$work/prompt.txt" -n 24 --json >"$to" 2>>"$logs/text.log" || : >"$to"
}
if wanted text; then
  begin text
  : >"$logs/text.log"
  if [ -z "$model" ] || [ -z "$document" ]; then
    finish skipped "the shipped model or document is not here: give OMNIKV_MODEL=FILE.gguf"
  else
    work=$(mktemp -d)
    same=0 asked=0 cases='' differing=()
    # Pieces of the document around its pass key (line 41), of 3,400 and 24,000 tokens.
    for lines in 20,80 1,428; do
      { printf 'Read the text below and answer the question.\n\n'
        sed -n "${lines}p" "$document"
        printf '\n\nWhat is the pass key?'; } >"$work/prompt.txt"
      # In full precision all policies must agree with the CPU to the token, whatever they answer;
      # the fast one rounds, and is held to that where the answer is in what the policy reads.
      for how in full:full:device full:brutal_offload:host full:omnikv:device full:omnikv:host full:streaming:device \
        fast:full:device fast:omnikv:device; do
        IFS=: read -r precision policy place <<<"$how"
        asked=$((asked + 1))
        [ "$place" = host ] || answer cpu "$policy" "$precision"  # else: what it has just answered
        answer cuda "$policy" "$precision" --place "$place"
        on_cpu=$(array_of tokens "$work/cpu.json")
        on_cuda=$(array_of tokens "$work/cuda.json")
        verdict=false
        if [ -n "$on_cpu" ] && [ "$on_cpu" = "$on_cuda" ]; then
          verdict=true
          same=$((same + 1))
        else
          differing+=("lines $lines $policy $precision $place")
        fi
        cases+="${cases:+, }{\"lines\": \"$lines\", \"policy\": \"$policy\", \
\"precision\": \"$precision\", \"place\": \"$place\", \"same\": $verdict, \
\"prompt_tokens\": $(number_of prompt_tokens "$work/cuda.json" | grep . || echo 0), \
\"cpu\": \"$(string_of text "$work/cpu.json")\", \"cuda\": \"$(string_of text "$work/cuda.json")\", \
\"cuda_prefill_tok_s\": $(number_of prefill_tok_s "$work/cuda.json" | grep . || echo 0), \
\"cuda_decode_tok_s\": $(number_of decode_tok_s "$work/cuda.json" | grep . || echo 0)}"
      done
    done
    rm -rf "$work"
    if [ $same -eq $asked ]; then
      finish ok "$same of $asked answers are the CPU's, token by token" "\"cases\": [$cases]"
    else
      head -5 "$logs/text.log" >&2
      finish FAILED "$same of $asked answers are the CPU's; not: $(
        IFS=';'
        echo "${differing[*]}"
      )" "\"cases\": [$cases]"
    fi
  fi
fi

# --- memory

# The card's memory in use, MiB, by all processes; nothing where nvidia-smi cannot say.
card_memory() { nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null; }
# under_cap NAME CAP ARGUMENTS...: a benchmark under --gpu-memory CAP (GiB), while the driver is
# asked ten times a second what the process takes. In containers it tells none apart: then all that
# left the card since the start counts, or without nvidia-smi what the program itself was told.
under_cap() {
  local name=$1 cap=$2 before peak by pid samplers=() log=$logs/memory_$1
  shift 2
  before=$(card_memory)
  if [ -n "$before" ]; then
    nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits -lms 100 >"$log.card" &
    samplers+=($!)
    nvidia-smi -i 0 --query-compute-apps=pid,used_memory --format=csv,noheader,nounits -lms 100 \
      >"$log.processes" &
    samplers+=($!)
  fi
  timeout "$(left)" "$omnikv" bench --device cuda --gpu-memory "${cap}GiB" --policies omnikv --steps 32 \
    --watch-memory --json "$@" >"$log.json" 2>"$log.err" &
  pid=$!
  wait $pid
  local code=$?
  [ ${#samplers[@]} -gt 0 ] && kill "${samplers[@]}" && wait "${samplers[@]}" 2>/dev/null
  # The program is timeout's child.
  peak=$(awk -F', *' -v pids=" $pid $(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$log.json") " \
    'index(pids, " " $1 " ") && $2 + 0 > most {most = $2 + 0} END {print most + 0}' \
    "$log.processes" 2>/dev/null || echo 0)
  by=process
  if [ "${peak:-0}" -eq 0 ] && [ -n "$before" ]; then
    peak=$(awk -v before="$before" '$1 - before > most {most = $1 - before} END {print most + 0}' \
      "$log.card")
    by=card
  elif [ "${peak:-0}" -eq 0 ]; then
    peak=$(($(number_of card_peak_bytes "$log.json" | grep . || echo 0) / 1048576))
    by=program
  fi
  local verdict=ok
  if [ $code -ne 0 ]; then
    verdict="failed: $(tail -1 "$log.err")"
  elif [ "$peak" -eq 0 ]; then
    verdict='nothing was measured'
  elif [ "$peak" -gt $((1024 * cap)) ]; then
    verdict='over the cap'
  fi
  [ "$verdict" = ok ] || bad+=("$name ($verdict)")
  measured+="${measured:+, }$name $peak of $((1024 * cap)) MiB"
  cases+="${cases:+, }{\"case\": \"$name\", \"cap_mib\": $((1024 * cap)), \"peak_mib\": $peak, \
\"by\": \"$by\", \"result\": $(quote "$verdict"), \
\"tokens_per_s\": $(number_of tokens_per_s "$log.json" | grep . || echo 0), \
\"prefill_tok_s\": $(number_of prefill_tok_s "$log.json" | grep . || echo 0)}"
}
if wanted memory; then
  begin memory
  bad=() measured='' cases=''
  large=(--geometry llama3-8b --format bf16 --set "filters=2,8,18" --set budget=2048
    --set dense_after_filter=0)
  if [ -n "$model" ]; then
    under_cap shipped_30K 2 -m "$model" --context 30000 --computed
    under_cap shipped_30K_host 2 -m "$model" --context 30000 --computed --place host
  fi
  under_cap 8b_128K 24 "${large[@]}" --context 131072 --computed
  under_cap 8b_256K 40 "${large[@]}" --context 262144 --computed
  under_cap 8b_450K 40 "${large[@]}" --context 460800  # over made-up K/V
  if [ ${#bad[@]} -gt 0 ]; then
    finish FAILED "${bad[*]}; $measured" "\"cases\": [$cases]"
  else
    finish ok "$measured" "\"cases\": [$cases]"
  fi
fi

# --- memcheck, racecheck, initcheck

sanitize() { # TOOL
  begin "$1"
  local tool=$1 name filter summary code ok=1 members=''
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -z "$sanitizer" ]; then
    finish skipped "compute-sanitizer is not installed"
    return
  fi
  # racecheck takes some thirty times as long as the others.
  export OMNIKV_SWEEP_STRIDE=${OMNIKV_SANITIZER_STRIDE:-14}
  [ "$tool" = racecheck ] && OMNIKV_SWEEP_STRIDE=$((16 * OMNIKV_SWEEP_STRIDE))
  for name in parity_cuda_test cuda_backend_test; do
    filter='ParitySweepTest.*:ParityDeviceTest.WorkingSet:ParityDeviceTest.PiecesOfUnits:ParityDeviceTest.FetchRows:ParityDeviceTest.AppendToASlot:ParityTest.PlanRange'
    [ "$tool" != racecheck ] && filter+=':ParityTest.NextToken*'
    # Initcheck does not see what cuBLASLt writes, which these read in prompts; with few rows they
    # are part of the other program's steps.
    [ "$tool" = initcheck ] && filter+='-ParitySweepTest.NormGatedFfn*:ParitySweepTest.NormQkvRopeAppend*'
    [ $name = cuda_backend_test ] && filter='*FiftyReplays*:*NeedNoHost*'
    # Racecheck looks into single kernels, which the other program has; the recorded steps of this
    # one did not end under it in four minutes.
    [ "$tool:$name" = racecheck:cuda_backend_test ] && continue
    log=$logs/$tool.$name.log
    timeout "$(left)" "$sanitizer" --tool "$tool" --error-exitcode 99 "$(program $name)" \
      --gtest_filter="$filter" >"$log" 2>&1
    code=$?
    # racecheck ends in another summary than the others.
    summary=$(grep -E '(ERROR|RACECHECK) SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
    if grep -qiE 'Device not supported|not supported on this' "$log"; then
      finish skipped "compute-sanitizer does not support this machine"
      return
    elif [ $code -ne 0 ]; then
      ok=0
      summary="exit code $code: $summary"
      grep -m5 -A8 '^========= [A-Z]' "$log" | head -40 >&2
    fi
    members+="${members:+, }$(quote "$name"): $(quote "$summary")"
  done
  unset OMNIKV_SWEEP_STRIDE
  if [ $ok -eq 1 ]; then finish ok "nothing found" "$members"; else finish FAILED "$members" "$members"; fi
}
for tool in memcheck racecheck initcheck; do
  if wanted $tool; then sanitize $tool; fi
done

printf '\n%-12s %-8s %7s  %s\n' part result time detail
printf '%s\n' "${rows[@]}"
exit $failed
