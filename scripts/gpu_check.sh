#!/usr/bin/env bash
# Checks omnikv on this machine's NVIDIA card, unattended, and prints a table; exits 1 if anything
# failed.
#
#     scripts/gpu_check.sh [OUT_DIR]
#
# Runs in a source tree (built first, into build/gpu) or in an unpacked bundle (scripts/bundle.sh).
# Needs a driver and nothing else where the programs are built. For each part OUT_DIR (default
# ./gpu_check) gets PART.json and PART.log:
#   machine    the card, its driver
#   build      cmake, of a source tree
#   parity     every op against the double-precision reference
#   backend    memory, recorded steps, leaks; that a machine without a card is told so
#   sanitizer  compute-sanitizer's memcheck, racecheck and initcheck on a sample of the cases
#   robust     late transfers change no bit; every failure ends in a sentence and leaks nothing
#   tiers      sessions with layers on the host answer what others do
#   answers    20 prompts to the shipped model, every policy: the same tokens as on the CPU
#   text       the same of the program itself, in the fast precision too
#   memory     what the driver says the process takes stays under --gpu-memory, in prefill and decode
#
# OMNIKV_PARTS="parity text" runs only those; OMNIKV_MODEL names the model of robust and
# all after tiers; OMNIKV_BUILD the build folder; OMNIKV_SANITIZER_STRIDE how sparse that sample is,
# OMNIKV_SANITIZER_TOOLS which of the three run.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-gpu_check}" || exit 1
out=$(cd "${1:-gpu_check}" && pwd)
parts=${OMNIKV_PARTS:-machine build parity backend sanitizer robust tiers answers text memory}
min_cases=2000
failed=0
rows=()

# --- JSON and the table.

quote() { # a JSON string
  printf '"%s"' "$(printf '%s' "$1" | tr '\n\t\r' '   ' | sed 's/\\/\\\\/g; s/"/\\"/g')"
}
list() { # a JSON array of strings
  local sep='' item
  printf '['
  for item in "$@"; do printf '%s' "$sep"; quote "$item"; sep=', '; done
  printf ']'
}
# finish PART ok|FAILED|skipped DETAIL [JSON members]: the part's file and its row of the table.
finish() {
  local seconds=$((SECONDS - began))
  [ "$2" = FAILED ] && failed=1
  printf '{"part": %s, "result": %s, "seconds": %d, "detail": %s%s}\n' "$(quote "$1")" \
    "$(quote "$2")" "$seconds" "$(quote "$3")" "${4:+, $4}" >"$out/$1.json"
  rows+=("$(printf '%-10s %-8s %5d s  %s' "$1" "$2" "$seconds" "$3")")
  printf '%s\n' "${rows[-1]}" >&2
}
wanted() { [[ " $parts " == *" $1 "* ]]; }
# The value of a member of a JSON object on one line: of an array of numbers, and of a string.
array_of() { sed -n "s/.*\"$1\": *\(\[[-0-9, ]*\]\).*/\1/p" "$2" | tr -d ' '; }
string_of() { sed -n "s/.*\"$1\": *\"\(\([^\"\\\\]\|\\\\.\)*\)\".*/\1/p" "$2"; }
number_of() { sed -n "s/.*\"$1\": *\([-0-9.e+]*\).*/\1/p" "$2"; }

# --- gtest programs.

