#!/usr/bin/env bash
# usage: check.sh [STAGE [NAME]]...
# Does the work of `make gpu-check` on a machine with a GPU, with the files of `make gpu-bundle` next to this script. It needs no Go
# installation. It runs the named stages, or all in the usual order, and appends each result immediately to results.jsonl in the folder
# OUT, or in the current one. At the end, or with `check.sh report` at any time, it writes DATE-CARD.json there. check.sh help lists the
# stages and their time limits.
#
# It fails if there is no GPU, or if results of a GPU differ from those of the cpu. Speeds below the goals are reported in the file.
# SPPO_GPU_LIMIT=9m30s limits the total time; stages for which no time is left are skipped and reported. SPPO_GPU_HOST_MEMORY=100GiB is the
# host memory for layers, if the system reports too little.
here=$(cd "$(dirname "$0")" && pwd)
export SPPO_CUDA_KERNELS=${SPPO_CUDA_KERNELS-$here/kernels}
exec "$here/gpu" "$@"
