"""Checks and settings of DeepSpeed's JSON and module before the pipeline engine is built."""

from __future__ import annotations

from typing import Any

from tds.deepspeed.api import checkpointing, layer_specs, select_recomputed_layers
from tds.deepspeed.module import PipelineModule
from tds.deepspeed.optimizers import gradient_source_for
from tds.deepspeed.recompute import is_deepspeed_reentrant
from tds.deepspeed.shared_layers import shared_layer_indices
from tds.engine.pipeline_json import remove_unsupported_sections
from tds.gradients import GradientSource
from tds.log import log_rank_0


def check_supported(engine: Any) -> None:
    """Raise for features of DeepSpeed that this engine does not support."""
    if not isinstance(engine.module, PipelineModule) and shared_layer_indices(layer_specs(engine.module)):
        raise TypeError(
            f"layers that share modules need tds.PipelineModule, got {type(engine.module).__module__}."
            f"{type(engine.module).__name__}, which does not build the shared modules"
        )
    if engine.has_moe_layers:
        raise NotImplementedError("the pipeline engine of tds does not support DeepSpeed's MoE layers. Use DeepSpeed's")
    remove_unsupported_sections(engine.user_config)
    if engine.torch_autocast_enabled():
        raise NotImplementedError(
            'the pipeline engine of tds does not support "torch_autocast". Use "bf16" or "fp16", or '
            "torch.autocast inside your layers"
        )
    if engine.zero_optimization_stage() >= 2:
        raise ValueError(
            f"zero_optimization.stage={engine.zero_optimization_stage()} is not supported: ZeRO stages 2 and 3 shard "
            "gradients to which later micro-batches of a pipeline still add. Use 0 or 1"
        )


def log_unused_settings(engine: Any) -> None:
    """Log on rank 0 the keys of the JSON that have an effect only in DeepSpeed's engine."""
    config = engine.user_config
    unused: list[str] = [key for key in ("prescale_gradients", "gradient_predivide_factor") if key in config]
    unused += [key for key in ("pipe_partitioned", "grad_partitioned") if key in config.get("pipeline", {})]
    if unused and engine.global_rank == 0:
        listed = ", ".join(f'"{key}"' for key in unused)
        log_rank_0(
            f"{listed} in the JSON: no effect in tds, which divides gradients once, after their all-reduce, and "
            "declares per tensor of a boundary whether it is sharded over the tensor group. Remove the keys"
        )
    if "overlap_forward_backward" in config.get("pipeline", {}) and engine.global_rank == 0:
        log_rank_0(
            '"pipeline": {"overlap_forward_backward": ...} in the JSON has no effect: each stage runs one forward or '
            "backward at a time. Remove the key; losses and gradients stay the same"
        )
    if engine.is_flops_profiler_enabled and engine.global_rank == 0:
        log_rank_0(
            '"flops_profiler" in the JSON has no effect in tds. Use "pipeline": {"trace": "a folder"}, or run '
            "deepspeed.profiling.flops_profiler.get_model_profile on a layer"
        )


def configure_recompute(engine: Any) -> None:
    """Apply the JSON's recompute settings. A user's checkpoint function is kept, because it may restore more state."""
    section, module = engine.pipeline_section, engine.module
    if section.get("use_reentrant") is False and is_deepspeed_reentrant(module.activation_checkpoint_func):
        module.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint
    if section.get("activation_checkpoint_interval", 0) > 0:
        module.activation_checkpoint_interval = section["activation_checkpoint_interval"]
    if module.activation_checkpoint_interval > 0:
        select_recomputed_layers(module)


def make_gradient_source(engine: Any) -> GradientSource | None:
    """Create the optimizer's gradient source; None for an engine that only evaluates."""
    if engine.optimizer is None:
        return None
    return gradient_source_for(engine.optimizer, engine.zero_optimization_stage())
