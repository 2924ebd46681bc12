#!/usr/bin/env bash
# usage: get.sh FOLDER
# Brings NVIDIA's run-time compiler into FOLDER/nvidia, from Python's package index, unless it is there. It needs no GPU
# and is not installed. Without pip or a network it says so and ends well: whoever wants the compiler then skips aloud.
set -euo pipefail
folder=$1
if compgen -G "$folder/nvidia/cuda_nvrtc/lib/libnvrtc.so*" >/dev/null; then exit 0; fi
skip() { echo "SKIPPED: no run-time compiler: $1"; exit 0; }
command -v python3 >/dev/null || skip "there is no python3 to get it with"
python3 -m pip --version >/dev/null 2>&1 || skip "python3 has no pip"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# From 12.8 on it knows sm_100.
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$work" 'nvidia-cuda-nvrtc-cu12>=12.8' \
  >"$work/log" 2>&1 || skip "pip says: $(tail -n 1 "$work/log")"
mkdir -p "$folder"
python3 -m zipfile -e "$work"/*.whl "$folder"
