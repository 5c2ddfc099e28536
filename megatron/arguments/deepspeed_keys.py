"""Keys of DeepSpeed's JSON: value type, field, or reason why the key is ignored or rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.curriculum import SCHEDULE_KEYS
from tds.schedule import PLACEMENTS
from tds.schedule.simulate import SCHEDULES


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's JSON: value type, ``Config`` field that it sets ("" for none), and description.

    Args:
        is_ignored: the key is accepted without effect and listed in the start table; ``description`` is the reason.
        accepted_values: values for which the key is ignored; empty for all values.
        alternative: reason for rejecting other values, and the alternative.
        needs_deepspeed: returns True for a value that only DeepSpeed's engine implements. A run without a pipeline then
            trains on DeepSpeed's engine; with a pipeline the engine of tds passes the key to DeepSpeed.
        without_pipeline: reason why the key has no effect in a run without a pipeline.
    """

    value_type: str
    field: str = ""
    description: str = ""
    choices: tuple[str, ...] = ()
    is_ignored: bool = False
    accepted_values: tuple[object, ...] = ()
    alternative: str = ""
    needs_deepspeed: Callable[[Any], bool] | None = None
    without_pipeline: str = ""


POSITIVE = "a positive integer"
INTEGER = "an integer of at least 0"
NUMBER = "a number of at least 0"
BOOLEAN = "true or false"
TEXT = "a string"
OBJECT = "an object {...}"
TEXT_OR_NULL = "a string or null"
TEXTS = "a list of strings"
DEPTH = "an integer of at least -1"
INTEGERS = (POSITIVE, INTEGER, DEPTH)
BETAS = "two numbers"
POSITIVES = "a list of positive integers"
ANY = "anything"

FIELD_KEYS = {
    "train_batch_size": Key(POSITIVE, "requested_global_batch_size"),
    "train_micro_batch_size_per_gpu": Key(POSITIVE, "batch_size"),
    "gradient_accumulation_steps": Key(POSITIVE, "gas"),
    "gradient_clipping": Key(NUMBER, "clip_grad"),
}
"""Top-level keys that set a field of ``Config``."""

FP16 = {
    "enabled": Key(BOOLEAN),
    "loss_scale": Key(NUMBER, "loss_scale"),
    "initial_scale_power": Key(INTEGER, "initial_scale_power"),
    "loss_scale_window": Key(POSITIVE, "loss_scale_window"),
    "hysteresis": Key(POSITIVE, "hysteresis"),
    "min_loss_scale": Key(NUMBER, "min_scale"),
}


def _ignored(description: str, *keys: str, value_type: str = ANY) -> dict[str, Key]:
    return {key: Key(value_type, description=description, is_ignored=True) for key in keys}


def _ignored_if(description: str, value: object, alternative: str, *keys: str) -> dict[str, Key]:
    return {
        key: Key(ANY, description=description, is_ignored=True, accepted_values=(value,), alternative=alternative)
        for key in keys
    }


