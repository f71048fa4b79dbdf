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
stamp="$version, edits 1"  # counts up when the edits below change

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

# What its JSON strings need to be JSON: replaces the one line that begins with $1 by the file $2.
converter=$work/$root/cpp/json_schema_converter.cc
edit() {
  [ "$(grep -cF -- "$1" "$converter")" = 1 ] || {
    echo "fetch_xgrammar.sh: $converter has not one line with: $1" >&2
    exit 1
  }
  awk -v line="$(grep -nF -- "$1" "$converter" | cut -d: -f1)" -v new="$2" '
    NR == line { while ((getline text < new) > 0) print text; next } { print }
  ' "$converter" >"$converter.new"
  mv "$converter.new" "$converter"
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
edit 'builder_.UpdateRuleBody(kBasicEscape, Choice({escaped_character, unicode_escape}));' "$work/escape"
# Strings of a bounded length: escapes are characters of theirs, control characters are not.
cat >"$work/bounded" <<'CODE'
          // Changed by omnikv: escapes too, and no control characters.
          Choice(
              {builder_.AddCharacterClass({{0, 0x1f}, {'"', '"'}, {'\\', '\\'}}, true),
               Sequence({ByteString("\\"), RuleRef(kBasicEscape)})}
          );
CODE
edit "builder_.AddCharacterClass({{'\"', '\"'}, {'\\\\', '\\\\'}, {'\r', '\r'}, {'\n', '\n'}}, true);" "$work/bounded"
# Keys that are not those of the properties: nor their spelling with escapes.
cat >"$work/keys" <<'CODE'
  // Changed by omnikv: an escape in the middle of a name could spell the name.
  if (node.children.empty())
    choices.push_back(Sequence({ByteString("\\"), RuleRef(kBasicEscape), RuleRef(kBasicStringSub)}));
CODE
edit '  choices.push_back(Sequence({ByteString("\\"), RuleRef(kBasicEscape), RuleRef(kBasicStringSub)}));' "$work/keys"
echo "$stamp" >"$work/$root/complete"
# In one step, so that a fetch that was cut off leaves nothing that looks whole.
rm -rf "$dir"
mkdir -p "$(dirname "$dir")"
mv -T "$work/$root" "$dir"
