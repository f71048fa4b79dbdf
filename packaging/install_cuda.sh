#!/usr/bin/env bash
# Puts NVIDIA's CUDA compiler and the headers and libraries that omnikv is built with into a folder,
# from PyPI, and cuBLASLt, which multiplies the rows of prompts, into the folder of libraries LIB.
#
#     packaging/install_cuda.sh DIR LIB
set -euo pipefail
dir=$1 lib=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --target "$work" nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-culibos==13.0.85 \
  nvidia-cublas==13.1.0.3
mkdir -p "$dir" "$lib"
cp -a "$work"/nvidia/cu13/. "$dir"
chmod +x "$dir"/bin/* "$dir"/nvvm/bin/*
# The names that a compiler looks for; the runtime is linked statically all the same.
[ -e "$dir/lib64" ] || ln -s lib "$dir/lib64"
[ -e "$dir/lib/libcudart.so" ] || ln -s libcudart.so.13 "$dir/lib/libcudart.so"
cp "$dir"/lib/libcublasLt.so.13 "$lib"
