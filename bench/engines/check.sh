#!/usr/bin/env bash
# Starts jobs of several processes on this computer with the files of examples/cluster: with torchrun, Open MPI and Slurm, and with
# a stand-in for Kubernetes' JobSet, which reads the file and starts its pods as processes. Each job must end with exactly the
# checkpoint of the same job in one process, even after one of its processes was killed.
#
# usage: check.sh OUT [ENGINE...], in the root of the repository; needs Go. The script installs missing Debian packages, which needs
# root, and torch, which is large, into OUT/venv unless the Python in SPPO_PYTHON has it. It skips unavailable engines.
set -u
mkdir -p "$1" && out=$(cd "$1" && pwd) && shift
engines=${*:-torchrun mpirun slurm jobset}
root=$PWD cluster=$PWD/examples/cluster
steps=200
failures=0

note() { printf '%s\n' "$*"; }
fail() { note "FAILED: $*"; failures=$((failures + 1)); }

go build -o "$out/" ./cmd/sppoc ./cmd/sppovm || exit 1
export SPPOVM=$out/sppovm PATH=$out:$PATH
rm -rf "$out/jobs" && mkdir "$out/jobs" && cd "$out/jobs" || exit 1
sppoc build "$root/examples/tiny.sppo" -o job.sppb --set 'train.data=random()' --set train.steps=$steps || exit 1
sppovm run job.sppb -q --save reference || exit 1

# folder creates a folder with the job, from which a script is started, and enters it.
folder() { mkdir "$out/jobs/$1" && cd "$out/jobs/$1" && cp ../job.sppb . ; }

# same compares the last checkpoint of a folder with the reference.
same() {
  if diff -r "$out/jobs/reference/step-$steps" "$2/step-$steps" >/dev/null 2>&1; then
    note "ok: $1: the weights are those of one process"
  else
    fail "$1: there is no last checkpoint, or it differs; see $PWD"
  fi
}

# workers lists the job's processes in the current folder, by the absolute path of the program.
workers() { pgrep -f "^[^ ]*sppovm run $PWD/job.sppb" ; }

# reached waits until the run's log contains a step.
reached() { # LOG STEP
  for _ in $(seq 600); do
    grep -q "\"step\":$2," "$1" 2>/dev/null && return 0
    sleep 0.1
  done
  fail "step $2 was never reached in $PWD"
  return 1
}

# starts counts the starts of a run.
starts() { grep -c '"run":' "$1"; }

# try runs a script as a user would: undisturbed, then with a process that is killed halfway.
try() { # NAME COMMAND...
  local name=$1
  shift
  folder "$name" || return
  "$@" "$PWD/job.sppb" --save-every 20 -q >log 2>&1
  same "$name" save-job
  folder "$name-killed" || return
  "$@" "$PWD/job.sppb" --save-every 20 -q >log 2>&1 &
  if reached save-job.jsonl $((steps / 2)); then
    kill -9 "$(workers | tail -1)"
  fi
  wait $!
  same "$name, a process killed" save-job
  [ "$(starts save-job.jsonl)" -ge 2 ] || fail "$name: the job was not started again"
}

# installed ensures that a command is available, installing Debian packages if necessary.
installed() { # COMMAND PACKAGE...
  command -v "$1" >/dev/null && return
  local command=$1
  shift
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    note "SKIPPED: $command is not installed, and only root can install $* on a Debian"
    return 1
  fi
  note "installing $*"
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@"; } >"$out/install.log" 2>&1; then
    note "SKIPPED: $* cannot be installed; see $out/install.log"
    return 1
  fi
}

# pythonWith sets python to an interpreter that has a module, installing a package if necessary.
pythonWith() { # MODULE PACKAGE
  for python in "${SPPO_PYTHON:-}" python3 "$out/venv/bin/python"; do
    [ -n "$python" ] && "$python" -c "import $1" 2>/dev/null && return
  done
  python=$out/venv/bin/python
  note "installing $2 into $out/venv"
  if ! { [ -x "$python" ] || python3 -m venv "$out/venv"; } >"$out/install.log" 2>&1 || ! "$python" -m pip install -q "$2" >>"$out/install.log" 2>&1; then
    note "SKIPPED: $2 cannot be installed; see $out/install.log"
    return 1
  fi
}

checkTorchrun() {
  pythonWith torch torch || return
  export TORCHRUN="$python -m torch.distributed.run" GPUS=2 PORT=$((20000 + RANDOM % 10000))
  try torchrun "$cluster/torchrun.sh"
}

