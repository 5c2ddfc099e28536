"""What eval_batch returns, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing

from tds import train_step
from tds.stage import Call

if TYPE_CHECKING:
    from tds.engine import PipelineEngine


@contextmanager
def untouched(module: Any, device: torch.device) -> Iterator[None]:
    """Put random numbers and the module's count of forwards (which seeds layers) back as they were."""
    devices = [device] if device.type == "cuda" else []
    offset = module.micro_offset
    with torch.random.fork_rng(devices=devices):
        yield
    module.micro_offset = offset
    checkpointing.reset()


def result(engine: PipelineEngine, call: Call, compute_loss: bool, reduce_output: str | None, bcast_loss: bool) -> Any:
    """Return the loss or the outputs as ``eval_batch`` promises. Collective.

    Raises:
        NotImplementedError: an unknown ``reduce_output``.
    """
    if reduce_output not in (None, "avg"):
        raise NotImplementedError(f'reduce_output must be "avg" or None, got {reduce_output!r}')
    if compute_loss and (reduce_output is not None or bcast_loss):
        loss, _ = train_step.mean_loss(engine, call.meter)
        if reduce_output is not None:
            return loss if bcast_loss or engine.is_last_stage() else None
    if not engine.is_last_stage():
        return None
    if reduce_output is None:
        return call.outputs
    return _mean_output(engine, call.outputs)


def _mean_output(engine: PipelineEngine, outputs: list[Any]) -> Any:
    """Return the mean of the model's outputs over micro-batches and replicas."""
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        return [_mean_output(engine, list(parts)) for parts in zip(*outputs, strict=True)]
    mean = sum(outputs) / len(outputs)
    if engine.grid.data_parallel_size > 1:
        dist.all_reduce(mean, group=engine.grid.get_data_parallel_group())
        mean = mean / engine.grid.data_parallel_size
    return mean
