#!/usr/bin/env bash
# A run of GPT-2 over as many jobs as needed: sbatch examples/slurm/gpt2.sh [flags of run_gpt2.sh]
# Before the time limit, SLURM sends SIGUSR1 to this script. The run then finishes its step, saves, and exits with code
# 75. The job is requeued, and its next start resumes the run. After any other exit code, the job is not requeued.
# Submit it in the repository, with your own account, partition and sizes.
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1                 # the run script starts the ranks of its node itself
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300                 # seconds before the limit; at least a step and a save
#SBATCH --requeue
#SBATCH --open-mode=append                  # append to the log of the earlier jobs
#SBATCH --output=slurm-%x-%j.log
set -uo pipefail

run=${RUN_FOLDER:-runs/${SLURM_JOB_NAME:-gpt2}-$SLURM_JOB_ID}   # the same at each start of this job
# Since 22.05, srun does not inherit --cpus-per-task from sbatch (see its manual).
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

srun --kill-on-bad-exit=0 bash run_gpt2.sh --save "$run" --resume --load-if-exists --save-interval-minutes 30 \
  --max-restarts 5 "$@" &
job=$!

hears=                                      # a trapped signal interrupts `wait` while the job continues
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
  [ -n "$hears" ] || break                  # otherwise a signal was forwarded, and code is not the job's
done

state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
echo "job $SLURM_JOB_ID ended with code $code ($state)"
if [ "$code" -eq 75 ] && [ "$state" = RUNNING ]; then   # do not requeue a job that scancel has ended
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
