#!/usr/bin/env bash
# Prints the Debian packages of the shared libraries that the program needs: those that it links, and
# oneDNN and OpenBLAS, which it opens while it runs.
#
#     packaging/runtime_packages.sh PROGRAM
set -euo pipefail
{
  ldd "$1" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p'
  ldconfig -p | sed -n 's/.*lib\(dnnl\|openblas\)\.so\.[0-9]* .* => \(.*\)/\2/p'
} | while read -r library; do
  path=$(realpath "$library")  # dpkg may know it without the /usr before /lib
  { dpkg-query -S "$path" 2>/dev/null || dpkg-query -S "${path#/usr}"; } | cut -d: -f1
done | sort -u
