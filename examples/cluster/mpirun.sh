#!/bin/bash
# Trains by Open MPI, in one process for each GPU, on the nodes of a file of hosts ("node1 slots=8" and so on):
#
#   mpirun.sh hosts job.sppb --device cuda
#
# What follows the program goes to sppovm run. The folder of the job must be on a file system that all nodes share: checkpoints
# are in save-NAME there. mpirun starts nothing again: this script does, up to RESTARTS times, from the newest checkpoint.
set -u
hosts=$1 program=$2
shift 2
save=save-$(basename "${program%.*}")
first=$(awk '!/^ *(#|$)/ { print $1; exit }' "$hosts")
for try in $(seq 0 "${RESTARTS:-10}"); do
  mpirun --hostfile "$hosts" ${MPIRUN_FLAGS:-} -x MASTER_ADDR="$first" \
    "${SPPOVM:-sppovm}" run "$program" --save "$save" --save-every 10m --resume auto --record "$save.jsonl" "$@"
  code=$?
  # 2 and 3: the input is wrong or does not fit, which another try does not change. 130: Ctrl-C.
  case $code in 0 | 2 | 3 | 130) exit $code ;; esac
done
exit $code
