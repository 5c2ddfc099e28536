#!/usr/bin/env bash
# GPT-2 by Open MPI, a process for each rank. From the repository:
#   NUM_RANKS=16 HOSTS=node0:8,node1:8 MASTER_ADDR=node0 bash examples/launch/mpirun.sh [flags of pretrain_gpt2.py]
# MASTER_ADDR is the host of rank 0; on one host it may be left out. Under MPICH and Intel MPI the same is
#   mpiexec -n 16 -hosts node0,node1 -genv MASTER_ADDR node0 python pretrain_gpt2.py ...
# Open MPI starts nothing as root, as in a container, without OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
# kill -USR1 of mpirun lets the ranks save and leave with 75; on SIGTERM mpirun kills them soon, and ends with 1.
set -euo pipefail

where=(--bind-to none)                            # else Open MPI gives each rank one core, and its threads wait for it
if [ -n "${HOSTS:-}" ]; then where+=(--host "$HOSTS"); fi
if [ -n "${MASTER_ADDR:-}" ]; then where+=(-x MASTER_ADDR -x MASTER_PORT="${MASTER_PORT:-29500}"); fi

mpirun -n "${NUM_RANKS:-2}" "${where[@]}" "${PYTHON:-python}" \
  pretrain_gpt2.py --pipe-parallel-size 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
  --batch-size 4 --gas 4 --train-iters 100 --lr 3e-4 \
  --data-path data/sample/gpt2_text_document --tokenizer-path data/sample/tokenizer.json "$@"
