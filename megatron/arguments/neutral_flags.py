"""Flags of other trainers that ask for what holds here anyway, or that only tune."""

from __future__ import annotations

from megatron.arguments.flag_row import NEUTRAL, FlagRow, rows_of

# Reason -> flags, in the order of the concerns of a run; "=" behind a flag: one value follows, "=*": several do.

GROUPS = {
    # the model
    "it says how experts are computed, not what; with --num-experts their numbers are the same": """
        --use-tutel --create-moe-param-group --expert-tensor-parallel-num-weight-shards= --moe-grouped-gemm
        --moe-token-dispatcher-type= --moe-shared-expert-overlap --use-grouped-gemm-for-shared-expert
        --moe-router-fusion --moe-router-padding-for-quantization --moe-router-padding-for-fp8
        --moe-permute-fusion --moe-enable-deepep --moe-pad-expert-input-to-capacity --moe-layer-recompute
        --moe-upcycling-granularity= --moe-use-legacy-grouped-gemm --moe-per-layer-logging
        --moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias
        --moe-flex-dispatcher-backend= --moe-flex-dispatcher-num-sms= --moe-permute-fusion-into-hybridep
        --moe-hybridep-pad-uneven-dispatch-inputs --moe-hybridep-num-sms= --moe-hybridep-num-blocks-permute=
        --moe-hybridep-num-blocks-unpermute= --moe-hybridep-num-sms-preprocessing= --moe-deepep-num-sms=
        --moe-ncclep-zero-copy --moe-pad-experts-for-cuda-graph-inference --moe-paged-stash
        --moe-paged-stash-page-size= --moe-paged-stash-buffer-size-factor-cuda=
        --moe-paged-stash-buffer-size-factor-cpu= --moe-routing-trace-path=
        --moe-routing-trace-max-training-iters= --moe-routing-trace-capture-logits
        --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
        --overlap-dispatch-backward-with-experts-wgrad
        --ep-overlap-early-attn-memory-release --delay-wgrad-compute --high-priority-a2a-comm-stream
        --save-tokens-per-expert-interval=""",
    "it acts on experts of another kind; a dense model has none, and with --num-experts it is refused": """
        --enable-expert-tensor-parallelism --mlp-type= --topk= --disable-moe-token-dropping
        --disable-moe-top2-2nd-expert-sampling --expert-interval= --num-experts-switch= --num-experts-teacher=*
        --moe-loss-coeff= --moe-expert-parallel-size= --moe-train-capacity-factor= --moe-eval-capacity-factor=
        --moe-min-capacity= --moe-shared-expert-glu-interleave-size= --moe-router-force-load-balancing
        --moe-router-force-biased= --moe-router-quantile-balancing-ema= --moe-use-upcycling --moe-extended-tp
        --moe-input-jitter-eps= --moe-enable-routing-replay --moe-apply-probs-on-input --moe-latent-size=
        --moe-dispatch-fwd-dtype= --moe-combine-bwd-dtype= --moe-mlp-glu-interleave-size=
        --moe-expert-rank-capacity-factor=""",
    "it acts with --multi-latent-attention only, which is refused": """
        --q-lora-rank= --kv-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim= --mscale=
        --mscale-all-dim= --cache-mla-latents --mla-down-proj-fusion""",
    "it acts on layers of other kinds only (Mamba, linear and sparse attention), which are refused": """
        --mamba-state-dim= --mamba-head-dim= --mamba-num-groups= --mamba-num-heads=
        --mamba-inference-conv-states-dtype= --mamba-inference-ssm-states-dtype=
        --mamba-training-ssm-states-dtype= --disable-mamba-mem-eff-path --linear-conv-kernel-dim=
        --linear-key-head-dim= --linear-value-head-dim= --linear-num-key-heads= --linear-num-value-heads=
        --dsa-indexer-n-heads= --dsa-indexer-head-dim= --dsa-indexer-topk= --dsa-indexer-topk-freq=
        --dsa-indexer-skip-topk-offset= --dsa-indexer-loss-coeff= --dsa-indexer-use-sparse-loss
        --dsa-kernel-backend= --dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon=
        --dsa-indexer-k-norm-fp32 --gdp-num-householder= --gdp-cutedsl-kernel
        --gdp-num-chunk-states-to-recompute=""",
    "it acts with --mtp-num-layers only, which is refused": """
        --mtp-loss-scaling-factor= --mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm
        --mtp-hybrid-override-pattern=""",
    "it follows from --hidden-size and --mup-base-hidden-size": "--mup-width-mult=",
    "it acts with --qk-clip only, which is refused": "--qk-clip-alpha= --qk-clip-threshold=",
    "it acts with --enable-mhc-connections only, which is refused": """
        --mhc-num-residual-streams= --mhc-sinkhorn-iterations= --mhc-init-gating-factor=
        --mhc-recompute-layer-num=""",
    "it acts with --retro-add-retriever only, which is refused": """
        --retro-project-dir= --retriever-seq-length= --retro-workdir= --retro-cyclic-train-iters=
        --retro-encoder-layers= --retro-encoder-hidden-dropout= --retro-encoder-attention-dropout=
        --retro-num-neighbors= --retro-num-retrieved-chunks= --retro-return-doc-ids""",
    "there is one implementation": "--use-mcore-models --use-legacy-models --transformer-impl= --enable-experimental",
    "scaled_dot_product_attention takes the fastest kernel that the device has": """
        --attention-backend= --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton
        --use-flash-attn-builder --flash-attention-version= --flash-decode""",
    "scaled_dot_product_attention computes scale, mask and softmax": """
        --scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --no-masked-softmax-fusion""",
    "scaled_dot_product_attention keeps scores and the softmax of 16-bit inputs in fp32": """
        --attention-softmax-in-fp32 --apply-query-key-layer-scaling --no-query-key-layer-scaling""",
    "no kernel is written by hand for it; the numbers are the same": """
        --bias-dropout-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --bias-activation-fusion
        --no-rope-fusion --fused-single-qkv-rope --fused-residual-rmsnorm
        --no-persist-layer-norm --memory-efficient-layer-norm --disable-mem-efficient-ln
        --abort-on-unmet-fused-kernel-constraints --use-te-activation-func --use-transformer-engine-op-fuser
        --use-fused-weighted-squared-relu --no-gradient-reduce-div-fusion --disable-jit-fuser --onnx-safe=
        --use-flashinfer-fused-rope --batch-invariant-mode --batch-invariant-backend= --use-kitchen-attention
        --kitchen-attention-backend=""",
    "the loss is one function anyway; see --loss-chunk-tokens": """
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl=""",
    "there are no CUDA graphs; --compile is what joins kernels here": """
        --enable-cuda-graph --external-cuda-graph --cuda-graph-impl= --cuda-graph-scope=* --cuda-graph-modules=*
        --cuda-graph-warmup-steps= --te-rng-tracker --inference-rng-tracker --optimizer-cuda-graph
        --delay-offload-until-cuda-graph --megatron-fsdp-cuda-graph-mode""",
    "it acts with --num-unique-layers only": "--param-sharing-style=",
    "masks are made where attention needs them, never by those who read": "--no-create-attention-mask-in-dataloader",
    # recompute and offload of activations
    "--partition-activations, --contigious-checkpointing and --checkpoint-in-cpu act without it": """
        --deepspeed-activation-checkpointing""",
    "inputs are kept every --checkpoint-num-layers layers; it only trades memory for time": """
        --recompute-method= --recompute-modules=* --num-microbatches-with-partial-activation-checkpoints=""",
    "nothing waits for the device between layers": "--synchronize-each-layer",
    "it only saves memory; --checkpoint-in-cpu keeps inputs of recomputed layers on the host": """
        --cpu-offloading-num-layers= --fine-grained-activation-offloading --offload-modules=*
        --min-offloaded-tensor-size= --delta-offload-bytes-across-pp-ranks= --activation-offload-fraction=
        --fine-grained-offloading-max-inflight-offloads=""",
    # steps, optimizer, learning rate
    "every run uses DeepSpeed's engine": "--deepspeed --deepscale",
    "gradients of 16-bit weights are summed over micro-batches and replicas in fp32, which is more exact": """
        --fp32-allreduce --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16""",
    "masters, their gradients and the optimizer's states are fp32, which is more exact": """
        --use-precision-aware-optimizer --use-layer-wise-distributed-optimizer""",
    "the loss is computed in fp32, which is more exact": "--fp16-lm-cross-entropy",
    "AdamW is one kernel where the device has one": "--ds_fused_adam --no-store-param-remainders",
    "with --optimizer muon products of a matrix with itself are as torch has them": "--muon-use-syrk",
    "it acts with --optimizer lion, soap and adaptive_muon only, which are refused": """
        --lion-beta1= --lion-beta2= --soap-shampoo-beta= --adaptive-muon-moment2-method=
        --adaptive-muon-beta2= --adaptive-muon-eps= --no-use-layer-wise-param-layout""",
    "--offload-optimizer moves all of the optimizer's states": """
        --optimizer-offload-fraction= --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d""",
    "memory of the host changes no number; --no-pin-memory is the switch here": """
        --no-pin-cpu-grads --no-pin-cpu-params --use-pin-memory""",
    "the learning rate follows the step and the flags given now": """
        --override-lr-scheduler --override-opt-param-scheduler --override-opt_param-scheduler""",
    "loss and gradient norm are looked at in every step; see --stability-guard": """
        --check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad --check-for-spiky-loss
        --check-for-large-grads""",
    "no step is computed twice; see --drift-interval": """
        --rerun-mode= --error-injection-type= --result-rejected-tracker-filename= --gpu-sniff-test-interval=""",
    "it acts with --perform-rl-step only, which is refused": """
        --grpo-iterations= --grpo-group-size= --grpo-prompts-per-step= --grpo-clamp-eps-lower=
        --grpo-clamp-eps-upper= --grpo-kl-beta= --grpo-entropy-term-weight=
        --grpo-filter-groups-with-same-reward --langrl-env-config= --rl-prompts-per-eval= --rl-generation-lag=
        --rl-max-inflight-requests= --rl-submission-granularity= --rl-consumption-granularity=
        --rl-durable-rollout-bank --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes= --rl-default-temperature=
        --rl-default-top-p= --rl-default-top-k= --rl-offload-optimizer-during-inference
        --rl-kv-cache-management-mode= --rl-persist-cuda-graphs --rl-partial-rollouts
        --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef=
        --rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin= --rl-sequence-packing-algo=
        --rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size=
        --rl-inference-pipeline-model-parallel-size= --rl-inference-expert-model-parallel-size=
        --rl-inference-expert-tensor-model-parallel-size= --rl-inference-model-unified-memory-level=
        --rl-offload-inference-model-weights-when-idle --rl-verify-model-weights-swap --rl-skip-bos-token
        --rl-profile --rl-profile-dir= --rl-inference-parsers=* --refit-method=""",
    "it acts with --kd only, which is refused": """
        --kd-alpha-ce= --kd-beta-ce= --kd-temp= --load-teacher= --num-layers-teacher= --hidden-size-teacher=
        --num-attention-heads-teacher=""",
    "it acts with --logits-load-dir or --logits-save-dir only, which are refused": """
        --logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k= --logits-save-dtype=
        --logits-load-decode-threads= --logits-load-prefetch-factor= --logits-load-msc-prefetch-depth=
        --logits-load-kd-loss-alpha= --logits-load-ignore-errors""",
    "the samples of a step never change by themselves": "--decrease-batch-size-if-needed",
    "initial values come from a counter, the same on every device and in every layout": """
        --use-cpu-initialization --no-initialization""",
    # ranks and messages
    "ZeRO is switched by --zero-stage; sums travel in buckets, see --reduce-bucket-size": """
        --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size=
        --zero-allgather-bucket-size= --overlap-param-gather --overlap-param-gather-with-optimizer-step
        --no-align-param-gather --align-param-gather --num-distributed-optimizer-instances= --ddp-num-buckets=
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective
        --ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-patterns-for-fp32-local-accumulation=*
        --no-align-grad-reduce --DDP-impl= --use-contiguous-buffers-in-ddp --no-contiguous-buffers-in-local-ddp""",
    "weights that --zero-stage 3 cuts are made and gathered by the layer": """
        --torch-fsdp2-no-reshard-after-forward --fsdp-double-buffer --fsdp-manual-registration
        --fsdp-db-use-persist-buf-on-alloc-fail --init-model-with-meta-device --megatron-fsdp-version=
        --megatron-fsdp-main-params-dtype= --megatron-fsdp-main-grads-dtype= --megatron-fsdp-grad-comm-dtype=
        --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
        --megatron-fsdp-use-decoupled-grad --outer-dp-sharding-strategy= --enable-full-sharding-in-hsdp
        --suggested-communication-unit-size= --create-all-gather-group""",
    "all samples are cut over the same ranks of --context-parallel-size; the numbers are the same": """
        --hierarchical-context-parallel-sizes=* --hybrid-context-parallel --max-seqlen-per-dp-cp-rank=""",
    "--ds-sequence-parallel-size is what splits sequences": "--force-ds-sequence-parallel",
    "it acts with --ds-sequence-parallel-fpdt only, which is refused": """
        --ds-sequence-parallel-fpdt-chunk-size= --ds-sequence-parallel-fpdt-offloading""",
    "stages are balanced by cost, see --partition-method; the numbers are the same": """
        --standalone-embedding-stage --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --pp-partition-method=
        --decoder-first-pipeline-num-layers= --decoder-last-pipeline-num-layers= --mtp-standalone""",
    "messages of tensor ranks run beside the products of weights' gradients anyway": """
        --tp-comm-overlap --tp-comm-overlap-cfg= --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend=
        --tp-comm-overlap-disable-qkv --tp-comm-overlap-disable-fc1 --disable-tp-comm-overlap-ag
        --disable-tp-comm-overlap-rs --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
        --disable-tp-comm-split-ag --disable-tp-comm-split-rs --no-async-tensor-model-parallel-allreduce
        --symmetric-ar-type=""",
    # --overlap-forward-backward was a flag of this project: config.json files of earlier runs contain it.
    "each stage runs one forward or backward at a time; the numbers are the same": """
        --overlap-moe-expert-parallel-comm --overlap-forward-backward""",
    "--pipeline-schedule zb-h1 puts gradients of weights off": """
        --defer-embedding-wgrad-compute --wgrad-deferral-limit=""",
    "zb-h1 makes the numbers of the other schedules": "--enable-zbh1-exact-semantics",
    "the schedule says when stages send: see --pipeline-schedule": """
        --no-overlap-p2p-communication --overlap-p2p-communication --overlap-p2p-communication-warmup-flush
        --no-scatter-gather-tensors-in-pipeline
        --use-ring-exchange-p2p --variable-seq-lengths""",
    "messages go as torch.distributed sends them": """
        --use-nccl-ub --disable-symmetric-registration --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub
        --use-sharp --sharp-enabled-group= --nccl-communicator-config-path= --high-priority-stream-groups=*
        --disable-gloo-process-groups --pipeline-model-parallel-comm-backend= --nccl-all-reduce-for-prefill""",
    "ranks are placed with the tensor axis fastest; no number depends on it": "--use-tp-pp-dp-mapping",
    "process groups are made at the start": "--lazy-mpu-init=",
    "ranks that mpirun, mpiexec or srun starts are known by its variables": "--deepspeed_mpi",
    "what is replicated over tensor ranks is the same there, see --drift-interval": "--sync-tp-duplicated-parameters",
    "it only saves memory": """
        --scattered-embeddings --memory-centric-tiled-linear --tile-factor= --split-transformers
        --no-clone-scatter-output-in-embedding""",
    # data
    "samples come in one order, which follows from the seed": """
        --dataloader-type= --repeated-dataloader --return-data-index --no-data-sharding""",
    "a sample is found by arithmetic and no index of samples is built": """
        --num-dataset-builder-threads= --mid-level-dataset-surplus=
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --per-dataset-sequences-path=""",
    "a tokenizer makes no tokens while a run reads them": "--use-gigatoken",
    "files are read when they are needed": "--mmap-warmup --enable-msc --disable-msc --aml-data-download-path=",
    "evaluations read as the training does; see --num-workers": "--valid-num-workers=",
    "padding is known by its place, not by a token": "--allow-ambiguous-pad-tokens",
    "the tokenizer's files say it": """
        --tiktoken-pattern= --tiktoken-num-special-tokens= --tiktoken-special-tokens=* --legacy-tokenizer
        --trust-remote-code --tokenizer-sentencepiece-legacy --tokenizer-hf-no-use-fast --tokenizer-metadata=
        --no-use-tokenizer-model-from-checkpoint-args --no-save-tokenizer-assets""",
    "the form of conversations is the tokenizer's chat template; see --chat-template": "--sft-tokenizer-prompt-format=",
    # checkpoints
    "sizes that nobody gives come from what --load or --resume names": "--use-checkpoint-args",
    "checkpoints have one format, which every layout loads": """
        --ckpt-format= --use-dist-ckpt --dist-ckpt-format= --auto-detect-ckpt-format --ckpt-fully-parallel-save
        --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo=
        --ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-save-process-group=
        --ckpt-fully-parallel-load-process-group= --ckpt-assume-constant-structure --ckpt-pg-tensors-cache-path=
        --ckpt-pg-tensors-cache-create --ckpt-drop-redundant-extra-state
        --no-ckpt-load-validate-sharding-integrity --dist-ckpt-optim-fully-reshardable
        --dist-ckpt-save-pre-mcore-014 --distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-workers=
        --use-persistent-ckpt-worker --async-strategy= --async-ckpt-cpu-priority= --async-ckpt-io-priority=
        --async-ckpt-use-cpu-shm --universal-checkpoint --verify-integrity""",
    "a checkpoint must hold every weight of the model": "--dist-ckpt-strictness= --no-strict-fsdp-dtensor-load",
    "checkpoints are whole and on disk; see --save-interval": """
        --non-persistent-save-interval= --non-persistent-ckpt-type= --non-persistent-global-ckpt-dir=
        --non-persistent-local-ckpt-dir= --non-persistent-local-ckpt-algo= --replication --replication-jump=
        --replication-factor=""",
    "random states take a few kilobytes and are always saved": "--no-save-rng",
    # what a run tells
    "every number of metrics.jsonl goes to TensorBoard as it comes": """
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
        --log-memory-to-tensorboard --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard
        --log-world-size-to-tensorboard --no-log-loss-scale-to-tensorboard --no-log-learnig-rate-to-tensorboard
        --log-optimizer-states-to-tensorboard --tensorboard-queue-size= --tensorboard-log-interval=
        --log-throughput --log-progress""",
    "progress lines show the loss and the gradient norm; see --log-layer-norms": """
        --log-params-norm --log-num-zeros-in-grad --log-max-attention-logit""",
    "it only measures or says more; see --log-interval, --profile and --verbose-deepspeed": """
        --log-energy --codecarbon-dir= --log-level= --log-level-replica= --logging-level= --log-path=
        --log-device-memory-used --log-memory-interval= --config-logger-dir= --dump-param-to-param-group-map=
        --otel-enabled --otel-service-name= --otel-span-groups= --run-workload-inspector-server""",
    "the JSON's wall_clock_breakdown switches times on": """
        --timing-log-level= --timing-log-option= --no-barrier-with-level-1-timing""",
    "ranks that are slow or stuck are named anyway: see docs/running.md": """
        --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port= --straggler-minmax-count=
        --flight-recorder-dump-path= --flight-recorder-trace-buffer-size= --no-flight-recorder-dump-on-timeout
        --flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec""",
    "the launcher starts ranks again: see --max-restarts of docs/launching.md": """
        --inprocess-restart --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=
        --inprocess-max-iterations= --inprocess-monitor-thread-interval= --inprocess-monitor-process-interval=
        --inprocess-progress-watchdog-interval= --inprocess-heartbeat-interval= --inprocess-soft-timeout=
        --inprocess-hard-timeout= --inprocess-heartbeat-timeout= --inprocess-barrier-timeout=
        --inprocess-completion-timeout= --inprocess-last-call-wait= --inprocess-termination-grace-time=
        --inprocess-granularity= --inprocess-active-world-size= --inprocess-empty-cuda-cache""",
    "it is for NVIDIA's internal services": """
        --enable-one-logger --no-one-logger --one-logger-project= --one-logger-run-name= --one-logger-async
        --app-tag-run-name= --app-tag-run-version= --adlr-autoresume --adlr-autoresume-interval=""",
    "SIGTERM and Ctrl-C save a checkpoint and leave with code 75": """
        --exit-signal-handler --exit-signal-handler-for-dataloader --exit-signal-handler-for-training""",
    "Python's collector and torch's memory are left as they are": """
        --manual-gc --manual-gc-interval= --no-manual-gc-eval --empty-unused-memory-level=
        --train-sync-interval=""",
    "metrics.jsonl has the memory of every stage": "--record-memory-history --memory-snapshot-path=",
    "--profile writes a trace of every rank with torch's profiler": """
        --profile-ranks=* --use-pytorch-profiler --record-shapes --nvtx-ranges --pytorch-profiler-collect-shapes
        --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra""",
    # other programs of theirs
    "it acts on FP8 only, which is refused": """
        --fp8-recipe= --fp8-margin= --fp8-interval= --no-fp8-wgrad --fp8-param --keep-fp8-transpose-cache
        --fp8-quantizer-factory= --fp8-output-proj --reuse-grad-buf-for-mxfp8-param-ag --first-last-layers-bf16
        --num-layers-at-start-in-bf16= --num-layers-at-end-in-bf16= --fp4-recipe= --fp4-quantizer-factory=
        --te-precision-config-file=""",
    "it acts in REALM, ICT and bi-encoders only, which are other programs": """
        --ict-head-size= --ict-load= --bert-load= --titles-data-path= --query-in-block-prob= --use-one-sent-docs
        --report-topk-accuracies=* --faiss-use-gpu --block-data-path= --indexer-batch-size=
        --indexer-log-interval= --biencoder-projection-dim= --biencoder-shared-query-context-model
        --evidence-data-path= --retriever-report-topk-accuracies=* --retriever-score-scaling --embedding-path=""",
    "it acts in the vision programs only": """
        --num-classes= --img-h= --img-w= --img-dim= --num-channels= --patch-dim= --classes-fraction=
        --data-per-class-fraction= --head-lr-mult= --vision-pretraining --vision-pretraining-type=
        --vision-backbone-type= --swin-backbone-type= --mask-type= --mask-factor= --iter-per-epoch=
        --dino-local-img-size= --dino-local-crops-number= --dino-head-hidden-size= --dino-bottleneck-size=
        --dino-freeze-last-layer= --dino-norm-last-layer --dino-warmup-teacher-temp= --dino-teacher-temp=
        --dino-warmup-teacher-temp-epochs=""",
    "it acts in inference only; see tools/generate.py": """
        --inference-batch-times-seqlen-threshold= --max-tokens-to-oom= --output-bert-embeddings
        --bert-embedder-type= --use-legacy-static-engine --inference-max-requests= --inference-max-seq-length=
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb=
        --inference-dynamic-batching-block-size= --inference-dynamic-batching-max-requests=
        --inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs=
        --decode-only-cuda-graphs --enable-chunked-prefill --num-speculative-tokens=
        --inference-logging-step-interval= --mlp-chunks-for-prefill= --inference-cuda-graph-scope=""",
}


