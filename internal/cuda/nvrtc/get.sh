#!/usr/bin/env bash
# usage: get.sh FOLDER
# Downloads NVIDIA's run-time compiler and disassembler from Python's package index to FOLDER/nvidia, unless they are there.
# They need no GPU and are not installed. Without pip or a network, the script reports that and succeeds; tests that need them skip.
set -euo pipefail
folder=$1
release=13.0 # of the compiler; make gpu-bundle compiles with it, so drivers of GPUs must be at least as new
if compgen -G "$folder/nvidia/cu13/lib/libnvrtc.so*" >/dev/null && [ -x "$folder/nvidia/cu13/bin/nvdisasm" ]; then exit 0; fi
skip() { echo "SKIPPED: no run-time compiler: $1"; exit 0; }
command -v python3 >/dev/null || skip "there is no python3 to get it with"
python3 -m pip --version >/dev/null 2>&1 || skip "python3 has no pip"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
for package in "nvidia-cuda-nvrtc==$release.*" "nvidia-cuda-nvdisasm>=13"; do
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$work" "$package" \
    >"$work/log" 2>&1 || skip "pip says: $(tail -n 1 "$work/log")"
  python3 -m zipfile -e "$work"/*.whl "$folder"
  rm "$work"/*.whl
done
chmod +x "$folder/nvidia/cu13/bin/nvdisasm"
