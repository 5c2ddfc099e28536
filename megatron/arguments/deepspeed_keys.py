"""What each key of DeepSpeed's JSON does here: the kind of its value, where it acts, or why it is refused."""

from __future__ import annotations

from dataclasses import dataclass

from tds.schedule.simulate import SCHEDULES


@dataclass(frozen=True)
class Key:
    """Kind of the value, the field of our configuration that carries it ("" for none), and where it acts."""

    kind: str
    field: str = ""
    about: str = ""
    choices: tuple[str, ...] = ()


POSITIVE = "a positive integer"
INTEGER = "an integer of at least 0"
NUMBER = "a number of at least 0"
BOOLEAN = "true or false"
TEXT = "a text"
OBJECT = "an object {...}"
TEXT_OR_NULL = "a text or null"
TEXTS = "a list of texts"
DEPTH = "an integer of at least -1"
BETAS = "two numbers"
FALSE = "false: nothing waits for the device between layers, and wall_clock_breakdown has the times"
NULL = "null: the buffer has room for the layers of a stage and the micro-batches in flight"

VALUES = {
    "train_batch_size": Key(POSITIVE, "requested_global_batch_size"),
    "train_micro_batch_size_per_gpu": Key(POSITIVE, "batch_size"),
    "gradient_accumulation_steps": Key(POSITIVE, "gas"),
    "gradient_clipping": Key(NUMBER, "clip_grad"),
}
"""Top-level keys that set a field of ours."""

FP16 = {
    "enabled": Key(BOOLEAN),
    "loss_scale": Key(NUMBER, "loss_scale"),
    "initial_scale_power": Key(INTEGER, "initial_scale_power"),
    "loss_scale_window": Key(POSITIVE, "loss_scale_window"),
    "hysteresis": Key(POSITIVE, "hysteresis"),
    "min_loss_scale": Key(NUMBER, "min_scale"),
}
BF16 = {"enabled": Key(BOOLEAN)}
ZERO = {"stage": Key(INTEGER, "zero_stage"), "offload_optimizer": Key(OBJECT), "offload_param": Key(OBJECT)}
OFFLOAD = {
    "device": Key(TEXT, choices=("cpu", "none")),
    "pin_memory": Key(BOOLEAN),
}
OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
"""Sections of "zero_optimization" -> the fields of ours that their devices set."""
ACTIVATIONS = {
    "partition_activations": Key(BOOLEAN, "partition_activations"),
    "cpu_checkpointing": Key(BOOLEAN, "checkpoint_in_cpu"),
    "contiguous_memory_optimization": Key(BOOLEAN, "contiguous_checkpointing"),
    "number_checkpoints": Key(NULL),
    "synchronize_checkpoint_boundary": Key(FALSE),
    "profile": Key(FALSE),
}
OPTIMIZER = {"type": Key(TEXT), "params": Key(OBJECT)}
OPTIMIZER_TYPES = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
OPTIMIZER_PARAMS = {
    "lr": Key(NUMBER, "lr"),
    "weight_decay": Key(NUMBER, "weight_decay"),
    "eps": Key(NUMBER, "adam_eps"),
    "betas": Key(BETAS),
}

PIPELINE = {
    "schedule": Key(TEXT, "pipeline_schedule", choices=SCHEDULES),
    "chunks": Key(POSITIVE, "pipeline_chunks"),
    "trace": Key(TEXT, "pipeline_trace"),
    "timeout_s": Key(POSITIVE, "step_timeout"),
    "check_data": Key(BOOLEAN, "check_data_agreement"),
    "overlap_reduction": Key(BOOLEAN, "overlap_grad_reduce"),
}
"""Keys of "pipeline" that set a field of ours where there is a pipeline."""
ON_BY_DEFAULT = ("overlap_reduction",)
"""Those of which nothing need be said where they are true, and not where they are false."""

SECTIONS = {
    "fp16": FP16, "bf16": BF16, "zero_optimization": ZERO, "optimizer": OPTIMIZER,
    "activation_checkpointing": ACTIVATIONS,
}  # fmt: skip
"""Objects that are read here and not handed to DeepSpeed, which is told of ZeRO 0: the others are ours."""

