#!/usr/bin/env bash
# Installs what omnikv is built from, on Debian 12 and Ubuntu 24.04. Says what it installs; does
# nothing, quickly, when everything is there. With "tests": what the tests need, too.
set -euo pipefail

packages=(g++ cmake make ninja-build pkg-config
  libfmt-dev nlohmann-json3-dev libcli11-dev libyaml-cpp-dev libhwy-dev libpcre2-dev libutf8proc-dev libedit-dev
  libxxhash-dev liburing-dev libopenblas-pthread-dev libdnnl-dev libssl-dev)
# Debian 12's libboost-dev is 1.74, which is too old; later systems have 1.81 or newer under that name.
if grep -q '^VERSION_CODENAME=bookworm' /etc/os-release; then packages+=(libboost1.81-dev); else packages+=(libboost-dev); fi
[ "${1:-}" = tests ] && packages+=(libgtest-dev libgmock-dev python3 python3-dev python3-venv)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

run=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "install_deps.sh: these packages are missing and neither root nor sudo is here: ${missing[*]}" >&2
    exit 1
  }
  run=(sudo)
fi
echo "installing: ${missing[*]}" >&2
"${run[@]}" apt-get update -qq
"${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  "${missing[@]}" >/dev/null
