#!/usr/bin/env bash
# Builds llama.cpp's server for this machine's CPU, to compare with
# (scripts/peer_serve.py): from the sdist of llama-cpp-python on PyPI, pinned by version and hash, of
# which nothing else is built or run. About 15 minutes on two cores.
#
#     scripts/build_llama_server.sh DIR
#
# The last line is the path of the server.
set -euo pipefail
version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
dir=${1:?usage: build_llama_server.sh DIR}
mkdir -p "$dir"
dir=$(realpath "$dir")
archive=$dir/llama_cpp_python-$version.tar.gz
good() { echo "$sha256  $archive" | sha256sum --check --status 2>/dev/null; }
# pip may ask the sdist's build backend for metadata; nothing is installed.
good || python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary=:all: \
  --dest "$dir" "llama-cpp-python==$version" >&2
good || {
  echo "build_llama_server.sh: pip did not bring $archive with the expected hash" >&2
  exit 1
}
source=$dir/llama_cpp_python-$version/vendor/llama.cpp
if [ ! -e "$source/.ready" ]; then
  tar -xzf "$archive" -C "$dir"
  # GCC 12 takes the tiles' configuration for unused and does not store it: models in Q8_0 crash
  # on CPUs with AMX. The barrier keeps the store.
  sed -i 's/^\( *\)_tile_loadconfig(&tc);/\1asm volatile("" ::: "memory");\n&/' \
    "$source/ggml/src/ggml-cpu/amx/mmq.cpp"
  touch "$source/.ready"
fi
cmake -S "$source" -B "$dir/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >&2
cmake --build "$dir/build" --target llama-server >&2
echo "$dir/build/bin/llama-server"
