"""Every flag of Megatron-LM and CPM that is no field of ours, with the reason and the way out."""

from __future__ import annotations

# Refused flags of Megatron-LM and Megatron-DeepSpeed of which several have one reason, under that reason.
#
# A reason says why there is no such flag and what to use instead. Flags with reasons of their own are in ``REFUSED``.

GROUPS = {
    # the model
    "the models are dense; leave it out": """
        --num-experts --expert-model-parallel-size --expert-tensor-parallel-size --enable-expert-tensor-parallelism
        --mlp-type --topk --use-tutel --create-moe-param-group --disable-moe-token-dropping --moe-loss-coeff
        --moe-expert-parallel-size --moe-expert-capacity-factor --moe-train-capacity-factor --moe-eval-capacity-factor
        --moe-min-capacity --moe-router-topk --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff
        --moe-grouped-gemm --moe-token-dispatcher-type --moe-layer-freq --moe-ffn-hidden-size
        --moe-shared-expert-intermediate-size --moe-shared-expert-overlap --moe-router-pre-softmax
        --moe-router-score-function --moe-router-enable-expert-bias --moe-router-bias-update-rate
        --moe-router-topk-scaling-factor --moe-router-num-groups --moe-router-group-topk --moe-router-dtype
        --moe-router-fusion --moe-router-force-load-balancing --moe-permute-fusion --moe-enable-deepep
        --moe-pad-expert-input-to-capacity --moe-token-drop-policy --moe-layer-recompute --moe-use-upcycling
        --moe-use-legacy-grouped-gemm --moe-extended-tp --moe-input-jitter-eps --moe-per-layer-logging
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute""",
    "every layer attends as its family does; leave it out": """
        --softmax-type --multi-latent-attention --q-lora-rank --kv-lora-rank
        --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --attention-output-gate --qk-l2-norm --no-rope-freq
        --mrope-section""",
    "all layers are alike, attention and feed-forward; leave it out": """
        --spec --hybrid-attention-ratio --hybrid-mlp-ratio --hybrid-override-pattern --is-hybrid-model
        --heterogeneous-layers-config-path --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads""",
    "a model predicts one token at a time; leave it out": "--mtp-num-layers --mtp-loss-scaling-factor",
    "there is no retrieval; leave it out": "--retro-project-dir --retro-add-retriever --retriever-seq-length",
    "use --activation gated-gelu or gated-silu": "--quick-geglu --glu-activation",
    "the network computes in the format of its weights: use --bf16, --fp16 or --fp32": """
        --fp8-recipe --fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo --fp8-param-gather
        --no-fp8-wgrad --fp4-format --first-last-layers-bf16 --fp32-residual-connection""",
    "no kernel is written by hand for it; leave it out": """
        --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-gradient-accumulation-fusion
        --no-rope-fusion --no-persist-layer-norm --abort-on-unmet-fused-kernel-constraints --use-te-activation-func
        --no-gradient-reduce-div-fusion""",
    "there are no CUDA graphs: use --compile, or leave it out": """
        --enable-cuda-graph --external-cuda-graph --cuda-graph-impl --cuda-graph-scope --cuda-graph-warmup-steps
        --te-rng-tracker""",
    # steps, optimizer, learning rate
    "masters, their gradients and the optimizer's states are fp32; leave it out": """
        --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype""",
    "use --optimizer adamw, adafactor or sgd": """
        --muon-momentum --muon-use-nesterov --muon-scale-mode --muon-num-ns-steps --muon-no-split-qkv --muon-tp-mode
        --muon-fp32-matmul-prec --muon-extra-scale-factor --ds_fused_adam""",
    "SGD has no momentum here; leave it out, or use --optimizer adamw": "--sgd-momentum",
    "--offload-optimizer moves all of the optimizer's states; leave it out": """
        --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d""",
    "use --no-pin-memory": "--no-pin-cpu-grads --no-pin-cpu-params",
    "weight decay is the same in all steps: use --weight-decay": """
        --weight-decay-incr-style --start-weight-decay --end-weight-decay""",
    "all weights have one learning rate: use --lr and --min-lr": "--decoupled-lr --decoupled-min-lr",
    "all weights start alike: use --init-method-std": "--embedding-init-method-std --init-method-xavier-uniform",
    "all steps have samples of one length and run all layers; leave it out": """
        --curriculum-learning-legacy --data-efficiency-curriculum-learning --random-ltd""",
    "no step is computed twice: see --stability-guard and --drift-interval": """
        --rerun-mode --error-injection-rate --error-injection-type""",
    "there is no reinforcement learning; leave it out": """
        --perform-rl-step --grpo-iterations --grpo-group-size --RLHF --ppo-epoches --actor-learning-rate
        --critic-learning-rate""",
    "there is no distillation; leave it out": """
        --kd --kd-alpha-ce --kd-beta-ce --kd-temp --load-teacher --num-layers-teacher --hidden-size-teacher
        --num-attention-heads-teacher""",
    # ranks and messages
    "ZeRO is switched by --zero-stage 0 to 3, or zero_optimization.stage of the JSON; leave it out": """
        --zero-reduce-scatter --zero-contigious-gradients --use-distributed-optimizer --overlap-param-gather
        --overlap-param-gather-with-optimizer-step --no-align-param-gather --num-distributed-optimizer-instances
        --zero-reduce-bucket-size --zero-allgather-bucket-size""",
    "use --zero-stage 3, without a pipeline": """
        --use-torch-fsdp2 --use-megatron-fsdp --torch-fsdp2-no-reshard-after-forward --data-parallel-sharding-strategy
        --fsdp-double-buffer --init-model-with-meta-device --remote-device""",
    "attention takes whole sequences; use --sequence-parallel, which cuts the rest, or leave it out": """
        --context-parallel-size --cp-comm-type --ds-sequence-parallel-size --hierarchical-context-parallel-sizes
        --force-ds-sequence-parallel""",
    "stages are balanced by cost: see --partition-method": """
        --standalone-embedding-stage --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
        --pipeline-model-parallel-layout --pp-partition-method""",
    "gradients are summed in buckets of 32 MiB; leave it out": """
        --ddp-bucket-size --ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective
        --ddp-reduce-scatter-with-fp32-accumulation --no-align-grad-reduce""",
    "messages of tensor ranks run beside the products of weights' gradients anyway; leave it out": """
        --tp-comm-overlap --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend
        --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --disable-tp-comm-bulk-dgrad
        --disable-tp-comm-bulk-wgrad --disable-tp-comm-split-ag --disable-tp-comm-split-rs""",
    "--pipeline-schedule zb-h1 puts gradients of weights off": """
        --defer-embedding-wgrad-compute --wgrad-deferral-limit""",
    "the schedule says when stages send: see --pipeline-schedule": """
        --no-overlap-p2p-communication --overlap-p2p-communication --overlap-p2p-communication-warmup-flush
        --microbatch-group-size-per-virtual-pipeline-stage
        --no-scatter-gather-tensors-in-pipeline --use-ring-exchange-p2p""",
    "messages go as torch.distributed sends them; set NCCL's own variables, or leave it out": """
        --use-nccl-ub --use-sharp --sharp-enabled-group --nccl-communicator-config-path --high-priority-stream-groups
        --disable-gloo-process-groups --pipeline-model-parallel-comm-backend""",
    # data
    "samples come in one order, which follows from the seed; leave it out": """
        --dataloader-type --repeated-dataloader --train-sample-idx-path --train-doc-idx-path --train-shuffle-idx-path
        --return-data-index""",
    "a sample is found by arithmetic and no index of samples is built; leave it out": """
        --num-dataset-builder-threads --mid-level-dataset-surplus --train-data-exact-num-epochs
        --object-storage-cache-path""",
    "give the paths to --data-path, or to --train-data-path and its like": """
        --data-args-path --per-split-data-args-path --train-weighted-split-paths --valid-weighted-split-paths""",
    "give the files of the tokenizer: --tokenizer-path, or --vocab-file and --merge-file": """
        --tokenizer-metadata --tokenizer-name-or-path --tiktoken-pattern --tiktoken-num-special-tokens
        --tiktoken-special-tokens --legacy-tokenizer --trust-remote-code""",
    "use --make-vocab-size-divisible-by": "--padded-vocab-size --pad-vocab-size-to",
    # checkpoints
    "checkpoints have one format; leave it out": """
        --ckpt-format --use-dist-ckpt --dist-ckpt-format --no-ckpt-fully-parallel-save
        --ckpt-assume-constant-structure --dist-ckpt-optim-fully-reshardable --use-persistent-ckpt-worker""",
    "a checkpoint must hold every weight of the model; leave it out": """
        --dist-ckpt-strictness --no-strict-fsdp-dtensor-load""",
    "checkpoints of Megatron-LM are converted by tools/import_checkpoint.py": """
        --ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format""",
    "use --save-interval": """
        --persistent-save-interval --non-persistent-save-interval --non-persistent-ckpt-type
        --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo
        --replication --replication-jump --replication-factor""",
    # what a run tells
    "every number of metrics.jsonl goes to TensorBoard; leave it out": """
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
        --log-memory-to-tensorboard --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard
        --log-world-size-to-tensorboard --no-log-loss-scale-to-tensorboard --no-log-learnig-rate-to-tensorboard""",
    'use "wall_clock_breakdown": true in the JSON': """
        --timing-log-level --timing-log-option --no-barrier-with-level-1-timing""",
    "ranks that are slow are named anyway: see docs/running.md": """
        --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port --straggler-minmax-count""",
    "the launcher starts ranks again: see --max-restarts of docs/launching.md": """
        --inprocess-restart --enable-ft-package --calc-ft-timeouts""",
    "NVIDIA's internal logger; leave it out": """
        --enable-one-logger --no-one-logger --one-logger-project --one-logger-run-name --one-logger-async
        --app-tag-run-name --app-tag-run-version""",
    "Python's collector is left as it is; leave it out": "--manual-gc --manual-gc-interval --no-manual-gc-eval",
    "metrics.jsonl has the memory of every stage; leave it out": "--record-memory-history --memory-snapshot-path",
}
"""Reason -> flags, in the order of the concerns of a run."""
BY_REASON = {flag: reason for reason, flags in GROUPS.items() for flag in flags.split()}
"""Flag -> its reason."""