PASSED = {
    "steps_per_print": Key(POSITIVE, about='steps between DeepSpeed\'s own lines; "auto": --log-interval'),
    "wall_clock_breakdown": Key(
        BOOLEAN, about="times of forward, backward, reduction and step; without a pipeline with --verbose-deepspeed"
    ),
    "memory_breakdown": Key(BOOLEAN, about="DeepSpeed's memory lines, seen with --verbose-deepspeed"),
    "dump_state": Key(BOOLEAN, about="DeepSpeed prints its configuration, seen with --verbose-deepspeed"),
    "disable_python_gc": Key(BOOLEAN, about="DeepSpeed turns Python's garbage collection off"),
    "log_level": Key(TEXT, about="level of DeepSpeed's log, seen with --verbose-deepspeed"),
    "zero_allow_untested_optimizer": Key(BOOLEAN, about="lets DeepSpeed take an optimizer of ours with ZeRO"),
    "tensorboard": Key(OBJECT, about="DeepSpeed's monitor"),
    "wandb": Key(OBJECT, about="DeepSpeed's monitor"),
    "csv_monitor": Key(OBJECT, about="DeepSpeed's monitor"),
    "comet": Key(OBJECT, about="DeepSpeed's monitor"),
    "pipeline": Key(OBJECT, about="pipeline engine only (--pipe-parallel-size 2 or more)"),
    "flops_profiler": Key(OBJECT, about="DeepSpeed's profiler, without a pipeline"),
    "comms_logger": Key(OBJECT, about="DeepSpeed's record of its own communication"),
    "timers": Key(OBJECT, about="DeepSpeed's timers; throughput, for which it waits for the device, only if stated"),
}
"""Keys that are handed to DeepSpeed's engine as they are."""

NOT_READ = {
    "stages": "stages are set by --pipe-parallel-size",
    "partition": "stages are cut by --partition-method",
    "seed_layers": "initial values come from a counter, the same in every layout",
    "pipe_partitioned": "a layer says itself whether its output travels cut over the tensor ranks",
    "grad_partitioned": "a layer says itself whether its output travels cut over the tensor ranks",
}
"""Keys of DeepSpeed's "pipeline" that nothing reads here, and why; they are accepted with a note."""

_MONITOR = {"enabled": Key(BOOLEAN), "output_path": Key(TEXT), "job_name": Key(TEXT)}
INNER = {
    "optimizer.params": OPTIMIZER_PARAMS,
    "zero_optimization.offload_optimizer": OFFLOAD,
    "zero_optimization.offload_param": OFFLOAD,
    "pipeline": {
        "activation_checkpoint_interval": Key(INTEGER, about="layers between two kept inputs; 0: as the flags say"),
        "use_reentrant": Key(BOOLEAN, about="false: recompute without re-entering autograd"),
        **PIPELINE,
        "trace_steps": Key(POSITIVE, about="steps in the trace, the first ones of the run; 20 by default"),
        "p2p_max_ctas": Key(INTEGER, about="CTAs of a message on a GPU; 0: as NCCL chooses; 4 by default"),
        "stages": Key(POSITIVE),
        "partition": Key(TEXT),
        "seed_layers": Key(BOOLEAN),
        "pipe_partitioned": Key(BOOLEAN),
        "grad_partitioned": Key(BOOLEAN),
    },
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": {
        "enabled": Key(BOOLEAN),
        "group": Key(TEXT_OR_NULL),
        "team": Key(TEXT_OR_NULL),
        "project": Key(TEXT),
    },
    "comet": {
        "enabled": Key(BOOLEAN),
        "samples_log_interval": Key(POSITIVE),
        "project": Key(TEXT_OR_NULL),
        "workspace": Key(TEXT_OR_NULL),
        "api_key": Key(TEXT_OR_NULL),
        "experiment_name": Key(TEXT_OR_NULL),
        "experiment_key": Key(TEXT_OR_NULL),
        "online": Key(BOOLEAN),
        "mode": Key(TEXT, choices=("get", "create", "get_or_create")),
    },
    "flops_profiler": {
        "enabled": Key(BOOLEAN),
        "recompute_fwd_factor": Key(NUMBER),
        "profile_step": Key(POSITIVE),
        "module_depth": Key(DEPTH),
        "top_modules": Key(POSITIVE),
        "detailed": Key(BOOLEAN),
        "output_file": Key(TEXT_OR_NULL),
    },
    "comms_logger": {
        "enabled": Key(BOOLEAN),
        "verbose": Key(BOOLEAN),
        "prof_all": Key(BOOLEAN),
        "debug": Key(BOOLEAN),
        "prof_ops": Key(TEXTS),
    },
    "timers": {"throughput": Key(OBJECT)},
    "timers.throughput": {"enabled": Key(BOOLEAN), "synchronized": Key(BOOLEAN)},
}
"""Section, written with dots -> its keys; those of DeepSpeed's own configuration classes."""

