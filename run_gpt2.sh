#!/usr/bin/env bash
# Pretrains GPT-2: set-up and sample data on the first start, then the training. Further flags go to pretrain_gpt2.py:
#   bash run_gpt2.sh --train-iters 50      bash run_gpt2.sh --resume      NLAYERS=12 pp_size=4 bash run_gpt2.sh
# Edit a variable here or give it in the environment. What is left empty follows the machine (or SLURM).

GPUS_PER_NODE=${GPUS_PER_NODE:-}                  # empty: all GPUs that fit pp_size x mp_size; without a GPU 4 CPU processes
NNODES=${NNODES:-}                                # machines; start this script on each of them
NODE_RANK=${NODE_RANK:-}                          # 0 to NNODES-1, another on each machine
MASTER_ADDR=${MASTER_ADDR:-}                      # machine 0 as the others reach it
MASTER_PORT=${MASTER_PORT:-}

pp_size=${pp_size:-}                              # pipeline stages; 0 or 1: no pipeline
mp_size=${mp_size:-}                              # tensor slices of each layer

NLAYERS=${NLAYERS:-4}
NHIDDEN=${NHIDDEN:-128}
NHEADS=${NHEADS:-4}
SEQLEN=${SEQLEN:-128}
BATCHSIZE=${BATCHSIZE:-8}                         # samples of a micro-batch
GAS=${GAS:-4}                                     # micro-batches of a step; samples of a step =
TRAIN_ITERS=${TRAIN_ITERS:-100}                   #   BATCHSIZE * GAS * GPUS_PER_NODE * NNODES / max(pp_size, 1) / mp_size

DATA_PATH=${DATA_PATH:-}                          # token files without .bin/.idx; empty: the sample data, made on first use
TOKENIZER=${TOKENIZER:-}                          # tokenizer file; empty: the sample data's
config_json=${config_json:-}                      # DeepSpeed's JSON; empty: ds_config_gpt2.json
CHECKPOINT_PATH=${CHECKPOINT_PATH:-}              # run folder; empty: runs/gpt2-<time>

# ----------------------------------------------------------------------------------------------------------------------
set -euo pipefail
export GPUS_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT pp_size mp_size
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh" run
is_dry=
for flag in "$@"; do
  case $flag in
    -h | --help) exec "$PYTHON" "$root/pretrain_gpt2.py" --help ;;
    --dry-run) is_dry=1 ;;
  esac
done

machine=$("$PYTHON" -m megatron.launch.machine) || exit
eval "$machine"

if [ -z "$DATA_PATH" ]; then
  sample=$root/data/sample
  if [ -z "$is_dry" ]; then "$PYTHON" "$root/tools/make_sample_data.py"; fi
  DATA_PATH=$sample/gpt2_text_document
  TOKENIZER=${TOKENIZER:-$sample/tokenizer.json}
  sample_split=(--split 900,50,50)                # few documents: let each split hold texts and code
fi

arguments=(
  --pipe-parallel-size "$pp_size" --model-parallel-size "$mp_size"
  --num-layers "$NLAYERS" --hidden-size "$NHIDDEN" --num-attention-heads "$NHEADS" --seq-length "$SEQLEN"
  --batch-size "$BATCHSIZE" --gas "$GAS" --train-iters "$TRAIN_ITERS"
  --hidden-bias --attention-dropout 0 --hidden-dropout 0
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --warmup 0.05
  --log-interval 10 --eval-interval 50 --eval-iters 2 ${sample_split[@]+"${sample_split[@]}"}
  --data-path "$DATA_PATH" ${TOKENIZER:+--tokenizer-path "$TOKENIZER"}
  --deepspeed_config "${config_json:-$root/ds_config_gpt2.json}"
  ${CHECKPOINT_PATH:+--save "$CHECKPOINT_PATH"}
  "$@"
)
if [ -n "$is_dry" ]; then
  WORLD_SIZE=$((GPUS_PER_NODE * NNODES)) exec "$PYTHON" "$root/pretrain_gpt2.py" "${arguments[@]}"
fi
# shellcheck disable=SC2086 # LAUNCH_FLAGS is empty or several words
exec "$PYTHON" -m megatron.launch --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" $LAUNCH_FLAGS "$root/pretrain_gpt2.py" "${arguments[@]}"
