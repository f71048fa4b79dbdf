# What gpu_check.sh and gpu_bench.sh share: the command line, the commit, the card, result files.
# Sourced, with `root` (of a source tree or a bundle) and `all_parts` (an array) set.
# shellcheck shell=bash disable=SC2154,SC2034

# Sets `parts` and `out` from [--parts a,b] [--out DIR] [DIR]; --list prints the names of all parts.
read_arguments() {
  parts=("${all_parts[@]}")
  while [ $# -gt 0 ]; do
    case $1 in
      --parts) IFS=, read -ra parts <<<"${2:?--parts needs a list}" && shift ;;
      --out) out=${2:?--out needs a folder} && shift ;;
      --list) printf '%s\n' "${all_parts[@]}" && exit 0 ;;
      -*) echo "${0##*/}: $1 is no option, expected --parts a,b, --out DIR or --list" >&2 && exit 2 ;;
      *) out=$1 ;;
    esac
    shift
  done
  local part
  for part in "${parts[@]}"; do
    [[ " ${all_parts[*]} " == *" $part "* ]] && continue
    echo "${0##*/}: there is no part '$part', expected some of ${all_parts[*]}" >&2 && exit 2
  done
  mkdir -p "$out" || exit 1
  out=$(cd "$out" && pwd)
  logs=$(mktemp -d)
  # What is there when the time is up is kept too.
  trap pack_logs EXIT
  trap 'exit 1' INT TERM
}
wanted() { [[ " ${parts[*]} " == *" $1 "* ]]; }
# All logs as one file.
pack_logs() {
  tar -C "$logs" -czf "$out/logs_${parts[0]}.tar.gz" . 2>/dev/null
  rm -rf "$logs"
}

quote() { # a JSON string
  printf '"%s"' "$(printf '%s' "$1" | tr '\n\t\r' '   ' | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g')"
}
list() { # a JSON array of strings
  local sep='' item
  printf '['
  for item in "$@"; do printf '%s' "$sep"; quote "$item"; sep=', '; done
  printf ']'
}

# The commit that is tested: of a bundle as bundle.sh wrote it; "-modified" where files differ from it.
commit_of() {
  if [ -s "$root/COMMIT" ]; then
    head -1 "$root/COMMIT"
  elif git -C "$root" rev-parse HEAD >/dev/null 2>&1; then
    printf '%s%s\n' "$(git -C "$root" rev-parse HEAD)" \
      "$(git -C "$root" diff --quiet HEAD || echo -modified)"
  else
    echo "${OMNIKV_COMMIT:-unknown}"
  fi
}

limit=${OMNIKV_PART_SECONDS:-480}
# What is left of the part's time, seconds.
left() { echo $((limit - SECONDS + began > 5 ? limit - SECONDS + began : 5)); }

failed=0
rows=()
# begin PART: starts its clock and its result file.
begin() {
  part=$1
  began=$SECONDS
  : "${commit:=$(commit_of)}"
  : "${card:=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)}"
  : >"$logs/$part.lines"
}
# finish ok|FAILED|skipped DETAIL [JSON members]: the part's result, PART.jsonl: one line of it, and one
# for each line of PART.lines (a JSON object), which the part wrote.
finish() {
  local seconds=$((SECONDS - began))
  [ "$1" = FAILED ] && failed=1
  {
    printf '{"part": %s, "kind": %s, "commit": %s, "device": %s, "driver": %s, "ok": %s, ' \
      "$(quote "$part")" "$(quote "$kind")" "$(quote "$commit")" "$(quote "${card%%,*}")" \
      "$(quote "${card##*, }")" \
      "$(case $1 in ok) echo true ;; FAILED) echo false ;; *) echo null ;; esac)"
    printf '"result": %s, "seconds": %d, "detail": %s%s}\n' "$(quote "$1")" "$seconds" \
      "$(quote "$2")" "${3:+, $3}"
    cat "$logs/$part.lines"
  } >"$out/$part.jsonl"
  rm -f "$logs/$part.lines"
  rows+=("$(printf '%-12s %-8s %5d s  %s' "$part" "$1" "$seconds" "$2")")
  printf '%s\n' "${rows[-1]}" >&2
}
# note MEMBERS: one more line of the part's file, of JSON members.
note() { printf '{"of": %s, %s}\n' "$(quote "$part")" "$1" >>"$logs/$part.lines"; }
