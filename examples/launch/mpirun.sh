#!/usr/bin/env bash
# Train GPT-2 with Open MPI, one process per rank. Run it in the repository:
#   NUM_RANKS=16 HOSTS=node0:8,node1:8 MASTER_ADDR=node0 bash examples/launch/mpirun.sh [flags of pretrain_gpt2.py]
# MASTER_ADDR is the host of rank 0; it is not needed on a single host. The command for MPICH and Intel MPI is
#   mpiexec -n 16 -hosts node0,node1 -genv MASTER_ADDR node0 python pretrain_gpt2.py ...
# As root (in containers), Open MPI requires OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
# After kill -USR1 of mpirun, the ranks save and exit with 75. On SIGTERM, mpirun soon kills them and exits with 1.
set -euo pipefail

where=(--bind-to none)                            # by default, Open MPI binds all threads of a rank to one core
if [ -n "${HOSTS:-}" ]; then where+=(--host "$HOSTS"); fi
if [ -n "${MASTER_ADDR:-}" ]; then where+=(-x MASTER_ADDR -x MASTER_PORT="${MASTER_PORT:-29500}"); fi

mpirun -n "${NUM_RANKS:-2}" "${where[@]}" "${PYTHON:-python}" \
  pretrain_gpt2.py --pipe-parallel-size 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
  --batch-size 4 --gas 4 --train-iters 100 --lr 3e-4 \
  --data-path data/sample/gpt2_text_document --tokenizer-path data/sample/tokenizer.json "$@"
