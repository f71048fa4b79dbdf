#!/usr/bin/env bash
# Puts the C++ sources of xgrammar into a folder, from its sdist on PyPI, with the licences of what
# is taken. Does nothing, quickly, when they are there.
#
#     scripts/fetch_xgrammar.sh DIR [DOWNLOADS]
#
# pip fetches from wherever it is set up to (index, proxy, certificates), and checks the hash.
# DOWNLOADS keeps the archive for other builds; one put there by hand is taken as well.
set -euo pipefail

version=0.2.8
sha256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80
stamp="$version, edits 4"  # counts up when the edits below change

[ $# -eq 1 ] || [ $# -eq 2 ] || {
  echo "usage: fetch_xgrammar.sh DIR [DOWNLOADS]" >&2
  exit 2
}
dir=$1
[ "$(cat "$dir/complete" 2>/dev/null)" = "$stamp" ] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
downloads=${2:-$work}
mkdir -p "$downloads"
archive=$downloads/xgrammar-$version.tar.gz
good() { echo "$sha256  $archive" | sha256sum --check --status 2>/dev/null; }

if ! good; then
  rm -f "$archive"
  # pip asks the sdist's build backend for metadata before it keeps the file, which would install
  # that backend and run it. One of our own, with the same name, says what pip wants to hear.
  mkdir -p "$work/backend/scikit_build_core"
  touch "$work/backend/scikit_build_core/__init__.py"
  cat >"$work/backend/scikit_build_core/build.py" <<BACKEND
import pathlib


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder) / "xgrammar-$version.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: xgrammar\nVersion: $version\n"
    (info / "METADATA").write_text(text)
    return info.name


def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise RuntimeError("only fetched here")
BACKEND
  echo "xgrammar==$version --hash=sha256:$sha256" >"$work/pin.txt"
  PYTHONPATH=$work/backend python3 -m pip download --quiet --disable-pip-version-check --no-deps \
    --require-hashes --no-binary=:all: --no-build-isolation --ignore-requires-python \
    --retries 1 --timeout 20 --dest "$downloads" --requirement "$work/pin.txt" >&2
  good || {
    echo "fetch_xgrammar.sh: pip did not bring $archive with the expected hash" >&2
    exit 1
  }
fi

root=xgrammar-$version
tar -xzf "$archive" -C "$work" "$root/cpp" "$root/include" "$root/LICENSE" "$root/NOTICE" \
  "$root/3rdparty/picojson/picojson.h" "$root/3rdparty/dlpack/include" "$root/3rdparty/dlpack/LICENSE"
rm -rf "$work/$root/cpp/tvm_ffi" "$work/$root/cpp/CMakeLists.txt"  # bindings

# Edits that its answers need to be what was asked for: in cpp/$1, the one line that has the text $2
# becomes the file $3.
edit() {
  local file=$work/$root/cpp/$1
  [ "$(grep -cF -- "$2" "$file")" = 1 ] || {
    echo "fetch_xgrammar.sh: $file has not one line with: $2" >&2
    exit 1
  }
  awk -v line="$(grep -nF -- "$2" "$file" | cut -d: -f1)" -v new="$3" '
    NR == line { while ((getline text < new) > 0) print text; next } { print }
  ' "$file" >"$file.new"
  mv "$file.new" "$file"
}

# Escapes: no half of a surrogate pair alone, which is no character.
cat >"$work/escape" <<'CODE'
  // Changed by omnikv: no half of a surrogate pair stands alone.
  int32_t not_d =
      builder_.AddCharacterClass({{'A', 'C'}, {'a', 'c'}, {'E', 'F'}, {'e', 'f'}, {'0', '9'}});
  int32_t letter_d = builder_.AddCharacterClass({{'D', 'D'}, {'d', 'd'}});
  int32_t below_8 = builder_.AddCharacterClass({{'0', '7'}});
  int32_t from_8_to_b = builder_.AddCharacterClass({{'8', '9'}, {'A', 'B'}, {'a', 'b'}});
  int32_t from_c = builder_.AddCharacterClass({{'C', 'F'}, {'c', 'f'}});
  const int32_t hex = hexadecimal_character;
  builder_.UpdateRuleBody(
      kBasicEscape,
      Choice(
          {escaped_character,
           Sequence({ByteString("u"), not_d, hex, hex, hex}),
           Sequence({ByteString("u"), letter_d, below_8, hex, hex}),
           Sequence(
               {ByteString("u"),
                letter_d,
                from_8_to_b,
                hex,
                hex,
                ByteString("\\u"),
                letter_d,
                from_c,
                hex,
                hex}
           )}
      )
  );
