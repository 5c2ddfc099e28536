#!/usr/bin/env bash
# Test the SLURM examples with SLURM on a single machine (Debian, as root). Run it in the repository:
#   bash tests/launch/local_slurm.sh [PART ...]
#
#   tasks      examples/launch/srun.sh: two tasks, one rank each
#   warned     examples/slurm/gpt2.sh on two nodes: signalled before its time limit, requeued and resumed
#   cancelled  the same, ended by scancel: the run saves and is not requeued
#   elastic    examples/slurm/elastic.sh: one of two nodes is lost; the run continues and re-adds it later
#
# The losses of the first two parts must be bitwise equal to those of the same run without SLURM; those of the last part
# may differ by 1e-12. The script installs slurm-wlm and munge if necessary. The two nodes are 127.0.0.1 and 127.0.0.2,
# each with its own slurmd. SLURM counts the CPUs and GPUs that the examples request, but the few ranks run on the CPU.
# All daemons are stopped and all files are removed. The exit code is 0 on success, and 77 if the tests cannot run here.
set -euo pipefail
# shellcheck source=tests/launch/local_runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/local_runs.sh" "tasks warned cancelled elastic" "$@"
if [ "$(id -u)" -ne 0 ]; then
  echo "local_slurm.sh: needs root" >&2
  exit 77
fi
if ! { command -v slurmctld && command -v slurmd && command -v munged; } > /dev/null; then install slurm-wlm munge; fi

nodes=(127.0.0.1 127.0.0.2)
port=${LOCAL_SLURM_PORT:-26817}                   # port of the controller; the slurmds use the next two
work_dir=$(mktemp -d /tmp/local-slurm-XXXXXX)
runs=$work_dir/runs
export SLURM_CONF=$work_dir/slurm.conf

# ---- the cluster

configure() {
  chmod 755 "$work_dir"
  mkdir "$work_dir/state" "$work_dir/munge" "$runs" "${nodes[@]/#/$work_dir/}"
  chmod 711 "$work_dir/munge"
  (umask 077; head -c 64 /dev/urandom > "$work_dir/munge/key")
  cat > "$SLURM_CONF" << END
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work_dir/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$work_dir/state
SlurmdSpoolDir=$work_dir/%n
SlurmctldPidFile=$work_dir/slurmctld.pid
SlurmdPidFile=$work_dir/%n.pid
SlurmctldLogFile=$work_dir/slurmctld.log
SlurmdLogFile=$work_dir/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout=15
ReturnToService=2
NodeName=${nodes[0]} NodeAddr=${nodes[0]} Port=$((port + 1)) CPUs=64 Gres=gpu:8
NodeName=${nodes[1]} NodeAddr=${nodes[1]} Port=$((port + 2)) CPUs=64 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
  touch "$work_dir"/gpu{0..7}
  printf "NodeName=%s Name=gpu File=$work_dir/gpu[0-7]\n" "${nodes[@]}" > "$work_dir/gres.conf"
}

start_node() { LOCAL_SLURM_NODE=$1 slurmd -N "$1"; }

start() {
  munged --force --key-file="$work_dir/munge/key" --socket="$work_dir/munge/socket" --pid-file="$work_dir/munge/pid" \
    --log-file="$work_dir/munge/log" --seed-file="$work_dir/munge/seed"
  slurmctld 2> "$work_dir/slurmctld.err"
  for node in "${nodes[@]}"; do start_node "$node"; done
  await 60 "both nodes are idle" are_idle 2
  echo "SLURM $(sinfo --version | cut -d ' ' -f 2): $(sinfo --noheader --format '%D nodes %T, %c CPUs and %G each')"
}

are_idle() { [ "$(sinfo --noheader --Node --states idle | wc -l)" -ge "$1" ]; }

processes_with() {                                # processes_with VARIABLE=VALUE: pids of processes with this environment variable
  (unset SLURM_CONF; grep -slzxF "$1" /proc/[0-9]*/environ | tr -cd '0-9\n') || true   # a process may have exited meanwhile
}

