#!/bin/sh
# Installs what building and testing moeforge needs on Debian 12 / Ubuntu 24.04, and finds or fetches the CUDA compiler library.
#
#   scripts/bootstrap.sh build    compilers (C; C++ and addr2line for the emulated device), libyaml, SQLite, jansson, libcrypto
#   scripts/bootstrap.sh test     the same, and Check, clang-tidy, cppcheck, pkg-config, Python
#
# As root, or with sudo that asks for no password, missing packages are installed; otherwise the one command to run is printed and the script
# fails. The toolkit is searched in CUDA_HOME, beside nvcc on PATH, in /usr/local/cuda*, and in .local/; if there is none, NVRTC and the driver
# headers are fetched from PyPI into .local/cuda (200 MB). What was found is written to .local/toolkit.mk for make.
set -eu
cd "$(dirname "$0")/.."

level=${1:-build}
# command or file that proves the package : package
build_needs='cc:gcc c++:g++ addr2line:binutils make:make /usr/include/yaml.h:libyaml-dev /usr/include/sqlite3.h:libsqlite3-dev /usr/include/jansson.h:libjansson-dev /usr/include/openssl/evp.h:libssl-dev'
test_needs='/usr/include/check.h:check clang-tidy:clang-tidy cppcheck:cppcheck pkg-config:pkg-config python3:python3'
# NVRTC 13.0: what the shipped schedules were made with
nvrtc_wheels='nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96'

have() {
  case $1 in
    /*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
  esac
}

# Runs a command, says nothing but what it printed if it fails.
quietly() {
  "$@" >.local/bootstrap.log 2>&1 || {
    cat .local/bootstrap.log >&2
    echo "bootstrap: this failed: $*" >&2
    exit 1
  }
  rm .local/bootstrap.log
}

install_packages() {
  command -v apt-get >/dev/null 2>&1 || {
    echo "bootstrap: missing, and no apt-get here to install them; these are the names of the packages in Debian and Ubuntu: $*" >&2
    exit 1
  }
  if [ "$(id -u)" = 0 ]; then
    sudo=
  elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    sudo='sudo -n'
  else
    as_root='sudo sh -c'
    command -v sudo >/dev/null 2>&1 || as_root='su -c'
    echo "bootstrap: packages are missing and there are no root rights here; run this once, then try again:" >&2
    echo "  $as_root 'apt-get update && apt-get install -y --no-install-recommends $*'" >&2
    exit 1
  fi
  echo "bootstrap: installing $*" >&2
  # shellcheck disable=SC2086
  quietly $sudo env DEBIAN_FRONTEND=noninteractive apt-get update
  # shellcheck disable=SC2086
  quietly $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

# Adds to 'missing' the packages of the pairs that are not there.
look_for() {
  for pair in $1; do
    have "${pair%:*}" || missing="$missing ${pair#*:}"
  done
}

# Prints "<include folder> <libnvrtc path>" of the first complete toolkit.
find_toolkit() {
  nvcc_home=
  if command -v nvcc >/dev/null 2>&1; then
    nvcc_home=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
  fi
  for home in "${CUDA_HOME:-}" "$nvcc_home" /usr/local/cuda /usr/local/cuda-*; do
    [ -n "$home" ] || continue
    for lib in "$home"/lib64/libnvrtc.so.1[2-9] "$home"/lib/libnvrtc.so.1[2-9] "$home"/targets/x86_64-linux/lib/libnvrtc.so.1[2-9]; do
      for include in "$home/include" "$home/targets/x86_64-linux/include"; do
        if [ -e "$lib" ] && [ -e "$include/cuda.h" ]; then
          echo "$include $lib"
          return 0
        fi
      done
    done
  done
  lib=$(ls "$PWD"/.local/cuda/nvidia/cu13/lib/libnvrtc.so.1[2-9] 2>/dev/null | head -n 1)
  [ -n "$lib" ] && [ -e .local/cuda/nvidia/cu13/include/cuda.h ] && echo "$PWD/.local/cuda/nvidia/cu13/include $lib"
}

fetch_toolkit() {
  echo "bootstrap: no CUDA toolkit found; fetching NVRTC and headers from PyPI into .local/cuda" >&2
  rm -rf .local/cuda .local/wheels
  mkdir -p .local/cuda .local/wheels
  # shellcheck disable=SC2086
  (quietly python3 -m pip download --disable-pip-version-check --no-deps --only-binary=:all: -d .local/wheels $nvrtc_wheels) || {
    echo "bootstrap: if PyPI cannot be reached from here, install the CUDA toolkit (12.3 or newer) or name its folder in CUDA_HOME" >&2
    exit 1
  }
  for wheel in .local/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" .local/cuda
  done
  rm -rf .local/wheels
}

mkdir -p .local
toolkit=$(find_toolkit || true)
missing=
look_for "$build_needs"
[ "$level" != test ] || look_for "$test_needs"
[ -n "$toolkit" ] || python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
# shellcheck disable=SC2086
[ -z "$missing" ] || install_packages $missing

if [ -z "$toolkit" ]; then
  fetch_toolkit
  toolkit=$(find_toolkit) || {
    echo "bootstrap: the fetched wheels hold no libnvrtc or no cuda.h; install the CUDA toolkit (12.3 or newer) or set CUDA_HOME" >&2
    exit 1
  }
fi
{
  echo "# Written by scripts/bootstrap.sh."
  echo "CUDA_INCLUDE := ${toolkit%% *}"
  echo "export MOEFORGE_NVRTC ?= ${toolkit#* }"
} >.local/toolkit.mk.new
if cmp -s .local/toolkit.mk.new .local/toolkit.mk; then rm .local/toolkit.mk.new; else mv .local/toolkit.mk.new .local/toolkit.mk; fi