# Every flag of CPM-Pretrain and today's Megatron-LM that is not a field of ours: what happens to it, and why.
#
# | class | on the command line |
# |---|---|
# | honoured, alias | sets a field: megatron/config/*.py, one field each; some in T5 or in GPT-2 only |
# | already so | accepted; what it asks for always holds here, which is said once in the log |
# | refused | an error, exit code 2, with what to use instead |

_SDPA = "scaled_dot_product_attention takes the fastest kernel that the device has"

ALREADY_SO = {
    "--deepspeed": "every run uses DeepSpeed's engine",
    "--deepspeed-activation-checkpointing": "--partition-activations, --contigious-checkpointing and "
    "--checkpoint-in-cpu act without it",
    "--scaled-upper-triang-masked-softmax-fusion": "scaled_dot_product_attention computes scale, mask and softmax",
    "--scaled-masked-softmax-fusion": "scaled_dot_product_attention computes scale, mask and softmax",
    "--attention-softmax-in-fp32": "scaled_dot_product_attention keeps the softmax of 16-bit inputs in fp32",
    "--apply-query-key-layer-scaling": "it keeps fp16 scores small and changes no result; "
    "scaled_dot_product_attention keeps scores in fp32",
    "--fp32-allreduce": "gradients of 16-bit weights are summed over micro-batches and replicas in fp32",
    "--accumulate-allreduce-grads-in-fp32": "gradients of 16-bit weights are summed in fp32",
    "--use-cpu-initialization": "initial values come from a counter, the same on every device and in every layout",
    "--use-flash-attn": _SDPA,
    "--use-flash-attn-v2": _SDPA,
    "--exit-signal-handler": "SIGTERM and Ctrl-C save a checkpoint and leave with code 75",
    "--log-throughput": "every progress line shows tokens/s and FLOP/s",
    "--override-lr-scheduler": "the learning rate follows the step and the flags given now",
    "--override-opt-param-scheduler": "the learning rate follows the step and the flags given now",
    "--override-opt_param-scheduler": "the learning rate follows the step and the flags given now",
    "--calculate-per-token-loss": "the loss is the mean over all tokens of a step that count",
    "--check-for-nan-in-loss-and-grad": "a loss or norm that is not finite ends the run; see --stability-guard",
    "--check-for-spiky-loss": "a loss far above those before it is told in the log; see --stability-guard",
    "--check-for-large-grads": "a gradient norm far above those before it is told in the log; see --stability-guard",
    "--no-create-attention-mask-in-dataloader": "masks are made where attention needs them, never by those who read",
    "--auto-detect-ckpt-format": "--load knows the formats apart",
    "--ckpt-fully-parallel-save": "every rank writes a part of a checkpoint",
    "--ckpt-fully-parallel-load": "every rank reads the parts that it needs",
    "--disable-bias-linear": "linear layers have biases only with --hidden-bias",
}
"""Flag without a value -> why what it asks for always holds."""

