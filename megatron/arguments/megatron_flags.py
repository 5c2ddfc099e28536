"""The table of other trainers' flags, a row each: Megatron-LM's, Megatron-DeepSpeed's, BigScience's and CPM's.

A flag that is a field of ours, under its own name or another, stands at that field (megatron/config/*.py). All others
stand here: neutral (``neutral_flags``), converted (``translate`` does it) or refused.
"""

from __future__ import annotations

from megatron.arguments.flag_row import CONVERTED, REFUSED, FlagRow, rows_of
from megatron.arguments.neutral_flags import NEUTRAL_ROWS


def _converted(flag: str, about: str, fields: str, kind: str = "", num_values: int | str | None = None) -> FlagRow:
    number = (1 if kind else 0) if num_values is None else num_values
    return FlagRow(
        flag=flag, kind=CONVERTED, about=about, num_values=number, kind_of_value=kind, fields=tuple(fields.split())
    )


_SHARDING = "no_shard: 0, optim: 1, optim_grads: 2, optim_grads_params: 3"
_PATHS = "weights, ranges and paths; ranges that are the same for all corpora become --split"
_MUP = "where not given, --mup-base-hidden-size is --hidden-size, and --mup-base-head-dim 1: scores by the head's size"
CONVERTED_ROWS = (
    # lengths
    _converted("--train-samples", "steps while they fit into N samples, for any batch sizes", "train_iters", "int"),
    _converted("--train-tokens", "steps until N tokens are read; the last one is completed", "train_iters", "int"),
    _converted("--lr-decay-tokens", "tokens / tokens of a sample", "lr_decay_samples", "int"),
    _converted("--lr-warmup-tokens", "tokens / tokens of a sample", "lr_warmup_samples", "int"),
    _converted("--exit-duration-in-secs", "seconds / 60", "exit_duration_in_mins", "float"),
    _converted("--distributed-timeout-minutes", "minutes x 60", "step_timeout", "float"),
    _converted("--initial-loss-scale", "its logarithm to base 2", "initial_scale_power", "float"),
    # the model
    _converted("--swiglu", "gated-silu, of 8/3 h rounded down to 64 where no size is given", "activation", ""),
    _converted("--glu-activation", "swiglu: gated-silu", "activation", "str"),
    _converted(
        "--bias-gelu-fusion", "gelu-tanh, which that kernel computes, where no activation is given", "activation"
    ),
    _converted("--no-bias-gelu-fusion", "gelu, which is exact, where no activation is given", "activation"),
    _converted("--group-query-attention", "one head of keys unless --num-query-groups says more", "num_query_groups"),
    _converted("--use-rope-scaling", "llama3", "rotary_scaling"),
    _converted("--rotary-seq-len-interpolation-factor", "linear, by this factor", "rotary_scaling", "float"),
    _converted("--use-mup", _MUP, "mup_base_hidden_size"),
    _converted("--scaling-recipe", f"mup: {_MUP}", "mup_base_hidden_size", "str"),
    _converted("--no-position-embedding", "none, unless another kind is given", "position_embedding_type"),
    _converted("--pad-vocab-size-to", "the rows of the table, all of them real", "vocab_size", "int"),
    _converted("--padded-vocab-size", "the rows of the table, all of them real", "vocab_size", "int"),
    _converted("--num-unique-layers", "must be --num-layers: layers share no weights", "num_layers", "int"),
    _converted("--calculate-per-token-loss", "token", "loss_average"),
    # layout and memory
    _converted(
        "--ds-sequence-parallel-size",
        "--context-parallel-size with --cp-comm-type a2a",
        "context_parallel_size cp_comm_type",
        "int",
    ),
    _converted("--no-pipeline-parallel", "no pipeline", "pipe_parallel_size"),
    _converted("--use-distributed-optimizer", "ZeRO 1, unless a stage is given", "zero_stage"),
    _converted("--use-torch-fsdp2", "ZeRO 3, unless a stage is given", "zero_stage"),
    _converted("--use-megatron-fsdp", "ZeRO, by --data-parallel-sharding-strategy", "zero_stage"),
    _converted("--data-parallel-sharding-strategy", _SHARDING, "zero_stage", "str"),
    _converted("--remote-device", "cpu: weights on the CPU, with --zero-stage 3", "offload_parameters", "str"),
    _converted("--activations-checkpoint-method", "whole layers are computed again", "checkpoint_activations", "str"),
    _converted("--activations-checkpoint-granularity", "its new name", "recompute_granularity", "str"),
    # data
    _converted("--mock-data", "random tokens", "data_path"),
    _converted("--data-args-path", "what the file says", "data_path", "str"),
    _converted("--per-split-data-args-path", "what the JSON file says", "train_data_path", "str"),
    *(
        _converted(f"--{split}-weighted-split-paths", _PATHS, f"{split}_data_path", "str", "*")
        for split in ("train", "valid", "test")
    ),
    *(
        _converted(f"--{split}-weighted-split-paths-path", f"of a file: {_PATHS}", f"{split}_data_path", "str")
        for split in ("train", "valid", "test")
    ),
    _converted("--fim-data", "--fim-rate, which is 0.5 where it is not given", "fim_rate"),
    # the run
    _converted("--profile-step-start", "the step before the first of --profile", "profile", "int"),
    _converted("--profile-step-end", "the last step of --profile", "profile", "int"),
    _converted("--skip-train", "--eval-only with --load or --resume, otherwise --train-iters 0", "eval_only"),
    _converted("--exit-on-missing-checkpoint", "--load needs a checkpoint", "load_if_exists"),
    _converted("--save-retain-interval", "--keep-last 1 and --keep-every", "keep_every", "int"),
)

