#!/usr/bin/env bash
# usage: check.sh [STAGE [NAME]]...
# What `make gpu-check` does on a machine with a GPU, from the files of `make gpu-bundle` beside this script: no Go needed. It runs the
# stages that are named, or all in the usual order, and appends each result to results.jsonl in the folder OUT, or here, as it arises. At
# the end, or by `check.sh report` at any time, it writes DATE-CARD.json there. check.sh help lists the stages and their limits.
#
# It fails where a GPU computes something else than the cpu, and where there is no GPU; what is slower than wanted stands in the file.
# SPPO_GPU_LIMIT=9m30s bounds all of it; what there is no time for is left out, and said to be.
here=$(cd "$(dirname "$0")" && pwd)
export SPPO_CUDA_KERNELS=${SPPO_CUDA_KERNELS-$here/kernels}
exec "$here/gpu" "$@"
