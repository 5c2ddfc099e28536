"""Refused flags of Megatron-LM and Megatron-DeepSpeed of which several have one reason, under that reason.

A reason says why there is no such flag and what to use instead. Flags with reasons of their own are in flags_table.py.
"""

from __future__ import annotations

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
        --window-size --window-attn-skip-freq --softmax-type --multi-latent-attention --q-lora-rank --kv-lora-rank
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