# Reason -> flags that would change the numbers and cannot be done; "=" behind a flag: one value follows, "=*": several.

GROUPS = {
    "use --moe-router-num-groups and --moe-router-group-topk": "--moe-router-topk-limited-devices=",
    "every layer attends as its family does; leave it out": """
        --multi-latent-attention --experimental-attention-variant=
        --experimental-attention-variant-loss-scale-func= --attention-output-gate --qk-l2-norm --qk-clip
        --no-rope-freq= --mrope-section=*""",
    "all layers are alike, attention and feed-forward; leave it out": """
        --spec=* --hybrid-attention-ratio= --hybrid-mlp-ratio= --hybrid-override-pattern=
        --hybrid-layer-pattern= --is-hybrid-model --heterogeneous-layers-config-path=
        --heterogeneous-layers-config-encoded-json= --linear-attention-freq= --enable-mhc-connections""",
    "a model predicts one token at a time; leave it out": "--mtp-num-layers=",
    "there is no retrieval; leave it out": "--retro-add-retriever",
    "use --activation gated-gelu or gated-silu": "--quick-geglu --activation-func-clamp-value= --glu-linear-offset=",
    "the network computes in the format of its weights: use --bf16, --fp16 or --fp32": """
        --fp8-format= --fp8-hybrid --fp8-e4m3 --fp8-amax-history-len= --fp8-amax-compute-algo=
        --fp8-param-gather --fp4-format= --fp4-param-gather --fp32-residual-connection
        --embedding-weights-in-fp32 --output-logit-dtype= --fp8-dot-product-attention --fp8-multi-head-attention
        --kitchen-config-file= --kitchen-recipe-number= --use-kitchen""",
    "use --optimizer adamw, adafactor or sgd": "--use-bnb-optimizer --no-decoupled-weight-decay",
    "weight decay is the same in all steps: use --weight-decay": "--start-weight-decay= --end-weight-decay=",
    "norms and biases have no weight decay, all other weights have; leave it out": """
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type=""",
    "all weights start alike: use --init-method-std": """
        --embedding-init-method-std= --init-method-xavier-uniform""",
    "it would truncate samples and lose their tokens; let the length grow by --seq-length-schedule": """
        --curriculum-learning-legacy""",
    "samples are not chosen by difficulty, and all steps run all layers; leave it out": """
        --data-efficiency-curriculum-learning --random-ltd""",
    "no step is left out by its number; --stability-guard rollback leaves the data of bad steps out": """
        --iterations-to-skip=* --skip-train-iteration-range=* --grad-norm-skip-threshold=""",
    "the batch grows by --rampup-batch-size START INCREMENT SAMPLES; use that": "--step-batch-size-schedule=",
    "there is no reinforcement learning; leave it out": """
        --perform-rl-step --RLHF --ppo-epoches= --actor-learning-rate= --critic-learning-rate=""",
    "there is no distillation; leave it out": "--kd --mos --logits-save-dir= --logits-load-dir=",
    "samples come in the order that follows from --seed; leave it out": """
        --train-sample-idx-path= --train-doc-idx-path= --train-shuffle-idx-path= --train-idx-path=
        --train-desc-path= --train-data-exact-num-epochs= --phase-transition-iterations=""",
    "every token of a text is trained on, and of conversations (--sft) what the assistant says; leave it out": """
        --loss-on-targets-only --reweight-loss-based-on-position-frequency --use-dataset-only=""",
    "--fim-rate moves the middle of whole documents; leave it out": """
        --fim-split-sample= --fim-fragment-rate= --fim-no-prefix=""",
    "the tokenizer's file has these tokens under their own names; leave it out": """
        --fim-prefix-token= --fim-middle-token= --fim-suffix-token= --fim-pad-token= --fim-eod-token=""",
    "documents are kept apart by --reset-attention-mask and --reset-position-ids; use these": """
        --dataloader-inter-document-masking""",
    "checkpoints of Megatron-LM are converted by tools/import_checkpoint.py": """
        --ckpt-convert-format= --ckpt-convert-save= --ckpt-convert-update-legacy-dist-opt-format""",
    "the learning rate follows the step and the flags given now; repeat the first flags": """
        --use-checkpoint-lr-scheduler --use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler""",
    "use --finetune, which starts at step 0 with the weights alone": """
        --reset-iteration --no-load-lr-state --override-ckpt-iteration=""",
    "give --load the folder of that checkpoint: RUN/checkpoints/step-00000020": "--ckpt-step= --load-tag=",
    "use --eval-only, or tools/generate.py": "--inference --ds-inference",
    "attention takes whole sequences; use --sequence-parallel, which cuts the rest, or leave it out": """
        --ds-sequence-parallel-fpdt --gtp-remat-opt-in-modules=* --tensor-parallel-num-weight-shards=""",
    "all layers are trained; leave it out": "--freeze-all-layers",
    "give the layout; a checkpoint loads in every layout": "--use-mp-args-from-checkpoint-args",
    "replicas start with the same weights; leave it out": "--data-parallel-random-init",
    "rotary positions turn halves against each other, as in Hugging Face's files; leave it out": "--rotary-interleaved",
    "use --eval-iters, as many as the validation split has": "--full-validation",
    "evaluations have the batch of the training, every --eval-interval steps; leave it out": """
        --eval-global-batch-size= --eval-micro-batch-size= --start-eval-at-iter=""",
    "give them in turn to --eval-only --test-data-path": "--multiple-validation-sets --validation-set-names=*",
    "use --load with --finetune": "--pretrained-checkpoint=",
    "fp32 masters are part of the optimizer's state, which --load reads; leave it out": "--load-main-params-from-ckpt",
    "products of bf16 are as torch has them; leave it out": "--disable-bf16-reduced-precision-matmul",
    "there is no compression; leave it out": "--compression-training",
    "use --profile, or --pipeline-trace": "--profile-backward --profile_steps=",
    "give the flags themselves; --deepspeed_config takes DeepSpeed's JSON": "--yaml-cfg=",
}
"""The decoder's own settings stand at its fields; a family may say more in the ``REFUSED`` of its section."""

