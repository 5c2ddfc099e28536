#!/usr/bin/env bash
# Pretrains Qwen3: setup and sample data on the first start, then training. Other flags are passed to pretrain_gpt2.py:
#   bash examples/qwen3/run_qwen3.sh --train-iters 50      SIZE=1.7b mp_size=2 bash examples/qwen3/run_qwen3.sh --resume
# Set variables below (after their :-) or in the environment; they are passed as flags. An empty variable has the
# default in its comment, which flags and the JSON override.

MODEL=qwen3                                       # a family or a Hugging Face model type; --model replaces it

GPUS_PER_NODE=${GPUS_PER_NODE:-}                  # all GPUs that fit pp_size x mp_size; 4 CPU processes without a GPU
NNODES=${NNODES:-}                                # 1; number of machines; start this script on each of them
NODE_RANK=${NODE_RANK:-}                          # 0; index of the machine, 0 to NNODES-1
MASTER_ADDR=${MASTER_ADDR:-}                      # 127.0.0.1; address of machine 0 for the other machines
MASTER_PORT=${MASTER_PORT:-}                      # 29500

pp_size=${pp_size:-}                              # by machine; pipeline stages; 0 or 1: no pipeline
mp_size=${mp_size:-}                              # by machine; tensor-parallel size
cp_size=${cp_size:-}                              # 1; context-parallel size: processes that share each sequence

SIZE=${SIZE:-}                                    # tiny; or 0.6b, 1.7b, 4b, 8b: the published sizes
NLAYERS=${NLAYERS:-}                              # by SIZE; tiny 4
NHIDDEN=${NHIDDEN:-}                              # by SIZE; tiny 128
NHEADS=${NHEADS:-}                                # by SIZE; tiny 4
NGROUPS=${NGROUPS:-}                              # by SIZE; tiny 2; key-value heads
NFF=${NFF:-}                                      # by SIZE; tiny 384; size of the gated feed-forward layer
SEQLEN=${SEQLEN:-}                                # tiny 128, else 4096
BATCHSIZE=${BATCHSIZE:-}                          # tiny 8, else 1; samples per micro-batch
GAS=${GAS:-}                                      # tiny 2, else 16; micro-batches per step. The samples per step are
                                                  #    BATCHSIZE * GAS * GPUS_PER_NODE * NNODES / max(pp_size, 1) / mp_size / cp_size
TRAIN_ITERS=${TRAIN_ITERS:-}                      # tiny 400, else 20000; steps

DATA_PATH=${DATA_PATH:-}                          # sample data, created on first use; token files without .bin/.idx, text,
                                                  #    or several with weights: "0.7 data/a 0.3 data/b"
TOKENIZER=${TOKENIZER:-}                          # the tokenizer of the sample data; tokenizer file
config_json=${config_json:-}                      # ds_config_qwen3.json next to this script; DeepSpeed's JSON
CHECKPOINT_PATH=${CHECKPOINT_PATH:-}              # runs/llama-<time>; run folder

# ----------------------------------------------------------------------------------------------------------------------
script_flags=(--num-query-groups NGROUPS --ff-hidden-size NFF --seq-length SEQLEN)
program=pretrain_gpt2.py
recipe="--model $MODEL --rotary-base 1000000 --lr-decay-style cosine --adam-beta2 0.95"
tied=--tie-embeddings-and-output-weights
case ${SIZE:-tiny} in                             # layers, hidden size, heads, key-value heads, head size, feed-forward
  tiny) sizes="4 128 4 2 48 384 $tied" ;;
  0.6b) sizes="28 1024 16 8 128 3072 $tied" ;;
  1.7b) sizes="28 2048 16 8 128 6144 $tied" ;;
  4b) sizes="36 2560 32 8 128 9728 $tied" ;;
  8b) sizes="36 4096 32 8 128 12288" ;;
  *) echo "SIZE must be tiny, 0.6b, 1.7b, 4b or 8b, got '$SIZE'. Leave it empty for tiny" >&2 && exit 2 ;;
esac
read -r layers hidden heads groups head ff tied <<< "$sizes"
recipe+=" --num-layers $layers --hidden-size $hidden --num-attention-heads $heads --num-query-groups $groups
  --kv-channels $head --ff-hidden-size $ff $tied"
if [ "${SIZE:-tiny}" = tiny ]; then
  recipe+=" --seq-length 128 --batch-size 8 --gas 2 --train-iters 400 --lr 3e-3 --min-lr 1e-4 --warmup 0.05
    --log-interval 20 --eval-interval 200 --eval-iters 2"
  stories="--packing best-fit --init-method-std 0.05 --sample-prompts 'Once upon a time' '从前'"
else
  recipe+=" --seq-length 4096 --batch-size 1 --gas 16 --train-iters 20000 --lr 3e-4 --min-lr 3e-5 --warmup 0.01 --bf16
    --make-vocab-size-divisible-by 128"
fi
# shellcheck source=../../tools/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/run.sh" qwen3 "$@"