_FP32 = "main params, their gradients and optimizer states are fp32"
_BUCKETS = "gradients are reduced in contiguous buckets during the backward pass"
_LAYERWISE_GATHER = "weights are gathered layer by layer, one layer in advance"
FP16 |= _ignored("token ids are not cast", "auto_cast") | _ignored("enabled selects the format", "fp16")
FP16 |= _ignored("a window of steps without overflow refills the hysteresis", "consecutive_hysteresis") | _ignored_if(
    _FP32, False, f"{_FP32}; use false, or remove the key", "fp16_master_weights_and_grads"
)
BF16 = {
    "enabled": Key(BOOLEAN),
    **_ignored_if(_FP32, False, f"{_FP32}; use false, or remove the key", "bf16_master_weights_and_grads"),
    **_ignored_if(_FP32, False, f"{_FP32}; use false, or remove the key", "bf16_optimizer_states"),
    **_ignored("gradients are accumulated in fp32 immediately", "immediate_grad_update", "check_grad_overflow"),
}
PREFETCH = "0: no layer is prefetched; otherwise the next layer, whatever its size"
_QUANTISED = "messages have the number format of the weights; use false, or remove the key"
_SHARDED = "weights are sharded over all replicas"
_ZERO_1 = "there is one implementation of ZeRO 1"
ZERO = {
    "stage": Key(INTEGER, "zero_stage"),
    "offload_optimizer": Key(OBJECT),
    "offload_param": Key(OBJECT),
    "cpu_offload": Key(BOOLEAN, "offload_optimizer", "its old name"),
    "reduce_bucket_size": Key(NUMBER, "reduce_bucket_size", "0: by itself"),
    "allgather_bucket_size": Key(NUMBER, "allgather_bucket_size", "0: by itself"),
    "stage3_prefetch_bucket_size": Key(NUMBER, "stage3_prefetch_bucket_size", PREFETCH),
    "prefetch_bucket_size": Key(NUMBER, "stage3_prefetch_bucket_size", PREFETCH),
    "cpu_offload_params": Key(BOOLEAN, "offload_parameters", "its old name"),
    **_ignored(
        _BUCKETS, "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions",
        "round_robin_gradients", "use_multi_rank_bucket_allreduce", "grad_hooks", "ignore_unused_parameters",
        "use_all_reduce_for_fetch_params",
    ),
    **_ignored(
        _LAYERWISE_GATHER, "sub_group_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold", "stage3_allgather_sequential", "stage3_use_all_reduce_for_fetch_params",
        "module_granularity_threshold", "param_persistence_threshold",
        "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "memory_efficient_linear",
        "save_muon_momentum_buffer_in_memory", "mics_hierarchical_params_gather", "log_trace_cache_warnings",
        "zero_hpz_partition_size",
    ),
    **_ignored(
        "checkpoints contain unsharded weights, which load in any layout", "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "load_from_fp32_weights", "elastic_checkpoint",
    ),
    **_ignored("offloaded tensors are in pinned memory unless --no-pin-memory is given", "cpu_offload_use_pin_memory"),
    **_ignored_if(
        "messages are not quantized", False, _QUANTISED, "zero_quantized_weights", "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights", "zeropp_loco_param",
    ),
    **_ignored_if(_SHARDED, -1, f"{_SHARDED}; remove the key", "mics_shard_size"),
    **_ignored_if(_ZERO_1, False, f"{_ZERO_1}; remove the key", "legacy_stage1"),
}  # fmt: skip
OFFLOAD = {
    "device": Key(TEXT, choices=("cpu", "none")),
    "pin_memory": Key(BOOLEAN),
    **_ignored(
        "everything is offloaded to the CPU, without buffers on a disk", "buffer_count", "buffer_size", "pipeline",
        "pipeline_read", "pipeline_write", "fast_init", "ratio", "max_in_cpu", "nvme_path",
    ),
}  # fmt: skip
OFFLOAD_FIELDS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
"""Section of "zero_optimization" -> field that its "device" sets."""
ACTIVATIONS = {
    "partition_activations": Key(BOOLEAN, "partition_activations"),
    "cpu_checkpointing": Key(BOOLEAN, "checkpoint_in_cpu"),
    "contiguous_memory_optimization": Key(BOOLEAN, "contiguous_checkpointing"),
    **_ignored("activation buffers are sized automatically", "number_checkpoints"),
    **_ignored("layers are not synchronized; wall_clock_breakdown enables timers", "synchronize_checkpoint_boundary",
               "profile"),
}  # fmt: skip
OPTIMIZER = {"type": Key(TEXT), "params": Key(OBJECT)}
OPTIMIZER_TYPES = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd", "muon": "muon"}
_BIAS = "AdamW corrects the bias of its moments"
OPTIMIZER_PARAMS = {
    "lr": Key(NUMBER, "lr"),
    "weight_decay": Key(NUMBER, "weight_decay"),
    "eps": Key(NUMBER, "adam_eps"),
    "betas": Key(BETAS),
    "momentum": Key(NUMBER, "sgd_momentum"),
    **_ignored("the update uses a fused kernel if the device has one", "torch_adam", "fused", "foreach", "capturable"),
    **_ignored("gradients are freed after each step", "set_grad_none"),
    **_ignored("updates are not differentiated", "differentiable"),
    **_ignored_if(
        "weight decay is decoupled", True, "weight decay is decoupled (AdamW): use true", "adam_w_mode", "adamw_mode",
        "decoupled_weight_decay",
    ),
    **_ignored_if(_BIAS, True, f"{_BIAS}; use true, or remove the key", "bias_correction"),
    **_ignored_if("AMSGrad is off", False, "AMSGrad is not supported; use false", "amsgrad"),
    **_ignored_if("states are fp32", True, "use --exp-avg-dtype bf16 for moments in bf16", "fp32_optimizer_states"),
    **_ignored_if("the loss is minimized", False, "the loss is minimized: use false, or remove the key", "maximize"),
    **_ignored("both methods compute the same matrices", "ns_method"),
    **_ignored_if("there is no dampening", 0, "SGD has no dampening: use 0, or remove the key", "dampening"),
    **_ignored_if("momentum is not Nesterov's", False, "SGD has no Nesterov momentum: use false", "nesterov"),
}  # fmt: skip
UNSUPPORTED_PARAMS = {
    "adamw": ("momentum", "dampening", "nesterov", "ns_method"),
    "muon": ("dampening", "nesterov", "amsgrad", "torch_adam", "foreach", "capturable", "differentiable", "maximize"),
    "sgd": (
        "betas", "eps", "torch_adam", "adam_w_mode", "adamw_mode", "decoupled_weight_decay", "bias_correction",
        "amsgrad", "capturable", "set_grad_none", "fp32_optimizer_states", "ns_method",
    ),
}  # fmt: skip
"""Optimizer -> keys of ``OPTIMIZER_PARAMS`` that DeepSpeed does not accept for it."""


