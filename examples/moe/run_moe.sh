#!/usr/bin/env bash
# Pretrains a decoder with experts: setup and sample data on the first start, then training. Other flags are passed to
# pretrain_gpt2.py:
#   bash examples/moe/run_moe.sh --train-iters 50      KIND=mixtral mp_size=2 EP=1 bash examples/moe/run_moe.sh --resume
# Set variables below (after their :-) or in the environment; they are passed as flags. An empty variable has the
# default in its comment, which flags and the JSON override.

MODEL=llama                                       # a family or a Hugging Face model type; --model replaces it

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

KIND=${KIND:-}                                    # glm4: sigmoid router balanced by a bias, a shared expert, a dense
                                                  #    first layer; or qwen3, mixtral: softmax router balanced by a loss
NLAYERS=${NLAYERS:-}                              # 4
NHIDDEN=${NHIDDEN:-}                              # 128
NHEADS=${NHEADS:-}                                # 4
NGROUPS=${NGROUPS:-}                              # 2; key-value heads, each shared by NHEADS / NGROUPS query heads
NFF=${NFF:-}                                      # 384; size of the dense feed-forward layers
NEXPERTS=${NEXPERTS:-}                            # 8; experts per layer
TOPK=${TOPK:-}                                    # 2; experts per token
NEXPERTFF=${NEXPERTFF:-}                          # 128; hidden size of an expert
SEQLEN=${SEQLEN:-}                                # 128
BATCHSIZE=${BATCHSIZE:-}                          # 4; samples per micro-batch
GAS=${GAS:-}                                      # 2; micro-batches per step. The samples per step are
                                                  #    BATCHSIZE * GAS * GPUS_PER_NODE * NNODES / max(pp_size, 1) / mp_size / cp_size
TRAIN_ITERS=${TRAIN_ITERS:-}                      # 300; steps

DATA_PATH=${DATA_PATH:-}                          # sample data, created on first use; token files without .bin/.idx, text,
                                                  #    or several with weights: "0.7 data/a 0.3 data/b"
TOKENIZER=${TOKENIZER:-}                          # the tokenizer of the sample data; tokenizer file
config_json=${config_json:-}                      # ds_config_moe.json next to this script; DeepSpeed's JSON
CHECKPOINT_PATH=${CHECKPOINT_PATH:-}              # runs/llama-<time>; run folder

# ----------------------------------------------------------------------------------------------------------------------
script_flags=(--expert-model-parallel-size EP --num-query-groups NGROUPS --ff-hidden-size NFF --num-experts NEXPERTS
  --moe-router-topk TOPK --moe-ffn-hidden-size NEXPERTFF --seq-length SEQLEN)
program=pretrain_gpt2.py                          # a LLaMA whose feed-forward layers are experts
recipe="--model $MODEL --num-layers 4 --hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --ff-hidden-size 384
  --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --seq-length 128 --batch-size 4 --gas 2
  --train-iters 300 --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --warmup 0.05 --adam-beta2 0.95
  --log-interval 20 --eval-interval 150 --eval-iters 2 --export-hf-interval 300"
stories="--packing best-fit --init-method-std 0.05 --sample-prompts 'Once upon a time' '从前'"
case ${KIND:-glm4} in
  glm4) recipe+=" --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-shared-expert-intermediate-size 128 --moe-layer-freq [0]+[1]*$((${NLAYERS:-4} - 1))" ;;
  qwen3) recipe+=" --qk-layernorm --moe-aux-loss-coeff 0.01" ;;
  mixtral) recipe+=" --moe-aux-loss-coeff 0.01" ;;
  *) echo "KIND must be glm4, qwen3 or mixtral, got '$KIND'. Leave it empty for glm4" >&2 && exit 2 ;;
esac
by_machine() {
  local ranks=$((GPUS_PER_NODE * NNODES / (pp_size > 1 ? pp_size : 1) / mp_size))
  recipe+=" --expert-model-parallel-size $((ranks % 2 ? 1 : 2))"
}
# shellcheck source=../../tools/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/run.sh" moe "$@"