tests_of() { # PROGRAM: the names of its tests
  "$1" --gtest_list_tests | awk '/^[^ ]/ && /\.$/ {suite = $1} /^  / {print suite $1}'
}
# run_tests PROGRAM LOG: runs it and, if a test ended the program, the tests one by one, so that the
# others are heard of too. Sets passed, failures and skipped.
run_tests() {
  local program=$1 log=$2 name
  timeout 1500 "$program" >"$log" 2>&1
  if [ $? -eq 124 ]; then
    name=$(sed -n 's/^\[ RUN      \] //p' "$log" | tail -1)
    echo "[  FAILED  ] $name (stuck)" >>"$log"
  elif ! grep -q '^\[==========\].* ran' "$log"; then
    printf '\n%s ended early; its tests one by one:\n' "$program" >>"$log"
    for name in $(tests_of "$program"); do
      timeout 120 "$program" --gtest_filter="$name" >"$log.one" 2>&1 ||
        grep -q "^\[  FAILED  \] $name" "$log.one" || echo "[  FAILED  ] $name (ended)" >>"$log.one"
      cat "$log.one" >>"$log"
    done
    rm -f "$log.one"
  fi
  passed=$(sed -n 's/^\[       OK \] \([^ ]*\).*/\1/p' "$log" | sort -u | wc -l)
  mapfile -t failures < <(sed -n 's/^\[  FAILED  \] \([^ ,]*\.[^ ,]*\).*/\1/p' "$log" | sort -u)
  mapfile -t skipped < <(sed -n 's/^\[  SKIPPED \] \([^ ,]*\.[^ ,]*\).*/\1/p' "$log" | sort -u)
}
# finish_tests PART [NOTE]: of what run_tests found.
finish_tests() {
  local members
  members="\"tests_passed\": $passed, \"failed\": $(list "${failures[@]}"), \
\"skipped\": $(list "${skipped[@]}")"
  if [ ${#failures[@]} -gt 0 ]; then
    show_failures "$out/$1.log"
    finish "$1" FAILED "${#failures[@]} tests: ${failures[*]}" "$members"
  elif [ ${#skipped[@]} -gt 0 ] || [ "$passed" -eq 0 ]; then
    finish "$1" FAILED "$passed tests ran, ${#skipped[@]} were skipped" "$members"
  else
    finish "$1" ok "$passed tests${2:-}" "$members"
  fi
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
}

# --- machine

began=$SECONDS
if wanted machine; then
  smi=$(nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader \
    2>"$out/machine.log" | head -1)
  { nvidia-smi; uname -a; lscpu; } >>"$out/machine.log" 2>&1
  if ! command -v nvidia-smi >/dev/null; then
    finish machine skipped "nvidia-smi is not installed; $(nproc) cores"
  elif [ -n "$smi" ]; then
    finish machine ok "$smi, $(nproc) cores" "\"card\": $(quote "$smi"), \"cores\": $(nproc)"
  else
    finish machine FAILED "nvidia-smi shows no card: $(head -1 "$out/machine.log")"
  fi
fi

# --- build

if [ -x "$root/bin/parity_cuda_test" ]; then
  programs=$root/bin
  omnikv=$programs/omnikv
  parity=$programs/parity_cuda_test
  backend=$programs/cuda_backend_test
  robust=$programs/robustness_test
  tiers=$programs/host_layers_test
  answers=$programs/card_text_test
else
  build=${OMNIKV_BUILD:-$root/build/gpu}
  omnikv=$build/tools/omnikv
  parity=$build/tests/backend/parity_cuda_test
  backend=$build/tests/backend/cuda_backend_test
  robust=$build/tests/engine/robustness_test
  tiers=$build/tests/engine/host_layers_test
  answers=$build/tests/engine/card_text_test
  if wanted build; then
    began=$SECONDS
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
    [ "$arch" = 90 ] && arch=90a
    generator=()
    command -v ninja >/dev/null && generator=(-G Ninja)
    if cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DOMNIKV_CUDA=ON \
      -DOMNIKV_CUDA_ARCHS="${arch:-90a}-real" -DOMNIKV_WERROR=OFF >"$out/build.log" 2>&1 &&
      cmake --build "$build" -j "$(nproc)" --target omnikv parity_cuda_test cuda_backend_test \
        robustness_test host_layers_test card_text_test \
        >>"$out/build.log" 2>&1; then
      finish build ok "for sm_${arch:-90a}; $(sed -n 's/^-- \(FlashInfer: o[nf].*\)/\1/p' "$out/build.log")"
    else
      tail -20 "$out/build.log" >&2
      finish build FAILED "$(grep -m1 -iE 'error|not found' "$out/build.log")"
    fi
  fi
fi

# --- parity

if wanted parity; then
  began=$SECONDS
  run_tests "$parity" "$out/parity.log"
  cases=$(sed -n 's/^parity: \([0-9]*\) cases ran on .*/\1/p' "$out/parity.log" |
    awk '{n += $1} END {print n + 0}')
  card=$(sed -n 's/^parity: testing //p' "$out/parity.log" | head -1)
  ops=$(awk '/^parity:   [A-Za-z]+ [0-9]+$/ {n[$2] += $3}
             END {for (op in n) {printf "%s\"%s\": %d", sep, op, n[op]; sep = ", "}}' "$out/parity.log")
  members="\"cases\": $cases, \"ops\": {$ops}, \"card\": $(quote "$card"), \"tests_passed\": $passed, \
\"failed\": $(list "${failures[@]}"), \"skipped\": $(list "${skipped[@]}")"
  if [ ${#failures[@]} -gt 0 ]; then
    show_failures "$out/parity.log"
    finish parity FAILED "${#failures[@]} tests: ${failures[*]}" "$members"
  elif [ ${#skipped[@]} -gt 0 ] || [ "$cases" -lt $min_cases ]; then
    finish parity FAILED "only $cases cases ran, ${#skipped[@]} tests were skipped" "$members"
  else
    finish parity ok "$cases cases on $card" "$members"
  fi
fi

# --- backend

if wanted backend; then
  began=$SECONDS
  run_tests "$backend" "$out/backend.log"
  # As on a machine whose driver finds no card.
  CUDA_VISIBLE_DEVICES='' "$backend" --gtest_filter='NoCudaTest.*' >"$out/backend_no_card.log" 2>&1 ||
    failures+=("NoCudaTest without a card")
  finish_tests backend
fi

# --- sanitizer

if wanted sanitizer; then
  began=$SECONDS
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -z "$sanitizer" ]; then
    finish sanitizer skipped "compute-sanitizer is not installed"
  else
    : >"$out/sanitizer.log"
    detail='' members='' ok=1 none=0
    for tool in ${OMNIKV_SANITIZER_TOOLS:-memcheck racecheck initcheck}; do
      # racecheck takes some thirty times as long as the others.
      export OMNIKV_SWEEP_STRIDE=${OMNIKV_SANITIZER_STRIDE:-14}
      [ $tool = racecheck ] && OMNIKV_SWEEP_STRIDE=$((16 * OMNIKV_SWEEP_STRIDE))
      for program in "$parity" "$backend"; do
        filter='ParitySweepTest.*:ParityDeviceTest.WorkingSet:ParityDeviceTest.FetchRows:ParityDeviceTest.AppendToASlot:ParityTest.PlanRange'
        [ $tool != racecheck ] && filter+=':ParityTest.NextToken*'
        # Initcheck does not see what cuBLASLt writes, which these read in prompts; with few rows they
        # are part of the other program's steps.
        [ $tool = initcheck ] && filter+='-ParitySweepTest.NormGatedFfn*:ParitySweepTest.NormQkvRopeAppend*'
        [ "$program" = "$backend" ] && filter='*FiftyReplays*:*NeedNoHost*'
        # Racecheck looks into single kernels, which the other program has; the recorded steps of this
        # one did not end under it in four minutes.
        [ "$tool:$program" = "racecheck:$backend" ] && continue
        log=$out/sanitizer_$tool.$(basename "$program").log
        timeout 400 "$sanitizer" --tool "$tool" --error-exitcode 99 "$program" \
          --gtest_filter="$filter" >"$log" 2>&1
        code=$?
        # racecheck ends in another summary than the others.
        summary=$(grep -E '(ERROR|RACECHECK) SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
        if grep -qiE 'Device not supported|not supported on this' "$log"; then
          none=1
          summary='does not support this machine'
        elif [ $code -ne 0 ]; then
          ok=0
          summary="exit code $code: $summary"
          grep -m5 -A8 '^========= [A-Z]' "$log" | head -40 >&2
        fi
        key=${tool}_$(basename "$program")
        members+="${members:+, }$(quote "$key"): $(quote "$summary")"
        echo "$key: $summary" >>"$out/sanitizer.log"
      done
      detail+="${detail:+, }$tool"
    done
    unset OMNIKV_SWEEP_STRIDE
    if [ $ok -eq 0 ]; then
      finish sanitizer FAILED "see sanitizer.log" "$members"
    elif [ $none -eq 1 ]; then
      finish sanitizer skipped "compute-sanitizer does not support this machine" "$members"
    else
      finish sanitizer ok "$detail: nothing found" "$members"
    fi
  fi
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
  began=$SECONDS
  if [ -z "$model" ]; then
    finish robust skipped "the shipped model is not here: give OMNIKV_MODEL=FILE.gguf"
  else
    filter='Delays.*:*cuda*'
    # A bundle has no random models, only the shipped one.
    [ -d "$root/tests/golden/policy_model" ] || filter='Delays.*'
    export OMNIKV_MODEL=$model GTEST_FILTER=$filter
    run_tests "$robust" "$out/robust.log"
    unset GTEST_FILTER
    finish_tests robust "; $(sed -n 's/^\([0-9]* steps after .*\)/\1/p' "$out/robust.log" | head -1)"
  fi
fi

# --- tiers

if wanted tiers; then
  began=$SECONDS
  export GTEST_FILTER='*cuda*'
  run_tests "$tiers" "$out/tiers.log"
  unset GTEST_FILTER
  finish_tests tiers
fi

# --- answers

if wanted answers; then
  began=$SECONDS
  if [ -z "$model" ] || [ -z "$document" ]; then
    finish answers skipped "the shipped model or document is not here: give OMNIKV_MODEL=FILE.gguf"
  else
    export OMNIKV_MODEL=$model OMNIKV_DOCUMENT=$document
    run_tests "$answers" "$out/answers.log"
    finish_tests answers "; $(sed -n 's/^\([0-9]* of [0-9]* answers are .*\)/\1/p' "$out/answers.log" | head -1)"
  fi
fi

# --- text

# answer DEVICE POLICY PRECISION [flags]: to the prompt, one JSON object in DEVICE.json.
answer() {
  local to=$work/$1.json
  timeout 600 "$omnikv" run -m "$model" --device "$1" --policy "$2" --precision "$3" "${@:4}" \
    -f "$work/prompt.txt" -n 24 --json >"$to" 2>>"$out/text.log" || : >"$to"
}
if wanted text; then
  began=$SECONDS
  : >"$out/text.log"
  if [ -z "$model" ] || [ -z "$document" ]; then
    finish text skipped "the shipped model or document is not here: give OMNIKV_MODEL=FILE.gguf"
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
      finish text ok "$same of $asked answers are the CPU's, token by token" "\"cases\": [$cases]"
    else
      head -5 "$out/text.log" >&2
      finish text FAILED "$same of $asked answers are the CPU's; not: $(
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
  local name=$1 cap=$2 before peak by pid samplers=() log=$out/memory_$1
  shift 2
  before=$(card_memory)
  if [ -n "$before" ]; then
    nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits -lms 100 >"$log.card" &
    samplers+=($!)
    nvidia-smi -i 0 --query-compute-apps=pid,used_memory --format=csv,noheader,nounits -lms 100 \
      >"$log.processes" &
    samplers+=($!)
  fi
  timeout 900 "$omnikv" bench --device cuda --gpu-memory "${cap}GiB" --policies omnikv --steps 32 \
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
  began=$SECONDS
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
    finish memory FAILED "${bad[*]}; $measured" "\"cases\": [$cases]"
  else
    finish memory ok "$measured" "\"cases\": [$cases]"
  fi
fi

printf '\n%-10s %-8s %7s  %s\n' part result time detail
printf '%s\n' "${rows[@]}"
exit $failed
