#!/bin/bash
# Trains with torchrun, with one process per GPU. Start it on every node:
#
#   NODES=4 GPUS=8 MASTER=node1 torchrun.sh job.sppb --device cuda
#
# Arguments after the program are passed to sppovm run. The folder of the job must be on a file system that all nodes share;
# checkpoints are written to save-NAME there. If a process dies, torchrun restarts all processes, and they resume from the newest checkpoint.
set -eu
program=$1
shift
save=save-$(basename "${program%.*}")
exec ${TORCHRUN:-torchrun} --no-python --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-1}" --max-restarts "${RESTARTS:-10}" \
  --rdzv-backend c10d --rdzv-endpoint "${MASTER:-127.0.0.1}:${PORT:-29400}" --rdzv-id "${JOB:-$save}" \
  "${SPPOVM:-sppovm}" run "$program" --save "$save" --save-every 10m --resume auto --record "$save.jsonl" "$@"
