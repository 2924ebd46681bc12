#!/usr/bin/env bash
# What `make gpu-check` does on a machine with a GPU, from the files of `make gpu-bundle` beside this script: no Go needed.
# It writes DATE-CARD.json. It fails where the GPU computes something else than the cpu, and where there is no GPU; what is
# slower than wanted stands in the file.
#
# SPPO_GPU_QUICK=1 leaves out all that only takes time: what is then known is that results are right.
set -euo pipefail
cd "$(dirname "$0")"
quick=${SPPO_GPU_QUICK:-}
failed=
rm -f -- *.jsonl *.log *.longest.txt *.trace.json 7b-*.sppb 8b-*.sppb clocks.csv # of an earlier run

echo "== what is here"
./sppovm devices | tee devices.txt
if command -v nvidia-smi >/dev/null; then
  nvidia-smi -i 0 --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -lms 1000 >clocks.csv 2>/dev/null &
  trap "kill $!" EXIT
fi

# tests NAME BINARY: the tests of a binary that want a GPU. Skipped is not shown.
tests() {
  ./"$2" -test.v -test.timeout 30m -test.run '^TestGPU[^F]' >"$1.log" 2>&1 || failed+=" $1"
  grep -E '^(--- |ok|FAIL|PASS)' "$1.log" || true
  if grep -q SKIPPED "$1.log"; then
    echo "the tests of the GPU were skipped: nothing has been shown" >&2
    exit 1
  fi
}
echo "== every opcode, several ranks on one GPU, a hundred steps: against the cpu"
tests cuda cuda.test
echo "== schedules: E1 to E6"
tests e2e e2e.test

echo "== a hundred steps of training on both"
for job in gpt-docs llama-docs; do
  ./sppovm run "$job.sppb" --device cpu --json -q >"$job.cpu.jsonl"
  ./sppovm run "$job.sppb" --device cuda --json -q >"$job.cuda.jsonl" || failed+=" $job"
done

# layers NAME SPEC SETTINGS...: a model's layers on one GPU, and in virtual time. What does not fit is left out.
layers() {
  local name=$1 spec=$2 settings=()
  shift 2
  for s in "$@"; do settings+=(--set "$s"); done
  echo "-- $name"
  ./sppoc build "$spec" -o "$name.sppb" "${settings[@]}" || return 0
  ./sppovm run "$name.sppb" --device sim --json -q >"$name.sim.jsonl"
  ./sppovm run "$name.sppb" --device cuda --json -q --profile "$name.trace.json" >"$name.run.jsonl" || failed+=" $name"
}
if [ -z "$quick" ]; then
  echo "== what the GPU does in a second"
  SPPO_GPU_FIGURES=figures.jsonl ./cuda.test -test.timeout 30m -test.run '^TestGPUFigures$' || failed+=" figures"
  ./sppovm probe --device cuda --json -o cluster.sppo --name measured >probe.jsonl || failed+=" probe"

  echo "== layers of 7B and 8B models"
  layers 7b-32k-none 7b.sppo train.sequence=32K schedule.offload=none
  layers 7b-32k-full 7b.sppo train.sequence=32K schedule.offload=full
  layers 7b-128k 7b.sppo
  layers 7b-512k 7b.sppo train.sequence=512K model.layers=1
  layers 8b-128k 8b.sppo
  for model in 7b 8b; do
    ./sppoc plan "$model.sppo" --max-sequence --set model.layers=32 --set schedule.recompute=full >"$model.longest.txt" 2>&1 || true
  done
  if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "== the same layers by PyTorch"
    python3 torch_layers.py >peers.jsonl || failed+=" peers"
  else
    echo "SKIPPED: there is no PyTorch with CUDA to stand beside"
  fi
fi

echo "== the report"
./report .
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
