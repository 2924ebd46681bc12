#!/bin/bash
# Trains on the nodes of a Slurm job, with one process per GPU:
#
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 slurm.sh job.sppb --device cuda
#
# Arguments after the program are passed to sppovm run. The folder of the job must be on a file system that all nodes share;
# checkpoints are written to save-NAME there. Slurm warns this script two minutes before the time limit. sppovm then saves after
# the current step, and the job is queued again. It resumes from the newest checkpoint, as it does after the loss of a process or
# a node.
#SBATCH --job-name=sppo
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u
program=$1
shift
save=save-$(basename "${program%.*}")

warned=
warn() {
  warned=1
  scancel --signal=TERM "$SLURM_JOB_ID.0" # sppovm saves and ends
}
trap warn TERM

srun --kill-on-bad-exit=1 "${SPPOVM:-sppovm}" run "$program" --save "$save" --save-every 10m --resume auto --record "$save.jsonl" "$@" &
wait $!
code=$?
if [ -n "$warned" ]; then # the warning ended the wait
  wait $!
  code=$?
fi
# 2 and 3: wrong input, or the job does not fit, so a restart would not help.
if [ "$code" -eq 0 ] && [ -z "$warned" ] || [ "$code" -eq 2 ] || [ "$code" -eq 3 ]; then
  exit "$code"
fi
if [ "${SLURM_RESTART_COUNT:-0}" -ge "${RESTARTS:-100}" ]; then
  echo "queued again ${SLURM_RESTART_COUNT} times already: giving up"
  exit 1
fi
echo "ended with code $code${warned:+, out of time}: queued again"
exec scontrol requeue "$SLURM_JOB_ID"
