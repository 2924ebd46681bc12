#!/bin/bash
# Trains with Open MPI, with one process per GPU, on the nodes in a host file (lines such as "node1 slots=8"):
#
#   mpirun.sh hosts job.sppb --device cuda
#
# Arguments after the program are passed to sppovm run. The folder of the job must be on a file system that all nodes share;
# checkpoints are written to save-NAME there. mpirun does not restart jobs, so this script restarts the job up to RESTARTS times,
# from the newest checkpoint.
set -u
hosts=$1 program=$2
shift 2
save=save-$(basename "${program%.*}")
first=$(awk '!/^ *(#|$)/ { print $1; exit }' "$hosts")
for try in $(seq 0 "${RESTARTS:-10}"); do
  mpirun --hostfile "$hosts" ${MPIRUN_FLAGS:-} -x MASTER_ADDR="$first" \
    "${SPPOVM:-sppovm}" run "$program" --save "$save" --save-every 10m --resume auto --record "$save.jsonl" "$@"
  code=$?
  # 2 and 3: wrong input, or the job does not fit, so a restart would not help. 130: Ctrl-C.
  case $code in 0 | 2 | 3 | 130) exit $code ;; esac
done
exit $code
