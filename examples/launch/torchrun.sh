#!/usr/bin/env bash
# Train GPT-2 with torchrun on one or several hosts. Run it in the repository on each host:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/launch/torchrun.sh [flags of pretrain_gpt2.py]
set -euo pipefail

torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${GPUS_PER_NODE:-2}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
  pretrain_gpt2.py --pipe-parallel-size 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
  --batch-size 4 --gas 4 --train-iters 100 --lr 3e-4 \
  --data-path data/sample/gpt2_text_document --tokenizer-path data/sample/tokenizer.json "$@"