def default_params(optimizer_type: str, params: Mapping[str, object]) -> dict[str, float]:
    """Return parameter -> DeepSpeed's default for optimizer parameters missing in ``params``.

    The parameter ``torch_adam`` selects torch's AdamW, whose default weight decay is 0.01. Betas and eps are omitted,
    because DeepSpeed's defaults equal ours.

    Args:
        optimizer_type: a type that DeepSpeed accepts.

    Source: DeepSpeed, ops/adam/fused_adam.py and cpu_adam.py; torch.optim.AdamW and SGD.
    """
    if OPTIMIZER_TYPES[optimizer_type.lower()] == "muon":
        return {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95}
    if OPTIMIZER_TYPES[optimizer_type.lower()] == "sgd":
        return {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0}
    return {"lr": 1e-3, "weight_decay": 0.01 if params.get("torch_adam") is True else 0.0}


PIPELINE = {
    "schedule": Key(TEXT, "pipeline_schedule", choices=SCHEDULES),
    "chunks": Key(POSITIVE, "pipeline_chunks"),
    "placement": Key(TEXT, "pipeline_placement", choices=PLACEMENTS),
    "schedule_file": Key(TEXT, "pipeline_schedule_file"),
    "micro_batch_group_size": Key(POSITIVE, "micro_batch_group_size"),
    "trace": Key(TEXT, "pipeline_trace"),
    "timeout_s": Key(POSITIVE, "step_timeout"),
    "check_data": Key(BOOLEAN, "check_data_agreement"),
    "overlap_reduction": Key(BOOLEAN, "overlap_grad_reduce"),
}
"""Keys of "pipeline" that set a field of ``Config`` if there is a pipeline."""
ON_BY_DEFAULT = ("overlap_reduction",)
"""Keys of "pipeline" whose default is true. They are passed to the engine only if false, other keys only if set."""

CURRICULUM = {
    "enabled": Key(BOOLEAN),
    "curriculum_type": Key(TEXT, choices=("seqlen",)),
    "min_difficulty": Key(POSITIVE),
    "max_difficulty": Key(POSITIVE),
    "schedule_type": Key(TEXT, choices=tuple(SCHEDULE_KEYS)),
    "schedule_config": Key(OBJECT),
}
CURRICULUM_SCHEDULE = {
    "total_curriculum_step": Key(POSITIVE),
    "difficulty_step": Key(POSITIVE),
    "root_degree": Key(NUMBER),
    "difficulty": Key(POSITIVES),
    "max_step": Key(POSITIVES),
}

SECTIONS = {
    "fp16": FP16, "bf16": BF16, "zero_optimization": ZERO, "optimizer": OPTIMIZER,
    "activation_checkpointing": ACTIVATIONS, "curriculum_learning": CURRICULUM,
}  # fmt: skip
"""Sections that are read here and not passed to DeepSpeed, whose engine always receives ZeRO stage 0."""


def _is_true(value: Any) -> bool:
    return value is True


def _is_stated(value: Any) -> bool:
    return value is not None and value != "auto"


def _is_enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _times_throughput(section: Any) -> bool:
    """Return True if "timers" has a "throughput" section without ``"enabled": false``."""
    return isinstance(section, Mapping) and section.get("throughput", {"enabled": False}).get("enabled") is not False


