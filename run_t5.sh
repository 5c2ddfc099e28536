#!/usr/bin/env bash
# Pretrains T5: setup and sample data on the first start, then training. Other flags are passed to pretrain_t5.py:
#   bash run_t5.sh --train-iters 50      bash run_t5.sh --resume      NLAYERS=12 pp_size=4 bash run_t5.sh
# Set variables below (after their :-) or in the environment; they are passed as flags. An empty variable has the
# default in its comment, which flags and the JSON override.

GPUS_PER_NODE=${GPUS_PER_NODE:-}                  # all GPUs that fit pp_size x mp_size; 4 CPU processes without a GPU
NNODES=${NNODES:-}                                # 1; number of machines; start this script on each of them
NODE_RANK=${NODE_RANK:-}                          # 0; index of the machine, 0 to NNODES-1
MASTER_ADDR=${MASTER_ADDR:-}                      # 127.0.0.1; address of machine 0 for the other machines
MASTER_PORT=${MASTER_PORT:-}                      # 29500

pp_size=${pp_size:-}                              # by machine; pipeline stages; 0 or 1: no pipeline
mp_size=${mp_size:-}                              # by machine, 1 on the sample data; tensor-parallel size

NLAYERS=${NLAYERS:-}                              # 2; layers of the encoder, and as many of the decoder
NHIDDEN=${NHIDDEN:-}                              # 128
NHEADS=${NHEADS:-}                                # 4
ENC_SEQLEN=${ENC_SEQLEN:-}                        # 96; encoder tokens
DEC_SEQLEN=${DEC_SEQLEN:-}                        # the exact target length; longer pads, shorter is an error
BATCHSIZE=${BATCHSIZE:-}                          # 4; samples per micro-batch
GAS=${GAS:-}                                      # 2; micro-batches per step. The samples per step are
                                                  #    BATCHSIZE * GAS * GPUS_PER_NODE * NNODES / max(pp_size, 1) / mp_size
TRAIN_ITERS=${TRAIN_ITERS:-}                      # 400; steps

DATA_PATH=${DATA_PATH:-}                          # sample data, created on first use; token files without .bin/.idx, text,
                                                  #    or several with weights: "0.7 data/a 0.3 data/b"
TOKENIZER=${TOKENIZER:-}                          # the tokenizer of the sample data; tokenizer file
config_json=${config_json:-}                      # ds_config_t5.json; DeepSpeed's JSON
CHECKPOINT_PATH=${CHECKPOINT_PATH:-}              # runs/t5-<time>; run folder

# ----------------------------------------------------------------------------------------------------------------------
script_flags=(--enc-seq-length ENC_SEQLEN --dec-seq-length DEC_SEQLEN --seq-length SEQLEN)  # T5 rejects --seq-length
recipe="--num-layers 2 --hidden-size 128 --num-attention-heads 4 --enc-seq-length 96 --batch-size 4 --gas 2
  --train-iters 400 --attention-dropout 0 --hidden-dropout 0
  --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --warmup 0.05
  --log-interval 20 --eval-interval 200 --eval-iters 2"
stories="--optimizer adafactor --lr 3e-2 --model-parallel-size 1
  --reset-attention-mask --noise-density 0.5 --mean-span-length 30 --sample-prompts
  'Ben was a little bear who lived in the forest. He had a good friend, Mia the cat. One day it was grey and quiet. Ben went for a walk by the river. <extra_id_0> \"Stand next to me,\" said Mia. They waited until the rain stopped. Then they saw a rainbow over the river. The end.'
  '旺旺是一只可爱的小狗。他有一个好朋友，叫花花。一天早上，阳光很暖和。旺旺去小河边散步。<extra_id_0>“站到我身边来。”花花说。他们一起等到雨停。后来，他们看见河上有一道彩虹。这真是美好的一天。'"
# shellcheck source=tools/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/tools/run.sh" t5 "$@"