clean_up() {
  local code=$? pids signal
  set +e
  if [ "$code" -ne 0 ]; then tail -n 15 "$work_dir"/*.log "$runs"/*.log; fi
  timeout 10 squeue --noheader --format %i 2> /dev/null | xargs -r timeout 10 scancel 2> /dev/null
  for signal in TERM KILL; do
    for _ in $(seq 20); do
      pids=$(processes_with "SLURM_CONF=$SLURM_CONF" | grep -vx "$$")
      [ -n "$pids" ] || break 2
      # shellcheck disable=SC2086 # several words
      kill -s "$signal" $pids 2> /dev/null
      sleep 0.5
    done
  done
  rm -rf "$work_dir"
  exit "$code"
}

# ---- helpers

state() { scontrol --oneliner show job "$1" | grep -o ' JobState=[A-Z_]*' | cut -d = -f 2; }
is_in() { [[ " $2 " == *" $(state "$1") "* ]]; }
restarts() { scontrol --oneliner show job "$1" | grep -o 'Restarts=[0-9]*'; }
steps_in() {                                      # steps_in SECONDS: number of steps that two ranks train in this time
  train_without_slurm pace 2 --train-iters 40
  "$PYTHON" -c 'import json, statistics, sys
steps = [json.loads(line) for line in open(sys.argv[1])]
print(round(int(sys.argv[2]) / statistics.median(step["step_s"] for step in steps if step["kind"] == "train")))' \
    "$runs/pace/metrics.jsonl" "$1"
}

submit() { sbatch --parsable --output="$runs/%x-%j.log" "$@"; }

tiny+=(--model-parallel-size 1)
train_without_slurm() {                           # train_without_slurm NAME RANKS [flags]
  local name=$1 ranks=$2
  shift 2
  GPUS_PER_NODE=$ranks bash run_gpt2.sh "${tiny[@]}" "$@" --save "$runs/$name" > "$runs/$name.log" 2>&1
}

# ---- the parts

tasks() {
  local job
  job=$(submit --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 examples/launch/srun.sh "${tiny[@]}" \
    --train-iters 20 --save "$runs/tasks")
  await 200 "the job of two tasks ends" is_in "$job" "COMPLETED FAILED"
  echo "  job $job: $(state "$job")"
  is_in "$job" COMPLETED
  train_with_launcher "$runs/launch" --train-iters 20
  compare "$runs/tasks" "$runs/launch"
}

warned() {
  local job steps
  steps=$(steps_in 85)
  echo "  $steps steps"
  train_without_slurm uninterrupted 2 --train-iters "$steps"
  # SLURM checks time limits every 30 s: the signal arrives 50 to 80 s after each start.
  job=$(GPUS_PER_NODE=1 pp_size=2 RUN_FOLDER=$runs/warned submit --gpus-per-node=1 --time=3 --signal=B:USR1@100 \
    examples/slurm/gpt2.sh "${tiny[@]}" --train-iters "$steps")
  await 1800 "the signalled job ends" is_in "$job" "COMPLETED FAILED TIMEOUT CANCELLED NODE_FAIL"
  grep -h "^stopped\|resumed\|ended with" "$runs/gpt2-$job.log" | cut -c 1-110 | sed 's/^/  /'
  echo "  job $job: $(state "$job"), $(restarts "$job")"
  is_in "$job" COMPLETED && grep -q "ended with code 75" "$runs/gpt2-$job.log"
  compare "$runs/warned" "$runs/uninterrupted"
}

cancelled() {
  local job
  job=$(GPUS_PER_NODE=1 pp_size=2 RUN_FOLDER=$runs/cancelled submit --gpus-per-node=1 examples/slurm/gpt2.sh \
    "${tiny[@]}" --train-iters 100000)
  await 200 "the job trains" has_steps "$runs/cancelled" 5
  scancel "$job"
  await 120 "the cancelled job ends" is_in "$job" "COMPLETED FAILED TIMEOUT CANCELLED NODE_FAIL"
  sleep 5
  grep -h "saved\|^stopped\|ended with" "$runs/gpt2-$job.log" | cut -c 1-110 | sed 's/^/  /'
  echo "  job $job: $(state "$job"), $(restarts "$job")"
  is_in "$job" CANCELLED && grep -q "^stopped after step .* Everything is saved" "$runs/gpt2-$job.log"
}

elastic() {
  local lost=${nodes[0]} run=$runs/elastic lost_job other_job last
  # Each launcher listens on all addresses, so two launchers on one machine need different ports.
  read -r lost_job other_job <<< "$(HOSTS="127.0.0.[1-2]" MIN_NODES=1 GPUS_PER_NODE=1 pp_size=1 RUN_FOLDER=$run \
    NODE_LIST=${nodes[0]}:$((port + 3)),${nodes[1]}:$((port + 4)) \
    SBATCH_FLAGS="--parsable --gpus-per-node=1 --output=$runs/%x-%j.log" \
    bash examples/slurm/elastic.sh "${tiny[@]}" --fp64 --lr-decay-style constant --warmup 0 --train-iters 1000000 --save-interval 20 | xargs)"
  await 200 "two hosts train" has_steps "$run" 30
  # Simulate a power failure: first kill the processes that could report the death of the others.
  { pgrep -f "^slurmstepd: \[$lost_job\."; processes_with "LOCAL_SLURM_NODE=$lost"; processes_with "SLURMD_NODENAME=$lost"; } |
    xargs kill -KILL || true
  echo "  $lost, which hosts rank 0, is lost at step $(wc -l < "$run/metrics.jsonl")"
  await 120 "the other host continues" grep -q "start 1 has 1 of 2 nodes" "$runs/gpt2-elastic-$other_job.log"
  await 200 "SLURM requeues the job of the lost host" is_in "$lost_job" PENDING
  # By default SLURM starts a requeued job after two minutes, here after cred_expire (5 s). A late message to the job's
  # previous start would end the next one, so delay it.
  scontrol update "JobId=$lost_job" StartTime=now+90
  start_node "$lost"
  await 300 "the returned host is re-added" grep -q "start 2 has 2 of 2 nodes" "$runs/gpt2-elastic-$other_job.log"
  last=$(grep -c '"kind":"train"' "$run/metrics.jsonl")
  await 200 "two hosts train again" has_steps "$run" $((last + 30))
  scancel --name=gpt2-elastic
  for job in $lost_job $other_job; do
    await 100 "job $job ends" is_in "$job" CANCELLED
    echo "  job $job: $(state "$job"), $(restarts "$job")"
  done
  grep -h "has . of 2 nodes\|lost\|saved; restarting\|ended with" "$runs/gpt2-elastic-$other_job.log" | sed 's/^/  /'
  last=$("$PYTHON" -c 'import json, sys; print(json.loads(list(open(sys.argv[1]))[-1])["step"])' "$run/metrics.jsonl")
  train_without_slurm reference 2 --fp64 --pipe-parallel-size 1 --lr-decay-style constant --warmup 0 --train-iters "$last"
  compare "$run" "$runs/reference" 1e-12
}

trap clean_up EXIT
trap 'exit 130' INT TERM
configure
start
run_parts
