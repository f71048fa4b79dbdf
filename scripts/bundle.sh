#!/usr/bin/env bash
# Builds omnikv for every supported NVIDIA architecture and packs it with what it needs: a folder
# that runs with a driver and no CUDA installed, on systems not much older than this one (the last
# line says what it needs; built on Debian 12: Ubuntu 22.04 and newer).
#
#     scripts/bundle.sh [--archs LIST] [--with-model] [--without-flashinfer] [--build DIR] [OUT.tar.xz]
#
# --archs       as CMAKE_CUDA_ARCHITECTURES; "90a-real" alone builds quickly
# --with-model  with the shipped model, 30 MB more
# --without-flashinfer  without its kernel for prompts on Hopper, which takes minutes to compile
# --build       the build folder (default build/bundle)
#
# For checks on a Hopper card, FlashInfer's kernel included: --archs 90a-real --with-model.
#
# In it: bin/ the program, the tests that run on a card and the benchmarks of attention alone, lib/
# shared libraries, share/ the shipped document (and model), test_data/ the goldens, scripts/
# gpu_check.sh, gpu_bench.sh and what they take, licenses/, COMMIT. The C and C++ runtimes are the machine's: ours would need a newer glibc than the program
# does, and would keep the machine's own libraries, which may be newer, from being opened. cuBLASLt,
# which multiplies the rows of prompts, is taken from the machine where it is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

archs="80-real;86-real;89-real;90a-real;100-real;120-real;120-virtual"
build=$root/build/bundle
with_model=0
flashinfer=AUTO
out=''
while [ $# -gt 0 ]; do
  case $1 in
    --archs) archs=${2:?--archs needs a list} && shift ;;
    --build) build=${2:?--build needs a folder} && shift ;;
    --with-model) with_model=1 ;;
    --without-flashinfer) flashinfer=OFF ;;
    -*) echo "bundle.sh: $1 is no option" >&2 && exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done

version=$(sed -n 's/^project(omnikv VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")
name=omnikv-$version-linux-$(uname -m)-cuda
out=$(realpath -m "${out:-$root/build/$name.tar.xz}")

generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
# An rpath rather than a runpath: the libraries find one another by it too.
# shellcheck disable=SC2016  # $ORIGIN is the loader's
cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DOMNIKV_CUDA=ON \
  -DOMNIKV_CUDA_ARCHS="$archs" -DOMNIKV_FLASHINFER=$flashinfer -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
  -DCMAKE_INSTALL_RPATH='$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags |
  { grep FlashInfer || true; }
programs=(tools/omnikv tests/backend/{parity_cuda,cuda_backend}_test tests/policy/policy_test
  tests/engine/{engine,kvzip,kv_format,robustness,host_layers,card_text,scheduler,read_picture}_test bench/cuda_{attend,prefill,score,select}_bench)
cmake --build "$build" -j "$(nproc)" --target "${programs[@]##*/}"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
top=$stage/$name
mkdir -p "$top"/{bin,lib,licenses,scripts,share/omnikv/examples}
for program in "${programs[@]}"; do
  strip -o "$top/bin/${program##*/}" "$build/$program"
done
cp "$root"/scripts/gpu_{check,bench,lib}.sh "$root"/scripts/{gpu_join,gpu_attention_peer,fetch_model,mutants,faults}.py \
  "$top/scripts/"
cp -r "$root/examples/quickstart" "$top/share/omnikv/examples/"
cp -r "$root/bench/geometries" "$top/share/omnikv/"
{
  git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown
} | sed "s/\$/$(git -C "$root" diff --quiet HEAD 2>/dev/null || echo -modified)/" >"$top/COMMIT"
# Where tests look for the repository's files.
mkdir -p "$top/test_data/tests"
cp -r "$root/tests/golden" "$top/test_data/tests/"
ln -s ../share/omnikv/models ../share/omnikv/examples "$top/test_data/"
cp "$root/LICENSE" "$root/NOTICE" "$root/README.md" "$top/"
if [ $with_model -eq 1 ]; then
  mkdir "$top/share/omnikv/models"
  cp "$root"/models/omnikv-tiny-q8_0.{gguf,duo.tsv,kascade.tsv} "$top/share/omnikv/models/"
fi

# The licence that Debian installs with the package of a file.
licence_of() {
  local package path
  path=$(realpath "$1")  # dpkg may know it without the /usr before /lib
  package=$({ dpkg-query -S "$path" 2>/dev/null || dpkg-query -S "${path#/usr}"; } | head -1 | cut -d: -f1)
  cp -L "/usr/share/doc/$package/copyright" "$top/licenses/$package.txt"
}
# The shared libraries of programs but for the C and C++ runtimes.
libraries_of() {
  ldd "$@" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u |
    { grep -vE '/(libc|libm|libmvec|libdl|librt|libpthread|libresolv|ld-linux[^/]*|libstdc\+\+|libgcc_s)\.so' || true; }
}
libraries_of "${programs[@]/#/$build/}" |
  while read -r library; do
    cp -L "$library" "$top/lib/"
    licence_of "$library"
  done
# What is linked statically or included: tests, command line, JSON, io_uring, CUDA's runtime.
for header in gtest/gtest.h CLI/CLI.hpp nlohmann/json.hpp boost/version.hpp liburing.h; do
  [ -e "/usr/include/$header" ] && licence_of "/usr/include/$header"
done
for licence in "$build"/flashinfer-*/*.dist-info/licenses/LICENSE; do  # NOTICE: what it builds on
  [ -e "$licence" ] && cp "$licence" "$top/licenses/flashinfer.txt"
done
for licence in LICENSE NOTICE 3rdparty/dlpack/LICENSE; do  # and picojson's, in its header
  [ -e "$build/xgrammar-src/$licence" ] && cat "$build/xgrammar-src/$licence" >>"$top/licenses/xgrammar.txt"
done
nvcc=$(sed -n 's/^OMNIKV_NVCC:FILEPATH=//p' "$build/CMakeCache.txt")
cuda=$(dirname "$(dirname "$(realpath "$nvcc")")")
for licence in "$cuda"/EULA.txt "$cuda"/dist-info/nvidia_cuda_runtime-*/licenses/License.txt \
  /usr/share/doc/cuda-cudart-*/copyright /usr/share/doc/libcudart*/copyright; do
  [ -e "$licence" ] && cp -L "$licence" "$top/licenses/cuda-runtime.txt" && break
done
[ -e "$top/licenses/cuda-runtime.txt" ] || {
  echo "bundle.sh: the licence of CUDA's runtime was not found under $cuda" >&2
  exit 1
}

# It must start with its own libraries.
if libraries_of "$top"/bin/* | grep -vF "$top/bin/../lib/"; then
  echo "bundle.sh: these libraries are not the bundle's" >&2
  exit 1
fi
"$top/bin/omnikv" --version >/dev/null
mkdir -p "$(dirname "$out")"
tar -C "$stage" --sort=name --owner=0 --group=0 --numeric-owner -cf - "$name" | xz -9 -T1 >"$out"
most=$((60 << 20))
[ "$(stat -c %s "$out")" -le $most ] || {
  echo "bundle.sh: $out has more than $most bytes" >&2
  exit 1
}
needs() { objdump -T "$top"/bin/* "$top"/lib/* | grep -o "$1_[0-9.]*" | sort -uV | tail -1; }
printf '%s: %s bytes, architectures %s, needs %s and %s\n' "$out" "$(stat -c %s "$out")" "$archs" \
  "$(needs GLIBC)" "$(needs GLIBCXX)"