def _held(flag: str, holds: str, about: str, otherwise: str, num_values: int | str = 1) -> FlagRow:
    return FlagRow(
        flag=flag, kind=NEUTRAL, about=about, num_values=num_values, holds=tuple(holds.split()), otherwise=otherwise
    )


_ROUTER = "the router computes in fp32 (fp64 in fp64); use fp32, or leave it out"
_WHOLE_MATRICES = "Muon looks at whole matrices in every layout; use duplicated, distributed, or leave it out"
_BF16_PRODUCTS = "Newton-Schulz steps run in bf16, as torch.optim.Muon's do; use medium, or leave it out"
_COEFFICIENTS = "Newton-Schulz has the coefficients of torch.optim.Muon; use simple"
_POWER = "scores are divided by the head's size where --mup-base-head-dim is given; use 1, or leave it out"
_OUTPUT = "logits are multiplied with --dim-model-base / --hidden-size; use that, or leave it out"
_FP32 = "masters and their gradients are fp32"
HELD = (
    _held("--moe-router-dtype", "fp32", "the router computes in fp32", _ROUTER),
    _held("--softmax-type", "vanilla", "it is the usual softmax", "attention has the usual softmax; use vanilla"),
    _held("--rope-type", "rope", "it is the usual rotation", "use --rotary-scaling"),
    _held(
        "--weight-decay-incr-style",
        "constant",
        "weight decay is the same in all steps",
        "weight decay is the same in all steps: use constant and --weight-decay",
    ),
    *(
        _held(flag, "fp32", _FP32, f"{_FP32}; use fp32, or leave it out")
        for flag in ("--main-grads-dtype", "--main-params-dtype")
    ),
    _held("--muon-tp-mode", "duplicated distributed", "Muon looks at whole matrices in every layout", _WHOLE_MATRICES),
    _held("--muon-fp32-matmul-prec", "medium", "Newton-Schulz steps run in bf16", _BF16_PRODUCTS),
    _held("--muon-coefficient-type", "simple", "they are those of torch.optim.Muon", _COEFFICIENTS),
    _held(
        "--muon-scalar-optimizer",
        "adam",
        "AdamW moves what is no matrix",
        "AdamW moves what is no matrix; use adam, or leave it out",
    ),
    _held("--mup-attn-scale-power", "1", "muP divides scores by the head's size", _POWER),
    _held("--mup-output-mult", "1", "muP multiplies logits with base width / width", _OUTPUT),
    _held("--error-injection-rate", "0", "no error is made on purpose", "no error is made on purpose; leave it out"),
    _held("--lr-warmup-init", "0", "the warm-up starts at 0", "the warm-up starts at 0; leave it out"),
    _held("--sample-rate", "1", "every sample is read", "every sample is read; use 1, or leave it out"),
    _held("--exit-signal", "SIGTERM", "a SIGTERM saves and leaves", "use SIGTERM or SIGUSR1, or leave it out"),
)
"""Those of which some values ask for what holds, and others would change the numbers."""

NEUTRAL_ROWS = (*rows_of(NEUTRAL, GROUPS), *HELD)
