"""The parts of a run that a layout check in fp64 on CPUs cannot cover. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import Config
from megatron.training.proof.shrink import has_sharded_blocks


def uncovered_parts(config: Config, device_type: str, *, needs_deepspeed: bool = False) -> tuple[str, ...]:
    """Return the names of the parts of a run that the layout check does not compute.

    Args:
        device_type: the run's device.
        needs_deepspeed: True if the DeepSpeed engine trains the run.
    """
    return tuple(_parts(config, device_type, needs_deepspeed))


def _parts(config: Config, device_type: str, needs_deepspeed: bool) -> Iterator[str]:
    yield f"{config.precision.dtype or _default_dtype(config, device_type)} rounding"
    if config.precision.fp8_format and has_sharded_blocks(config):
        yield "FP8"
    if device_type != "cpu":
        yield f"{device_type} kernels (flash attention, Triton)"
        yield f"communication of {device_type} tensors"
    if config.parallel.compile:
        yield "--compile"
    if config.optimizer.offload_optimizer or config.optimizer.offload_parameters:
        yield "offload"
    if config.optimizer.bf16_states:
        yield "optimizer states in bf16"
    if config.optimizer.quantized_states:
        yield "optimizer states in 8 bits"
    if needs_deepspeed:
        yield "DeepSpeed's engine"
    is_dropping = max(config.model.attention_dropout, config.model.hidden_dropout) > 0
    if is_dropping and not config.model.layout_independent_dropout:
        yield "dropout"
    has_lengths = config.batch.seq_length_schedule or config.batch.seq_length_curriculum
    if config.batch.has_growing_batch or has_lengths:
        yield "schedules of batch size and sequence length"


def _default_dtype(config: Config, device_type: str) -> str:
    """Return a device type's usual number format."""
    return "fp32" if device_type == "cpu" and config.precision.fp8_format is None else "bf16"