REFUSED_ROWS = tuple(rows_of(REFUSED, GROUPS))

ROWS = {row.flag: row for row in (*NEUTRAL_ROWS, *CONVERTED_ROWS, *REFUSED_ROWS)}
"""Flag -> its row."""
REFUSED_FLAGS = {row.flag: row.about for row in REFUSED_ROWS}
"""Flag -> why it is refused; what a family says in place of it is in the ``REFUSED`` of its section."""

_CPM_NAMES = """
--num-layers --num-unique-layers --param-sharing-style --hidden-size --kv-hidden-size --ff-hidden-size
--num-attention-heads --max-position-embeddings --make-vocab-size-divisible-by --layernorm-epsilon
--apply-residual-connection-post-layernorm --openai-gelu --onnx-safe --attention-dropout --hidden-dropout --weight-decay
--clip-grad --adam-beta1 --adam-beta2 --adam-eps --batch-size --gas --checkpoint-activations
--distribute-checkpointed-activations --checkpoint-num-layers --train-iters --log-interval --exit-interval
--tensorboard-dir --scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --bias-gelu-fusion
--bias-dropout-fusion --hidden-bias --cpu-optimizer --cpu_torch_adam --seed --init-method-std --lr --lr-decay-style
--lr-decay-iters --min-lr --warmup --override-lr-scheduler --use-checkpoint-lr-scheduler --save --save-interval
--no-save-optim --no-save-rng --load --no-load-optim --no-load-rng --finetune --fp16 --apply-query-key-layer-scaling
--attention-softmax-in-fp32 --fp32-allreduce --hysteresis --loss-scale --loss-scale-window --min-scale
--fp16-lm-cross-entropy --model-parallel-size --pipe-parallel-size --distributed-backend --local_rank --lazy-mpu-init
--use-cpu-initialization --eval-iters --eval-interval --data-path --split --vocab-file --merge-file --seq-length
--enc-seq-length --dec-seq-length --mask-prob --short-seq-prob --mmap-warmup --num-workers --tokenizer-type --data-impl
--reset-position-ids --reset-attention-mask --eod-mask-loss --adlr-autoresume --adlr-autoresume-interval --ict-head-size
--ict-load --bert-load --titles-data-path --query-in-block-prob --use-one-sent-docs --report-topk-accuracies
--faiss-use-gpu --block-data-path --indexer-batch-size --indexer-log-interval --zero-reduce-scatter
--zero-contigious-gradients --deepspeed-activation-checkpointing --partition-activations --contigious-checkpointing
--checkpoint-in-cpu --synchronize-each-layer --profile-backward --deepspeed --deepspeed_config --deepscale
--deepscale_config --deepspeed_mpi
"""
CPM_FLAGS = tuple(_CPM_NAMES.split())
"""The flags of CPM-Pretrain, in the order of its own --help."""