CODE
edit json_schema_converter.cc 'builder_.UpdateRuleBody(kBasicEscape, Choice({escaped_character, unicode_escape}));' "$work/escape"
# Strings of a bounded length: no control characters. (Escapes would cost 250 ms a mask.)
cat >"$work/bounded" <<'CODE'
          // Changed by omnikv: no control characters.
          builder_.AddCharacterClass({{0, 0x1f}, {'"', '"'}, {'\\', '\\'}}, true);
CODE
edit json_schema_converter.cc "builder_.AddCharacterClass({{'\"', '\"'}, {'\\\\', '\\\\'}, {'\r', '\r'}, {'\n', '\n'}}, true);" "$work/bounded"
# Keys that are not those of the properties: nor their spelling with escapes.
cat >"$work/keys" <<'CODE'
  // Changed by omnikv: an escape in the middle of a name could spell the name.
  if (node.children.empty())
    choices.push_back(Sequence({ByteString("\\"), RuleRef(kBasicEscape), RuleRef(kBasicStringSub)}));
CODE
edit json_schema_converter.cc '  choices.push_back(Sequence({ByteString("\\"), RuleRef(kBasicEscape), RuleRef(kBasicStringSub)}));' "$work/keys"
# Regular expressions: nothing of X comes where (X)? is left out, nor of one end of X after another in
# (X){n,}: an end may have ways on.
cat >"$work/optional" <<'CODE'
    // Changed by omnikv: the end may have ways on, so a new start is an end of its own.
    const int new_start = fsm.AddState();
    fsm.AddEpsilonEdge(new_start, start_);
    auto ends = ends_;
    ends.push_back(new_start);
    return FSMWithStartEnd(fsm, new_start, ends);
CODE
edit fsm.cc 'fsm.AddEpsilonEdge(start_, ends_.front());' "$work/optional"
cat >"$work/repeat" <<'CODE'
  // Changed by omnikv: n times, then any number.
  if (!has_upper_bound) {
    std::vector<FSMWithStartEnd> parts(state.lower_bound, child);
    parts.push_back(child.Star());
    return ResultOk(FSMWithStartEnd::Concat(parts));
  }
CODE
edit fsm_builder.cc '  // Handling {n,}' "$work/repeat"
# Characters: only what UTF-8 has, neither halves of surrogate pairs nor longer forms than needed.
cat >"$work/widths" <<'CODE'
  // Changed by omnikv: without the halves of surrogate pairs.
  constexpr uint32_t width_ends[] = {0x7F, 0x7FF, 0xD7FF, 0xFFFF, 0x10FFFF};
CODE
edit grammar_functor.cc 'constexpr uint32_t width_ends[] = {0x7F, 0x7FF, 0xFFFF, 0x10FFFF};' "$work/widths"
cat >"$work/skip" <<'CODE'
  for (uint32_t width_end : width_ends) {
    if (low >= 0xD800 && low <= 0xDFFF) low = 0xE000;
CODE
edit grammar_functor.cc '  for (uint32_t width_end : width_ends) {' "$work/skip"
cat >"$work/ranges" <<'CODE'
      // Changed by omnikv: one width at a time, without the halves of surrogate pairs.
      uint32_t first = std::max<uint32_t>(low, kMax1ByteUnicode + 1);
      for (uint32_t width_end : {0x7FFu, 0xD7FFu, 0xFFFFu, 0x10FFFFu}) {
        if (first >= 0xD800 && first <= 0xDFFF) first = 0xE000;
        if (first > high || first > width_end) continue;
        uint32_t last = std::min<uint32_t>(high, width_end);
        AddPackedUTF8RangeEdges(
            *fsm, from, to, CodepointToPackedUTF8(first), CodepointToPackedUTF8(last)
        );
        first = last + 1;
      }
      continue;
      uint32_t multi_byte_low = std::max<uint32_t>(low, kMax1ByteUnicode + 1);
CODE
edit fsm_builder.cc 'uint32_t multi_byte_low = std::max<uint32_t>(low, kMax1ByteUnicode + 1);' "$work/ranges"
echo "$stamp" >"$work/$root/complete"
# In one step, so that a fetch that was cut off leaves nothing that looks whole.
rm -rf "$dir"
mkdir -p "$(dirname "$dir")"
mv -T "$work/$root" "$dir"