_REALM = "REALM and ICT are not part of this project"
_AUTORESUME = "NVIDIA's internal scheduler; a SIGTERM saves and leaves with code 75, --resume goes on"
_SOFTMAX = "scaled_dot_product_attention has no separate mask and softmax; leave it out"

CPM_REFUSED = {
    "--num-unique-layers": "layers do not share weights; leave it out",
    "--param-sharing-style": "layers do not share weights; leave it out",
    "--onnx-safe": "there is no ONNX export; leave it out",
    "--bias-gelu-fusion": "no kernel is written by hand for it: --compile joins the bias and GELU; leave it out",
    "--bias-dropout-fusion": "no kernel is written by hand for it: the bias comes with the product; leave it out",
    "--use-checkpoint-lr-scheduler": "the learning rate follows the step and the flags; repeat the first flags",
    "--no-save-rng": "random states take a few kilobytes and are always saved; --no-load-rng leaves them out",
    "--fp16-lm-cross-entropy": "the loss is always computed in fp32, for its sum would overflow; leave it out",
    "--lazy-mpu-init": "process groups are made at the start; leave it out",
    "--mmap-warmup": "files are mapped and read when needed; `cat FILE.bin > /dev/null` before the start warms them",
    "--adlr-autoresume": _AUTORESUME,
    "--adlr-autoresume-interval": _AUTORESUME,
    "--ict-head-size": _REALM,
    "--ict-load": _REALM,
    "--bert-load": _REALM,
    "--titles-data-path": _REALM,
    "--query-in-block-prob": _REALM,
    "--use-one-sent-docs": _REALM,
    "--report-topk-accuracies": _REALM,
    "--faiss-use-gpu": _REALM,
    "--block-data-path": _REALM,
    "--indexer-batch-size": _REALM,
    "--indexer-log-interval": _REALM,
    "--synchronize-each-layer": "nothing waits for the device between layers; leave it out",
    "--profile-backward": "use --profile, or --pipeline-trace",
    "--deepscale": "the old name of DeepSpeed; leave it out",
    "--deepscale_config": "the old name of --deepspeed_config; use that",
    "--deepspeed_mpi": "ranks that mpirun, mpiexec or srun starts are known by its variables; leave it out",
}