_OURS = "our optimizer step does this in its own way"
_DATA = "samples come from megatron/data, not from DeepSpeed"
REFUSED = {
    "scheduler": "the learning rate is set by --lr-decay-style, --warmup and --min-lr; remove the section",
    "amp": "apex is not used; remove the section and use --fp16 or --bf16",
    "apex": "apex is not used; remove the section",
    "torch_autocast": "weights and activations have one number format; use --fp16, --bf16 or --fp32",
    "data_types": "gradients are gathered in fp32; remove the section",
    "communication_data_type": _OURS + "; remove the key",
    "seq_parallel_communication_data_type": "the tensor ranks cut sequences, by --sequence-parallel; remove the key",
    "prescale_gradients": _OURS + "; remove the key",
    "gradient_predivide_factor": _OURS + "; remove the key",
    "gradient_allreduce_op": "the loss is a mean over the global batch; remove the key",
    "managed_gradient_accumulation": "accumulation is by --gas; remove the key",
    "disable_allgather": "only DeepSpeed's own ZeRO reads it; remove the key",
    "sparse_gradients": "embedding gradients are dense; remove the key",
    "sparse_attention": "attention is dense (SDPA); remove the section",
    "zero_force_ds_cpu_optimizer": "which Adam runs on the CPU is said by --cpu-adam; remove the key",
    "dataloader_drop_last": _DATA + "; remove the key",
    "data_efficiency": _DATA + "; remove the section",
    "curriculum_learning": _DATA + "; remove the section",
    "progressive_layer_drop": "every layer takes part in every step; remove the section",
    "eigenvalue": "nothing here reads it; remove the section",
    "quantize_training": "quantised training is not supported; remove the section",
    "weight_quantization": "quantised training is not supported; remove the section",
    "compression_training": "compression is not supported; remove the section",
    "hybrid_engine": "it is for reinforcement learning; remove the section",
    "elasticity": "batch sizes are set by --batch-size and --gas; remove the section",
    "autotuning": "sizes are chosen by the user; remove the section",
    "checkpoint": "checkpoints are written by megatron/checkpoint; see --save and --save-interval",
    "load_universal_checkpoint": "checkpoints are written by megatron/checkpoint; see --load",
    "use_node_local_storage": "checkpoints are written by megatron/checkpoint; see --save",
    "datastates": "checkpoints are written by megatron/checkpoint; see --save",
    "datastates_ckpt": "checkpoints are written by megatron/checkpoint; see --save",
    "nebula": "checkpoints are written by megatron/checkpoint; see --save",
    "aio": "offload goes to the CPU alone, not to disks; remove the section",
    "compile": "use --compile, which compiles each transformer layer; remove the section",
    "tensor_parallel": "use --model-parallel-size",
    "sequence_parallel_size": "the tensor ranks cut sequences, by --sequence-parallel; remove the key",
    "expert_parallel": "there are no experts in these models; remove the section",
    "use_data_before_expert_parallelism": "there are no experts in these models; remove the key",
    "vocabulary_size": "the tokenizer says it, or --vocab-size; remove the key",
    "fp16_master_weights_and_gradients": "master weights are fp32; remove the key",
    "zero_allow_comm_data_type_fp32": "only DeepSpeed's own ZeRO reads it; remove the key",
    "legacy_fusion": "only DeepSpeed's own optimizers read it; remove the key",
}
"""Keys that DeepSpeed knows and that would have no effect here, or a wrong one."""

_OFFLOAD = "offload here takes device and pin_memory, and goes to the CPU, not to disks"
REFUSED_IN = {
    "fp16": "fp16 here takes enabled, loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale",
    "bf16": "bf16 here takes enabled only: master weights and optimizer states are fp32",
    "zero_optimization": (
        f"ZeRO here takes {', '.join(ZERO)}; sums travel in buckets of 32 MiB while backward goes on, and weights are "
        "gathered by the layer"
    ),
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "optimizer": "the optimizer section takes type and params",
    "activation_checkpointing": f"activation_checkpointing takes {', '.join(ACTIVATIONS)}",
    "optimizer.params": "the optimizer's params here are lr, betas, eps and weight_decay",
}
"""What to add to the message about an unknown key; other sections list their keys."""

KNOWN = (*VALUES, *SECTIONS, *PASSED, *REFUSED)
"""Every top-level key that is recognised; others get "did you mean"."""
