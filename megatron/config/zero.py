"""ZeRO and offload: what goes together with what, and what would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config

CUT_WEIGHTS = 3
OFFLOAD = {
    "cpu_adam": "--cpu-adam",
    "no_pin_memory": "--no-pin-memory",
}
"""Fields that say how to offload, and their flags."""


def zero_problems(config: Config) -> Iterator[str]:
    """Yield what cannot be, looking at all sections."""
    optimizer, parallel = config.optimizer, config.parallel
    stage = optimizer.zero_stage
    if stage > 1 and parallel.has_pipeline:
        yield (
            f"{_name(config)} {stage} cannot be in a pipeline, got --pipe-parallel-size "
            f"{parallel.pipe_parallel_size}: {_why_not_in_a_pipeline(stage)}. Use --zero-stage 1 with the pipeline, "
            "which cuts the fp32 masters and the optimizer's states, most of the bytes; or leave the pipeline out"
        )
    if stage > 1 and not parallel.overlap_grad_reduce:
        yield (
            f"{_name(config)} {stage} sums gradients while backward runs, so that no replica holds all of them, got "
            "--no-overlap-grad-reduce. Leave it out, or use --zero-stage 1"
        )
    if stage == CUT_WEIGHTS and getattr(parallel, "compile", False):
        yield (
            "--compile cannot take --zero-stage 3, which gathers the weights of a layer by hooks around it that a "
            "compiled layer would not run in their place. Use --zero-stage 2, or leave --compile out"
        )
    asks_for_drift = "drift_interval" in config.given and config.stability.drift_interval
    if stage == CUT_WEIGHTS and asks_for_drift and parallel.model_parallel_size == 1:
        yield (
            "--drift-interval compares the copies of a weight, of which --zero-stage 3 leaves one, cut over the "
            "replicas. Leave it out, or use --zero-stage 2"
        )
    if optimizer.offload_parameters and stage != CUT_WEIGHTS:
        yield (
            f"--offload-parameters keeps the parts of weights that --zero-stage 3 makes on the CPU, got --zero-stage "
            f"{stage}. Add --zero-stage 3, or use --offload-optimizer alone"
        )
    if optimizer.cpu_adam == "deepspeed" and optimizer.offload_optimizer:
        yield from _adam_problems(config)
    named = [flag for name, flag in OFFLOAD.items() if name in config.given]
    if "no_pin_memory" in config.given and optimizer.offload_parameters:
        named.remove(OFFLOAD["no_pin_memory"])
    if named and not optimizer.offload_optimizer:
        yield f"{', '.join(named)} acts with --offload-optimizer only. Add that flag, or leave this one out"


def _name(config: Config) -> str:
    return "--zero-stage" if "zero_stage" in config.given else "zero_optimization.stage of the JSON"


def _why_not_in_a_pipeline(stage: int) -> str:
    gathered = " and weights that are gathered again for every one of them" if stage == CUT_WEIGHTS else ""
    return (
        "a stage adds to all of its gradients until its last micro-batch is through, so cut ones would have to be "
        f"summed over the replicas for each micro-batch{gathered}: many times the traffic, to save what the pipeline "
        "has divided already"
    )


def _adam_problems(config: Config) -> Iterator[str]:
    got = config.optimizer.optimizer
    if got != "adamw":
        yield f"--cpu-adam deepspeed is an AdamW, got --optimizer {got}. Use --optimizer adamw, or --cpu-adam torch"
    if config.precision.dtype == "fp64":
        yield "--cpu-adam deepspeed updates fp32 numbers, got --fp64. Use --cpu-adam torch, or another number format"


def zero_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield what was given, cannot act, and does no harm."""
    optimizer, json = config.optimizer, config.deepspeed.get("zero_optimization", {})
    replicas = config.parallel.data_parallel_size(world_size)
    if optimizer.zero_stage and replicas == 1 and not optimizer.offload_parameters:
        yield f"ZeRO {optimizer.zero_stage} has no effect with one replica"
    if replicas == 1 and not config.parallel.overlap_grad_reduce:
        yield "--no-overlap-grad-reduce has no effect with one replica, which has no sums to make"
    for name in ("offload_optimizer", "offload_param"):
        section = json.get(name) or {}
        if "pin_memory" in section and section.get("device", "none") == "none":
            yield f"the JSON's zero_optimization.{name}.pin_memory has no effect: nothing is offloaded there"
    if optimizer.no_pin_memory and config.parallel.device == "cpu":
        yield "--no-pin-memory has no effect on a CPU, which copies nothing to a device"