_ANY_OPTIMIZER = "ZeRO accepts every optimizer of --optimizer"
PASSED_TO_ENGINE = {
    "steps_per_print": Key(
        POSITIVE,
        description='steps between DeepSpeed\'s own lines; "auto": --log-interval',
        without_pipeline="DeepSpeed's lines appear with --verbose-deepspeed only",
    ),
    "wall_clock_breakdown": Key(
        BOOLEAN,
        description="times of forward, backward, reduction and step; without a pipeline with --verbose-deepspeed",
        needs_deepspeed=_is_true,
    ),
    "memory_breakdown": Key(
        BOOLEAN, description="DeepSpeed's memory lines, shown with --verbose-deepspeed", needs_deepspeed=_is_true
    ),
    "dump_state": Key(
        BOOLEAN,
        description="DeepSpeed prints its configuration, shown with --verbose-deepspeed",
        needs_deepspeed=_is_true,
    ),
    "disable_python_gc": Key(
        BOOLEAN, description="DeepSpeed disables Python's garbage collection", needs_deepspeed=_is_true
    ),
    "log_level": Key(
        TEXT, description=("level of DeepSpeed's log, shown with --verbose-deepspeed"), needs_deepspeed=_is_stated
    ),
    "zero_allow_untested_optimizer": Key(
        BOOLEAN, description="allows our optimizers with DeepSpeed's ZeRO", without_pipeline=_ANY_OPTIMIZER
    ),
    "tensorboard": Key(OBJECT, description="DeepSpeed's monitor", needs_deepspeed=_is_enabled),
    "wandb": Key(OBJECT, description="DeepSpeed's monitor", needs_deepspeed=_is_enabled),
    "csv_monitor": Key(OBJECT, description="DeepSpeed's monitor", needs_deepspeed=_is_enabled),
    "comet": Key(OBJECT, description="DeepSpeed's monitor", needs_deepspeed=_is_enabled),
    "pipeline": Key(
        OBJECT,
        description="pipeline engine only (--pipe-parallel-size 2 or more)",
        without_pipeline="there is no pipeline (--pipe-parallel-size 2 or more)",
    ),
    "flops_profiler": Key(OBJECT, description="DeepSpeed's profiler, without a pipeline", needs_deepspeed=_is_enabled),
    "comms_logger": Key(OBJECT, description="DeepSpeed's record of its own communication", needs_deepspeed=_is_enabled),
    "timers": Key(
        OBJECT,
        description="DeepSpeed's timers; the throughput timer, which synchronizes with the device, only if stated",
        needs_deepspeed=_times_throughput,
    ),
}
"""Keys that are passed unchanged to the engine: that of tds in a run with a pipeline, otherwise DeepSpeed's, which is
used only if ``needs_deepspeed`` is True for the value of a key.
"""


def engine_features(json: Mapping[str, Any]) -> list[str]:
    """List keys in ``json`` with values that only DeepSpeed's engine implements."""
    return [
        name
        for name, value in json.items()
        if (key := PASSED_TO_ENGINE.get(name)) and key.needs_deepspeed is not None and key.needs_deepspeed(value)
    ]


UNUSED_PIPELINE_KEYS = {
    "stages": "stages are set by --pipe-parallel-size",
    "partition": "layers are assigned to stages by --partition-method",
    "seed_layers": "weights are initialized from a counter-based generator, the same in every layout",
    "pipe_partitioned": "each layer determines whether its output is sent sharded over the tensor ranks",
    "grad_partitioned": "each layer determines whether its output is sent sharded over the tensor ranks",
    "overlap_forward_backward": "each stage runs one forward or backward at a time",
}
"""Keys of "pipeline" that have no effect, and the reason; they are accepted with a note."""

