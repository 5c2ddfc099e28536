#!/usr/bin/env bash
# Pretrains a DeepSeek-V2 (multi-latent attention, experts): setup and sample data on the first start, then training.
# Other flags are passed to pretrain_gpt2.py:
#   bash examples/deepseek/run_deepseek.sh --train-iters 50      SIZE=v2-lite bash examples/deepseek/run_deepseek.sh --dry-run
# Set variables below (after their :-) or in the environment; they are passed as flags. An empty variable has the
# default in its comment, which flags and the JSON override.

MODEL=deepseek_v2                                 # a family or a Hugging Face model type; --model replaces it

GPUS_PER_NODE=${GPUS_PER_NODE:-}                  # all GPUs that fit pp_size x mp_size; 4 CPU processes without a GPU
NNODES=${NNODES:-}                                # 1; number of machines; start this script on each of them
NODE_RANK=${NODE_RANK:-}                          # 0; index of the machine, 0 to NNODES-1
MASTER_ADDR=${MASTER_ADDR:-}                      # 127.0.0.1; address of machine 0 for the other machines
MASTER_PORT=${MASTER_PORT:-}                      # 29500

pp_size=${pp_size:-}                              # by machine; pipeline stages; 0 or 1: no pipeline
mp_size=${mp_size:-1}                             # 1; tensor-parallel size
cp_size=${cp_size:-}                              # 1; context-parallel size: processes that share each sequence
EP=${EP:-}                                        # 2 if replicas x cp_size is even, else 1; expert-parallel size: ranks
                                                  #    that share the experts of a layer

SIZE=${SIZE:-}                                    # tiny; or v2-lite: the shape of DeepSeek-V2-Lite
NLAYERS=${NLAYERS:-}                              # by SIZE; tiny 4
NHIDDEN=${NHIDDEN:-}                              # by SIZE; tiny 128
NHEADS=${NHEADS:-}                                # by SIZE; tiny 4
KVRANK=${KVRANK:-}                                # by SIZE; tiny 48; size of the latent of keys and values
NFF=${NFF:-}                                      # by SIZE; tiny 384; size of the dense feed-forward layer
NEXPERTS=${NEXPERTS:-}                            # by SIZE; tiny 8; experts per layer
TOPK=${TOPK:-}                                    # by SIZE; tiny 2; experts per token
NEXPERTFF=${NEXPERTFF:-}                          # by SIZE; tiny 128; hidden size of an expert
SEQLEN=${SEQLEN:-}                                # by SIZE; tiny 128
BATCHSIZE=${BATCHSIZE:-}                          # by SIZE; tiny 4; samples per micro-batch
GAS=${GAS:-}                                      # by SIZE; tiny 2; micro-batches per step. The samples per step are
                                                  #    BATCHSIZE * GAS * GPUS_PER_NODE * NNODES / max(pp_size, 1) / mp_size / cp_size
TRAIN_ITERS=${TRAIN_ITERS:-}                      # by SIZE; tiny 300; steps

DATA_PATH=${DATA_PATH:-}                          # sample data, created on first use; token files without .bin/.idx, text,
                                                  #    or several with weights: "0.7 data/a 0.3 data/b"
TOKENIZER=${TOKENIZER:-}                          # the tokenizer of the sample data; tokenizer file
config_json=${config_json:-}                      # ds_config_deepseek.json next to this script; DeepSpeed's JSON
CHECKPOINT_PATH=${CHECKPOINT_PATH:-}              # runs/llama-<time>; run folder

# ----------------------------------------------------------------------------------------------------------------------
script_flags=(--expert-model-parallel-size EP --kv-lora-rank KVRANK --ff-hidden-size NFF --num-experts NEXPERTS
  --moe-router-topk TOPK --moe-ffn-hidden-size NEXPERTFF --seq-length SEQLEN)
program=pretrain_gpt2.py
recipe="--model $MODEL --lr-decay-style cosine --adam-beta2 0.95"
case ${SIZE:-tiny} in # layers, hidden, heads, latent, key, rotated, value, feed-forward, experts, top k, expert, shared
  tiny) sizes="4 128 4 48 32 16 32 384 8 2 128 128" ;;
  v2-lite) sizes="27 2048 16 512 128 64 128 10944 64 6 1408 2816" ;;
  *) echo "SIZE must be tiny or v2-lite, got '$SIZE'. Leave it empty for tiny" >&2 && exit 2 ;;
esac
read -r layers hidden heads latent key rotated value ff experts topk expert_ff shared <<< "$sizes"
recipe+=" --num-layers $layers --hidden-size $hidden --num-attention-heads $heads --kv-lora-rank $latent
  --qk-head-dim $key --qk-pos-emb-head-dim $rotated --v-head-dim $value --ff-hidden-size $ff --num-experts $experts
  --moe-router-topk $topk --moe-ffn-hidden-size $expert_ff --moe-shared-expert-intermediate-size $shared
  --moe-layer-freq [0]+[1]*$((${NLAYERS:-$layers} - 1))"
if [ "${SIZE:-tiny}" = tiny ]; then
  recipe+=" --seq-length 128 --batch-size 4 --gas 2 --train-iters 300 --lr 3e-3 --min-lr 1e-4 --warmup 0.05
    --moe-aux-loss-coeff 0.01 --log-interval 20 --eval-interval 150 --eval-iters 2 --export-hf-interval 300"
  stories="--packing best-fit --init-method-std 0.05 --sample-prompts 'Once upon a time' '从前'"
else
  recipe+=" --seq-length 4096 --batch-size 1 --gas 16 --train-iters 20000 --lr 4.2e-4 --min-lr 4.2e-5 --warmup 0.01
    --moe-aux-loss-coeff 0.001 --init-method-std 0.006 --bf16"
fi
by_machine() {
  local ranks=$((GPUS_PER_NODE * NNODES / (pp_size > 1 ? pp_size : 1) / mp_size))
  recipe+=" --expert-model-parallel-size $((ranks % 2 ? 1 : 2))"
}
# shellcheck source=../../tools/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/run.sh" deepseek "$@"
