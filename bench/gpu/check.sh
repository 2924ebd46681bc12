#!/usr/bin/env bash
# What `make gpu-check` does on a machine with a GPU, from the files of `make gpu-bundle` beside this script: no Go needed.
# Fails where the GPU computes something else than the cpu, and where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")"

echo "== what is here"
./sppovm devices

echo "== the device against the cpu"
./cuda.test -test.v -test.run '^TestGPU' | tee tests.log
if grep -q 'SKIPPED' tests.log; then
  echo "the tests of the GPU were skipped: nothing has been shown" >&2
  exit 1
fi

echo "== a hundred steps of training on both"
for job in gpt-docs llama-docs; do
  ./sppovm run "$job.sppb" --device cpu --json 2>/dev/null >"$job.cpu.json"
  ./sppovm run "$job.sppb" --device cuda --json >"$job.cuda.json"
  echo "$job on the cpu:  $(tail -n 1 "$job.cpu.json")"
  echo "$job on the GPU:  $(tail -n 1 "$job.cuda.json")"
done