MEGATRON_REFUSED = {
    "--lr-warmup-iters": "warm-up is a fraction: use --warmup ITERS / LR_DECAY_ITERS",
    "--lr-warmup-samples": "warm-up is a fraction of the steps: use --warmup",
    "--lr-warmup-tokens": "warm-up is a fraction of the steps: use --warmup",
    "--lr-decay-samples": "steps are counted: use --lr-decay-iters",
    "--lr-decay-tokens": "steps are counted: use --lr-decay-iters, TOKENS / tokens of a step",
    "--train-samples": "steps are counted: use --train-iters",
    "--train-tokens": "steps are counted: use --train-iters, TOKENS / tokens of a step",
    "--lr-wsd-decay-iters": "use --wsd-decay-fraction ITERS / LR_DECAY_ITERS",
    "--lr-wsd-decay-style": "the WSD decay has one form; leave it out",
    "--initial-loss-scale": "use --initial-scale-power, its logarithm to base 2",
    "--min-loss-scale": "use --min-scale",
    "--use-checkpoint-args": "give the flags of the first run; a checkpoint of other sizes is refused",
    "--use-checkpoint-opt-param-scheduler": "the learning rate follows the step and the flags given now",
    "--use-checkpoint-opt_param-scheduler": "the learning rate follows the step and the flags given now",
    "--recompute-method": "inputs are kept every --checkpoint-num-layers layers, Megatron's uniform; leave it out",
    "--distributed-timeout-minutes": "use --step-timeout, in seconds",
    "--optimizer-cpu-offload": "use --offload-optimizer",
    "--grad-reduce-in-bf16": "gradients of 16-bit weights are summed in fp32; leave it out",
    "--enable-zbh1-pipeline": "use --pipeline-schedule zb-h1",
    "--decoder-first-pipeline-num-layers": "use --partition-method",
    "--decoder-last-pipeline-num-layers": "use --partition-method",
    "--group-query-attention": "there are as many key heads as query heads; leave it out",
    "--rotary-interleaved": "rotary positions turn halves against each other, as in Hugging Face's files; leave it out",
    "--use-rope-scaling": "use --rotary-scaling llama3",
    "--rotary-seq-len-interpolation-factor": "use --rotary-scaling linear and --rotary-scaling-factor",
    "--swiglu": "use --activation gated-silu, and --ff-hidden-size for its size",
    "--attention-backend": f"{_SDPA}; leave it out",
    "--use-flash-attn-v1": f"{_SDPA}; leave it out",
    "--use-flash-attn-triton": f"{_SDPA}; leave it out",
    "--transformer-impl": "there is one implementation; leave it out",
    "--use-mcore-models": "there is one implementation; leave it out",
    "--no-masked-softmax-fusion": _SOFTMAX,
    "--no-async-tensor-model-parallel-allreduce": "the bits are the same beside the weight's gradient; leave it out",
    "--profile-step-start": "use --profile FIRST-LAST, steps counted from 1",
    "--profile-step-end": "use --profile FIRST-LAST, steps counted from 1",
    "--profile-ranks": "--profile writes a trace of every rank; leave it out",
    "--use-pytorch-profiler": "--profile uses torch's profiler anyway; leave it out",
    "--log-params-norm": "progress lines show the gradient norm; leave it out",
    "--skip-train": "use --eval-only with --load, or --train-iters 0",
    "--exit-on-missing-checkpoint": "a missing checkpoint ends the run with code 3; see --load-if-exists",
    "--fp8-format": "use --bf16",
    "--fp8-hybrid": "use --bf16",
    "--no-query-key-layer-scaling": "scores are never scaled by layer; leave it out",
    "--no-pipeline-parallel": "use --pipe-parallel-size 0 or 1",
    "--no-position-embedding": "use --position-embedding-type rope, alibi or none",
    "--log-optimizer-states-to-tensorboard": "use --log-layer-norms, or --debug-dump",
    "--tensorboard-queue-size": "events are written as they come; leave it out",
    "--cpu-offloading-num-layers": "use --checkpoint-in-cpu with --checkpoint-activations",
    "--universal-checkpoint": "checkpoints load in every layout; leave it out",
    "--compression-training": "there is no compression; leave it out",
    "--cross-entropy-loss-fusion": "the loss is one function anyway; leave it out, or see --loss-chunk-tokens",
    "--mock-data": "use --data-path; `bash run_gpt2.sh` makes sample data",
    "--recompute-modules": "use --recompute-granularity selective, which is attention alone, or full; leave it out",
    "--no-check-for-nan-in-loss-and-grad": "loss and gradient norm are always looked at; see --stability-guard skip",
    "--iterations-to-skip": "--stability-guard rollback leaves the data of bad steps out; leave it out",
    "--skip-train-iteration-range": "--stability-guard rollback leaves the data of bad steps out; leave it out",
    "--decrease-batch-size-if-needed": "the samples of a step never change by themselves; use --gas",
    "--train-sync-interval": "how far the host runs ahead of the device is not set; leave it out",
    "--empty-unused-memory-level": "torch keeps what it has allocated; leave it out",
    "--deterministic-mode": "use --deterministic",
    "--check-weight-hash-across-dp-replicas-interval": "use --drift-interval",
    "--kill-switch-path": "send SIGTERM, which saves and leaves with code 75, or use --exit-interval",
    "--inference": "use --eval-only, or tools/generate.py",
    "--activation-func-clamp-value": "activations are not clamped; leave it out",
    "--rope-type": "use --rotary-scaling",
    "--cross-entropy-fusion-impl": "the loss is one function anyway; leave it out, or see --loss-chunk-tokens",
    "--use-legacy-models": "there is one implementation; leave it out",
    "--data-parallel-random-init": "replicas start with the same weights; leave it out",
    "--lr-warmup-init": "the warm-up starts at 0; leave it out",
    "--lr-wsd-decay-samples": "steps are counted: use --wsd-decay-fraction",
    "--no-mmap-bin-files": "use --data-impl pread",
    "--sft": "a file of conversations with masked prompts cannot be read; --finetune trains on every token of a text",
    "--fim-data": "--fim-rate does it alone; leave it out",
    "--allow-ambiguous-pad-tokens": "padding is known by its place, not by a token; leave it out",
    "--full-validation": "use --eval-iters, as many as the validation split has",
    "--multiple-validation-sets": "give them in turn to --eval-only --test-data-path",
    "--log-num-zeros-in-grad": "progress lines show the gradient norm; use --log-layer-norms, or --debug-dump",
    "--log-progress": "metrics.jsonl counts tokens and FLOPs of every step told; leave it out",
    "--log-energy": "energy is not measured; leave it out",
    "--logging-level": "use --verbose-deepspeed for DeepSpeed's lines, or leave it out",
    "--tensorboard-log-interval": "use --log-interval",
    "--config-logger-dir": "config.json in the run folder has every value; leave it out",
    "--save-retain-interval": "use --keep-last with --keep-every",
    "--ckpt-step": "give --load the folder of that checkpoint: RUN/checkpoints/step-00000020",
    "--pretrained-checkpoint": "use --load with --finetune",
    "--load-main-params-from-ckpt": "fp32 masters are part of the optimizer's state, which --load reads; leave it out",
    "--no-initialization": "a checkpoint is read over the initial weights; leave it out",
    "--use-mp-args-from-checkpoint-args": "give the layout; a checkpoint loads in every layout",
    "--use-tp-pp-dp-mapping": "the tensor axis runs fastest, then data, then pipe; leave it out",
    "--distributed-timeout-seconds-after-init": "use --step-timeout",
    "--disable-bf16-reduced-precision-matmul": "products of bf16 are as torch has them; leave it out",
}

REFUSED = {**CPM_REFUSED, **MEGATRON_REFUSED, **BY_REASON}
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