_MONITOR = {"enabled": Key(BOOLEAN), "output_path": Key(TEXT), "job_name": Key(TEXT)}
SUBSECTIONS = {
    "optimizer.params": OPTIMIZER_PARAMS,
    "curriculum_learning.schedule_config": CURRICULUM_SCHEDULE,
    "zero_optimization.offload_optimizer": OFFLOAD,
    "zero_optimization.offload_param": OFFLOAD,
    "pipeline": {
        "activation_checkpoint_interval": Key(
            INTEGER, description="layers between two saved inputs; 0: as the flags set it"
        ),
        "use_reentrant": Key(BOOLEAN, description="false: recompute without re-entering autograd"),
        **PIPELINE,
        "trace_steps": Key(POSITIVE, description="number of steps in the trace, from the start of the run; default 20"),
        "p2p_max_ctas": Key(INTEGER, description="CTAs per message on a GPU; 0: chosen by NCCL; default 4"),
        "backward_split": Key(
            TEXT,
            choices=("auto", "linear", "graph"),
            description=(
                "weight gradients that zb-h1 defers: those of linear layers only, or also others that the autograd "
                "graph allows"
            ),
        ),
        "stages": Key(POSITIVE),
        "partition": Key(TEXT),
        "seed_layers": Key(BOOLEAN),
        "pipe_partitioned": Key(BOOLEAN),
        "grad_partitioned": Key(BOOLEAN),
        "overlap_forward_backward": Key(BOOLEAN),
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
"""Name of a section, with dots -> its keys, as in DeepSpeed's configuration classes."""

_FP32_REDUCTION = "gradients of 16-bit weights are all-reduced in fp32"
_CHECKPOINTS = "checkpoints are written by megatron/checkpoint; see --save"
IGNORED = {
    **_ignored("it determines the order of a division only", "prescale_gradients", "gradient_predivide_factor"),
    **_ignored(_FP32_REDUCTION, "communication_data_type", "seq_parallel_communication_data_type"),
    **_ignored("the loss is a mean over the global batch", "managed_gradient_accumulation"),
    **_ignored("weights are gathered as ZeRO needs them", "disable_allgather", "zero_allow_comm_data_type_fp32"),
    **_ignored("embedding gradients are dense", "sparse_gradients"),
    **_ignored("--cpu-adam selects the implementation on the CPU", "zero_force_ds_cpu_optimizer"),
    **_ignored("every sample of a step is read", "dataloader_drop_last"),
    **_ignored("--compile compiles each transformer layer", "compile"),
    **_ignored("offload goes to the CPU, not to disks", "aio"),
    **_ignored("DeepSpeed reads no such section", "comms_config", "monitor_config"),
    **_ignored(
        _CHECKPOINTS, "checkpoint", "load_universal_checkpoint", "use_node_local_storage", "datastates",
        "datastates_ckpt", "nebula",
    ),
    **_ignored("the tokenizer or --vocab-size determines it", "vocabulary_size"),
    **_ignored("flags determine the layout of experts", "expert_parallel", "use_data_before_expert_parallelism", "moe"),
    **_ignored("there is one AdamW", "legacy_fusion"),
    **_ignored("DeepSpeed reads no such key; --seed sets the seed", "seed"),
    **_ignored_if(_FP32, False, f"{_FP32}; remove the key", "fp16_master_weights_and_grads"),
    **_ignored_if(
        "sequences are not split", 1, "use 1, and --context-parallel-size to split them", "sequence_parallel_size"
    ),
}  # fmt: skip
"""Top-level keys that are ignored."""
RENAMED = {"bfloat16": "bf16"}
"""Old name of a section -> its name."""

REJECTED = {
    "scheduler": 'supported are WarmupLR, WarmupDecayLR and WarmupCosineLR with "warmup_type": "linear"; otherwise '
    'write "auto" for all params and use --lr-decay-style, --warmup and --min-lr',
    "amp": "apex is not used; remove the section and use --fp16 or --bf16",
    "apex": "apex is not used; remove the section",
    "torch_autocast": "weights and activations have one number format; use --fp16, --bf16 or --fp32",
    "data_types": 'gradients are accumulated in fp32; use "grad_accum_dtype": "fp32", or remove the section',
    "gradient_allreduce_op": "the loss is a mean over the global batch; remove the key",
    "sparse_attention": "attention is dense (SDPA); remove the section",
    "data_efficiency": "samples are not selected by difficulty and every step runs all layers; remove the section (the "
    "sequence length can grow: --seq-length-schedule)",
    "progressive_layer_drop": "every step runs all layers; remove the section",
    "eigenvalue": "it is not used; remove the section",
    "quantize_training": "quantised training is not supported; remove the section",
    "weight_quantization": "quantised training is not supported; remove the section",
    "compression_training": "compression is not supported; remove the section",
    "hybrid_engine": "it is for reinforcement learning; remove the section",
    "elasticity": "batch sizes are set by --batch-size and --gas; remove the section",
    "autotuning": "sizes are chosen by the user; remove the section",
    "tensor_parallel": "use --model-parallel-size",
}
"""Keys of DeepSpeed that would change the results; a disabled section is accepted."""

_OFFLOAD = "supported keys are device and pin_memory; offload goes to the CPU, not to disks"
SUPPORTED_KEYS_HINTS = {
    "fp16": (
        "supported keys are enabled, loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale"
    ),
    "bf16": "the supported key is enabled; main params and optimizer states are fp32",
    "zero_optimization": (
        "supported keys are stage, offload_optimizer, offload_param, and DeepSpeed's tuning keys, which have no "
        "effect on results"
    ),
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "optimizer": "supported keys are type and params",
    "activation_checkpointing": f"supported keys are {', '.join(ACTIVATIONS)}",
    "optimizer.params": "supported keys are lr, weight_decay, betas and eps of AdamW, momentum of SGD and Muon",
}
"""Text to append to the message about an unknown key; messages about other sections list their keys."""

KNOWN = (*FIELD_KEYS, *SECTIONS, *PASSED_TO_ENGINE, *IGNORED, *REJECTED)
"""All known top-level keys. An unknown key that is similar to one of them is an error with a suggestion."""
