#!/usr/bin/env bash
# Pretrains BERT: setup and sample data on the first start, then training. Other flags are passed to pretrain_bert.py:
#   bash examples/bert/run_bert.sh --train-iters 50      NLAYERS=12 pp_size=4 bash examples/bert/run_bert.sh --resume
# Set variables below (after their :-) or in the environment; they are passed as flags. An empty variable has the
# default in its comment, which flags and the JSON override.

GPUS_PER_NODE=${GPUS_PER_NODE:-}                  # all GPUs that fit pp_size x mp_size; 4 CPU processes without a GPU
NNODES=${NNODES:-}                                # 1; number of machines; start this script on each of them
NODE_RANK=${NODE_RANK:-}                          # 0; index of the machine, 0 to NNODES-1
MASTER_ADDR=${MASTER_ADDR:-}                      # 127.0.0.1; address of machine 0 for the other machines
MASTER_PORT=${MASTER_PORT:-}                      # 29500

pp_size=${pp_size:-}                              # by machine; pipeline stages; 0 or 1: no pipeline
mp_size=${mp_size:-}                              # by machine; tensor-parallel size
cp_size=${cp_size:-}                              # 1; context-parallel size: processes that share each sequence

NLAYERS=${NLAYERS:-}                              # 4
NHIDDEN=${NHIDDEN:-}                              # 128
NHEADS=${NHEADS:-}                                # 4
SEQLEN=${SEQLEN:-}                                # 128
BATCHSIZE=${BATCHSIZE:-}                          # 8; samples per micro-batch
GAS=${GAS:-}                                      # 2; micro-batches per step. The samples per step are
                                                  #    BATCHSIZE * GAS * GPUS_PER_NODE * NNODES / max(pp_size, 1) / mp_size / cp_size
TRAIN_ITERS=${TRAIN_ITERS:-}                      # 400; steps

DATA_PATH=${DATA_PATH:-}                          # sample data, created on first use; token files without .bin/.idx, text,
                                                  #    or several with weights: "0.7 data/a 0.3 data/b"
TOKENIZER=${TOKENIZER:-}                          # the tokenizer of the sample data; tokenizer file
config_json=${config_json:-}                      # ds_config_bert.json next to this script; DeepSpeed's JSON
CHECKPOINT_PATH=${CHECKPOINT_PATH:-}              # runs/bert-<time>; run folder

# ----------------------------------------------------------------------------------------------------------------------
script_flags=(--seq-length SEQLEN)
recipe="--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --batch-size 8 --gas 2
  --train-iters 400 --attention-dropout 0 --hidden-dropout 0
  --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --warmup 0.05 --adam-beta2 0.95
  --log-interval 20 --eval-interval 200 --eval-iters 2"
# shellcheck source=../../tools/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/run.sh" bert "$@"
