#!/usr/bin/env bash
# Train GPT-2 under SLURM with one task per rank, for clusters that need it: sbatch examples/launch/srun.sh [flags]
# examples/slurm/gpt2.sh has one task per node instead; its launcher names failed ranks and restarts the run.
#SBATCH --job-name=gpt2-tasks
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
# Since 22.05, srun does not inherit --cpus-per-task from sbatch (see its manual).
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# If a rank fails, end the other ranks, which would otherwise wait for it until their timeout.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" \
  pretrain_gpt2.py --pipe-parallel-size 2 --model-parallel-size 2 --num-layers 24 --hidden-size 1024 \
  --num-attention-heads 16 --seq-length 1024 --batch-size 4 --gas 8 --train-iters 10000 --lr 3e-4 \
  --save "runs/gpt2-$SLURM_JOB_ID" --data-path data/sample/gpt2_text_document \
  --tokenizer-path data/sample/tokenizer.json "$@"
