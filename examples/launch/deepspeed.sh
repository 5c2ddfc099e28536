#!/usr/bin/env bash
# Train GPT-2 with DeepSpeed's launcher. Run it in the repository, on a single host:
#   bash examples/launch/deepspeed.sh [flags of pretrain_gpt2.py]
# With HOSTFILE=examples/launch/hostfile, it runs on the hosts in this file, which need the repository at the same path.
set -euo pipefail

where=(--num_gpus "${GPUS_PER_NODE:-2}")
if [ -n "${HOSTFILE:-}" ]; then where=(--hostfile "$HOSTFILE"); fi

deepspeed "${where[@]}" --master_port "${MASTER_PORT:-29500}" \
  pretrain_gpt2.py --pipe-parallel-size 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
  --batch-size 4 --gas 4 --train-iters 100 --lr 3e-4 \
  --data-path data/sample/gpt2_text_document --tokenizer-path data/sample/tokenizer.json "$@"