checkMpirun() {
  installed mpirun openmpi-bin || return
  echo "127.0.0.1 slots=2" >"$out/jobs/hosts"
  export MPIRUN_FLAGS="--allow-run-as-root"
  try mpirun "$cluster/mpirun.sh" "$out/jobs/hosts"
}

# startSlurm starts a cluster that consists of this computer, for this script.
startSlurm() {
  slurm=$out/jobs/cluster
  mkdir "$slurm" "$slurm/state" "$slurm/spool" && mkdir -m 700 "$slurm/munge" || return 1
  (umask 077 && head -c 64 /dev/urandom >"$slurm/munge/key")
  local host port=$((20000 + RANDOM % 10000))
  host=$(hostname -s)
  cat >"$slurm/slurm.conf" <<CONF
ClusterName=check
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthType=auth/munge
AuthInfo=socket=$slurm/munge/socket
StateSaveLocation=$slurm/state
SlurmdSpoolDir=$slurm/spool
SlurmctldPidFile=$slurm/controller.pid
SlurmdPidFile=$slurm/node.pid
SlurmctldLogFile=$slurm/controller.log
SlurmdLogFile=$slurm/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
  export SLURM_CONF=$slurm/slurm.conf
  munged --force --socket="$slurm/munge/socket" --key-file="$slurm/munge/key" --pid-file="$slurm/munge/pid" --log-file="$slurm/munge/log" \
    --seed-file="$slurm/munge/seed" 2>>"$slurm/munge/errors" && slurmctld -c && slurmd -c || return 1
  for _ in $(seq 100); do
    [ "$(sinfo -h -o %t 2>/dev/null)" = idle ] && return
    sleep 0.2
  done
  return 1
}

stopSlurm() {
  for file in node.pid controller.pid munge/pid; do
    [ -s "$slurm/$file" ] && kill "$(cat "$slurm/$file")"
  done
}

# queued submits the script as users do and waits for its end. Slurm delays a requeued job by two minutes, which is shortened here.
queued() { # PROGRAM ARGUMENT...
  local id ended=0 waited=0
  id=$(sbatch --parsable --nodes 1 --ntasks-per-node 2 --oversubscribe "$cluster/slurm.sh" "$@") || return
  echo "$id" >id
  for _ in $(seq 1200); do
    case $(scontrol -o show job "$id" | grep -o 'JobState=[A-Z_]*') in
      *=PENDING)
        ended=0 waited=$((waited + 1)) # started immediately, the job would use its revoked credential
        [ $waited -lt 20 ] || scontrol update "jobid=$id" starttime=now 2>/dev/null
        ;;
      *=COMPLETED) return ;;
      *=RUNNING | *=COMPLETING) ended=0 waited=0 ;;
      *) ended=$((ended + 1)) ;; # a requeued job is briefly in this state
    esac
    [ $ended -lt 50 ] || return
    sleep 0.2
  done
  scancel "$id"
}

checkSlurm() {
  installed sbatch slurm-wlm munge || return
  if [ "$(id -u)" -ne 0 ]; then
    note "SKIPPED: only root can start a Slurm cluster of this computer"
    return
  fi
  if ! startSlurm; then
    note "SKIPPED: Slurm does not start here; see $slurm"
    stopSlurm
    return
  fi
  try slurm queued
  folder slurm-warned || return
  queued "$PWD/job.sppb" --save-every 1h -q >log 2>&1 &
  if reached save-job.jsonl 10; then
    scancel --signal=TERM --batch "$(cat id)" # as Slurm does before the time limit
  fi
  wait $!
  same "slurm, warned before the time limit" save-job
  [ "$(starts save-job.jsonl)" -eq 2 ] || fail "slurm: the job was started $(starts save-job.jsonl) times, want 2"
  stopSlurm
}

checkJobset() {
  pythonWith yaml pyyaml || return
  folder jobset || return
  "$python" "$root/bench/engines/jobset.py" "$cluster/jobset.yaml" "$PWD" >log 2>&1 || fail "jobset: see $PWD/log"
  same "jobset" save
}

for engine in $engines; do
  cd "$out/jobs" || exit 1
  case $engine in
    torchrun) checkTorchrun ;;
    mpirun) checkMpirun ;;
    slurm) checkSlurm ;;
    jobset) checkJobset ;;
    *) fail "there is no engine $engine" ;;
  esac
done
[ "$failures" -eq 0 ]
