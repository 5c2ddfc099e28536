"""Rows of the start table."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from megatron import device
from megatron.config import CheckpointConfig, Config
from megatron.config.checkpoint import DEFAULT_KEPT
from megatron.log import human_count
from megatron.models import registry
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import shard_of
from megatron.training import determinism, device_setup, fused_kernels, kernel_rows
from megatron.training.deepspeed_engine import reasons_for_deepspeed
from megatron.training.dry_run import plan_rows
from megatron.training.estimates import simulated_bubble
from megatron.training.world import World
from tds.grad_norm import is_counted_in_norm
from tds.gradients import is_reduced_apart
from tds.linear_function import share_of


def count_parameters(module: torch.nn.Module, world: World) -> list[int]:
    """Return the number of parameters of the full model, then the mean number per rank of each stage. Collective.

    A tied weight counts once in the full model, and on each stage that holds it. Padding does not count.
    """
    grid = world.grid
    counts = torch.zeros(1 + grid.pipe.size, dtype=torch.float64, device=world.device)
    for parameter in module.parameters():
        size = shard_of(parameter).unpadded(parameter).numel()
        counts[1 + grid.pipe.rank] += size / grid.tensor.size
        copies = grid.expert.size if is_reduced_apart(parameter) else 1  # other ranks have the same number of experts
        counts[0] += copies * size * is_counted_in_norm(parameter, grid.tensor.rank)
    return [round(count) for count in all_reduce(counts, grid.model).tolist()]


def bounds_of(config: Config, module: torch.nn.Module) -> Sequence[int]:
    """Return the bounds of the pieces of ``module`` in pipeline layers."""
    bounds: Sequence[int] = getattr(module, "parts", [0, registry.costs_of(config).num_units])
    return bounds


def start_rows(
    config: Config,
    world: World,
    module: torch.nn.Module,
    counted: Sequence[int],
    folder: Path,
    data_rows: Iterable[tuple[str, str]],
    peak: float | None,
) -> Iterator[tuple[str, str]]:
    """Yield the rows of the start table."""
    bounds = bounds_of(config, module)
    yield "device", device.name(world.kind) + (f", {human_count(peak)}FLOP/s in total" if peak else "")
    yield from device_setup.device_rows(world.kind)
    if not config.parallel.has_pipeline and (reasons := reasons_for_deepspeed(config, module)):
        yield "engine", f"DeepSpeed's, for {', '.join(reasons)}"
    yield from fused_kernels.fused_kernel_rows(config, world.kind)
    yield from kernel_rows.dropout_rows(config, world.kind)
    yield from kernel_rows.attention_rows(config, world.device)
    yield from kernel_rows.document_rows(config, world.device)
    forecast = functools.partial(simulated_bubble, recomputes=config.parallel.checkpoint_activations)
    yield from plan_rows(config, world.grid.topology, bounds, config.precision.dtype or "", counted, forecast)
    yield "loss", _loss_row(module, config.model.loss_average)
    yield from determinism.determinism_rows(config, world.kind)
    yield from data_rows
    yield "run folder", str(folder)
    if not config.checkpoint.eval_only:
        yield "checkpoints", _saves_row(config.checkpoint)


def _saves_row(flags: CheckpointConfig) -> str:
    """Return text that states when the run saves."""
    steps = f"every {flags.save_interval} steps" if flags.save_interval else ""
    minutes = f"every {flags.minutes:g} minutes" if flags.minutes else ""
    retention = f" (the last {DEFAULT_KEPT} of these are retained)" if flags.is_default_interval else ""
    when = " and ".join(part for part in (steps, minutes) if part)
    background = ", in the background" if flags.async_save else ""
    return f"{when + retention + ', ' if when else ''}at the end, and when stopped{background}"


def _loss_row(module: torch.nn.Module, average: str) -> str:
    """Return text that states how the losses of micro-batches are averaged.

    A model declares its averaging with the attribute ``loss_weighting``: "tokens", or "micro-batches" if its loss
    function returns means.
    """
    if average == "micro-batch":
        return "mean over micro-batches of their means over valid tokens (--loss-average micro-batch)"
    if getattr(module, "loss_weighting", None) == "tokens":
        return "mean over the valid tokens of the global batch"
    return "mean over micro-batches and replicas (for a pair (sum, count): over all counted tokens)"


def fusion_text(module: torch.nn.Module, fused: Collection[torch.Tensor]) -> str:
    """Return text on the share of weights with fused gradient accumulation, and on the weights without it."""
    share, others = share_of(fused, dict(module.named_parameters()))
    others_text = f"; autograd accumulates those of {others}" if others else ""
    return (
        f"--gradient-accumulation-fusion: matrix products accumulate the gradients of {share} % of the weights on this "
        f"rank{others_text}"
    )
