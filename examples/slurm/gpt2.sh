#!/usr/bin/env bash
# A run of GPT-2 that goes on for as many jobs as it takes: sbatch examples/slurm/gpt2.sh [flags of run_gpt2.sh]
# Ahead of the time limit SLURM sends SIGUSR1 to this script; the run finishes its step, saves and leaves with code 75;
# the job is requeued, and its next start goes on from there. Any other end is the last.
# Submit it from the repository, with your own account, partition and sizes.
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1                 # the run script starts the ranks of its node itself
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300                 # seconds ahead of the limit; at least a step and a save
#SBATCH --requeue
#SBATCH --open-mode=append                  # a log that goes on, too
#SBATCH --output=slurm-%x-%j.log
set -uo pipefail

run=${RUN_FOLDER:-runs/${SLURM_JOB_NAME:-gpt2}-$SLURM_JOB_ID}   # the same in each start of this job
# Since 22.05 srun does not take --cpus-per-task from sbatch (its manual).
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

srun --kill-on-bad-exit=0 bash run_gpt2.sh --save "$run" --resume --load-if-exists --save-interval-minutes 30 \
  --max-restarts 5 "$@" &
job=$!

hears=                                      # a trapped signal breaks off `wait`; then the job goes on
hand_on() {
  hears=1
  kill -s "$1" "$job" 2> /dev/null
}
trap 'hand_on USR1' USR1
trap 'hand_on TERM' TERM

while :; do
  hears=
  wait "$job"
  code=$?
  [ -n "$hears" ] || break                  # else the signal was handed on, and this is not yet the job's code
done

state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
echo "job $SLURM_JOB_ID ended with code $code ($state)"
if [ "$code" -eq 75 ] && [ "$state" = RUNNING ]; then   # a job that scancel has ended is not running: it stays ended
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
