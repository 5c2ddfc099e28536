#!/usr/bin/env bash
# Pretrains GPT-2: set-up and sample data on the first start, then the training. Further flags go to pretrain_gpt2.py:
#   bash run_gpt2.sh --train-iters 50      bash run_gpt2.sh --resume      NLAYERS=12 pp_size=4 bash run_gpt2.sh
# Set a variable here, behind its :-, or give it in the environment. What is left empty is what its comment says, and
# gives way to a flag and to the JSON; what is set is passed as a flag.

GPUS_PER_NODE=${GPUS_PER_NODE:-}                  # all GPUs that fit pp_size x mp_size; without a GPU 4 CPU processes
NNODES=${NNODES:-}                                # 1; machines, start this script on each of them
NODE_RANK=${NODE_RANK:-}                          # 0; 0 to NNODES-1, another on each machine
MASTER_ADDR=${MASTER_ADDR:-}                      # 127.0.0.1; machine 0 as the others reach it
MASTER_PORT=${MASTER_PORT:-}                      # 29500

pp_size=${pp_size:-}                              # by machine; pipeline stages; 0 or 1: no pipeline
mp_size=${mp_size:-}                              # by machine; tensor slices of each layer

NLAYERS=${NLAYERS:-}                              # 4
NHIDDEN=${NHIDDEN:-}                              # 128
NHEADS=${NHEADS:-}                                # 4
SEQLEN=${SEQLEN:-}                                # 128
BATCHSIZE=${BATCHSIZE:-}                          # 8; samples of a micro-batch
GAS=${GAS:-}                                      # 4; micro-batches of a step; with it the samples of a step are
                                                  #    BATCHSIZE * GAS * GPUS_PER_NODE * NNODES / max(pp_size, 1) / mp_size
TRAIN_ITERS=${TRAIN_ITERS:-}                      # 100; steps

DATA_PATH=${DATA_PATH:-}                          # the sample data, made on first use; token files without .bin/.idx
TOKENIZER=${TOKENIZER:-}                          # the sample data's; tokenizer file
config_json=${config_json:-}                      # ds_config_gpt2.json; DeepSpeed's JSON
CHECKPOINT_PATH=${CHECKPOINT_PATH:-}              # runs/gpt2-<time>; run folder

# ----------------------------------------------------------------------------------------------------------------------
set -euo pipefail
flags=()                                          # what the user set
variables=                                        # which flag a variable sets, for messages
add() {                                           # add FLAG VARIABLE: pass the variable as a flag if it is set
  variables+="$1=$2 "
  if [ -n "${!2}" ]; then flags+=("$1" "${!2}"); fi
}
add --pipe-parallel-size pp_size
add --model-parallel-size mp_size
add --num-layers NLAYERS
add --hidden-size NHIDDEN
add --num-attention-heads NHEADS
add --seq-length SEQLEN
add --batch-size BATCHSIZE
add --gas GAS
add --train-iters TRAIN_ITERS
add --data-path DATA_PATH
add --tokenizer-path TOKENIZER
add --deepspeed_config config_json
add --save CHECKPOINT_PATH

export GPUS_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT pp_size mp_size
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh" run
is_dry=
has_data=$DATA_PATH
for flag in "$@"; do
  case $flag in
    -h | --help) exec "$PYTHON" "$root/pretrain_gpt2.py" --help ;;
    --dry-run) is_dry=1 ;;
    --data-path | --data-path=*) has_data=1 ;;
  esac
done

machine=$("$PYTHON" -m megatron.launch.machine) || exit
eval "$machine"

quoted() {                                        # quoted TEXT: one word for whoever reads the recipe
  local quote="'"
  printf "'%s'" "${1//$quote/$quote\\$quote$quote}"
}
recipe="--pipe-parallel-size $pp_size --model-parallel-size $mp_size
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --batch-size 8 --gas 4 --train-iters 100
  --hidden-bias --attention-dropout 0 --hidden-dropout 0
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --warmup 0.05
  --log-interval 10 --eval-interval 50 --eval-iters 2
  --deepspeed_config $(quoted "$root/ds_config_gpt2.json")"
if [ -z "$has_data" ]; then
  sample=$root/data/sample
  if [ -z "$is_dry" ]; then "$PYTHON" "$root/tools/make_sample_data.py"; fi
  recipe+=" --data-path $(quoted "$sample/gpt2_text_document") --split 900,50,50"  # let each split hold texts and code
  if [ -z "$is_dry" ] || [ -e "$sample/tokenizer.json" ]; then
    recipe+=" --tokenizer-path $(quoted "$sample/tokenizer.json")"
  elif [ -z "$TOKENIZER" ]; then
    echo "the sample data are not made yet: counting with their vocabulary of 8,192 tokens" >&2
    recipe+=" --vocab-size 8192"
  fi
fi
export MEGATRON_DEFAULTS="$recipe ${MEGATRON_DEFAULTS:-}" MEGATRON_VARIABLES=$variables

if [ -n "$is_dry" ]; then
  WORLD_SIZE=$((GPUS_PER_NODE * NNODES)) exec "$PYTHON" "$root/pretrain_gpt2.py" ${flags[@]+"${flags[@]}"} "$@"
fi
# shellcheck disable=SC2086 # LAUNCH_FLAGS is empty or several words
exec "$PYTHON" -m megatron.launch --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" $LAUNCH_FLAGS "$root/pretrain_gpt2.py" \
  ${flags[@]+"${flags[@]}"} "$@"
