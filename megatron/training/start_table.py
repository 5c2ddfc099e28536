"""Rows of the start table."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from megatron import device
from megatron.config import CheckpointConfig, Config
from megatron.config.checkpoint import DEFAULT_NUM_CHECKPOINTS
from megatron.log import human_count
from megatron.models import registry
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import shard_of
from megatron.training import determinism, device_setup, fused_kernels, kernel_rows
from megatron.training.deepspeed_engine import reasons_for_deepspeed
from megatron.training.dry_run import plan_rows
from megatron.training.estimates import is_config_model, simulated_bubble
from megatron.training.world import World
from tds.grad_norm import is_counted_in_norm
from tds.gradients import is_reduced_by_optimizer
from tds.linear_function import percentage_of


def count_parameters(module: torch.nn.Module, world: World) -> list[int]:
    """Return the parameter count of the full model, followed by the mean count per rank of each stage. Collective.

    A tied weight counts once in the full model, and on each stage that holds it. Padding does not count.
    """
    grid = world.grid
    counts = torch.zeros(1 + grid.pipe.size, dtype=torch.float64, device=world.device)
    for parameter in module.parameters():
        size = shard_of(parameter).unpadded(parameter).numel()
        counts[1 + grid.pipe.rank] += size / grid.tensor.size
        tensor_rank, share = grid.tensor.rank, 1.0
        if is_reduced_by_optimizer(parameter):  # all ranks have the same number of experts
            tensor_rank = grid.expert_tensor.rank
            share = grid.expert.size * grid.expert_tensor.size / grid.tensor.size
        counts[0] += share * size * is_counted_in_norm(parameter, tensor_rank)
    return [round(count) for count in all_reduce(counts, grid.model).tolist()]


def bounds_of(config: Config, module: torch.nn.Module) -> Sequence[int]:
    """Return the virtual-stage bounds in pipeline layers."""
    bounds: Sequence[int] = getattr(module, "parts", [0, registry.costs_of(config).num_units])
    return bounds


def start_rows(
    config: Config,
    world: World,
    module: torch.nn.Module,
    parameter_counts: Sequence[int],
    folder: Path,
    data_rows: Iterable[tuple[str, str]],
    peak_flops: float | None,
) -> Iterator[tuple[str, str]]:
    """Yield the start-table rows."""
    bounds = bounds_of(config, module)
    yield (
        "device",
        device.name(world.device_type) + (f", {human_count(peak_flops)}FLOP/s in total" if peak_flops else ""),
    )
    yield from device_setup.device_rows(world.device_type)
    if not config.parallel.has_pipeline and (reasons := reasons_for_deepspeed(config, module)):
        yield "engine", f"DeepSpeed's, for {', '.join(reasons)}"
    yield from fused_kernels.fused_kernel_rows(config, world.device_type)
    yield from kernel_rows.fusion_rows(config, world.device_type)
    is_known_model = is_config_model(config, parameter_counts)
    yield from kernel_rows.fp8_rows(config, world.device_type, is_known_model=is_known_model)
    yield from kernel_rows.dropout_rows(config, world.device_type)
    yield from kernel_rows.loss_rows(config, world.device_type)
    yield from kernel_rows.triton_rows(config, world.device_type)
    yield from kernel_rows.attention_rows(config, world.device)
    yield from kernel_rows.document_rows(config, world.device)
    forecast = functools.partial(simulated_bubble, recomputes=config.parallel.checkpoint_activations)
    yield from plan_rows(config, world.grid.topology, bounds, config.precision.dtype or "", parameter_counts, forecast)
    yield "loss", _loss_row(module, config.model.loss_average)
    yield from determinism.determinism_rows(config, world.device_type)
    yield from data_rows
    yield "run folder", str(folder)
    if not config.checkpoint.eval_only:
        yield "checkpoints", _saves_row(config.checkpoint)


def _saves_row(flags: CheckpointConfig) -> str:
    """Return a text on when the run saves."""
    steps_text = f"every {flags.save_interval} steps" if flags.save_interval else ""
    minutes_text = f"every {flags.minutes:g} minutes" if flags.minutes else ""
    retention_text = f" (the last {DEFAULT_NUM_CHECKPOINTS} of these are retained)" if flags.is_default_interval else ""
    interval_text = " and ".join(text for text in (steps_text, minutes_text) if text)
    background_text = ", in the background" if flags.async_save else ""
    return (
        f"{interval_text + retention_text + ', ' if interval_text else ''}at the end, and when stopped{background_text}"
    )


def _loss_row(module: torch.nn.Module, average: str) -> str:
    """Return a text on how micro-batch losses are averaged.

    A model declares the averaging with the attribute ``loss_weighting``: "tokens", or "micro-batches" if the loss
    function returns means.
    """
    if average == "micro-batch":
        return "mean over micro-batches of their means over valid tokens (--loss-average micro-batch)"
    if getattr(module, "loss_weighting", None) == "tokens":
        return "mean over the valid tokens of the global batch"
    return "mean over micro-batches and replicas (for a pair (sum, count): over all counted tokens)"


def fusion_text(module: torch.nn.Module, fused: Collection[torch.Tensor]) -> str:
    """Describe the share of weights with fused gradient accumulation, and the weights without it."""
    percent, unfused = percentage_of(fused, dict(module.named_parameters()))
    others_text = f"; autograd accumulates the gradients of {unfused}" if unfused else ""
    return (
        f"--gradient-accumulation-fusion: matrix products accumulate the gradients of {percent} % of the weights on "
        f"this rank{others_text}"
    )
