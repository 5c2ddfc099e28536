"""What eval_batch returns, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tds.deepspeed.api import checkpointing
from tds.deepspeed.module import forwards_uncounted
from tds.device import random_numbers_kept
from tds.engine import step_report
from tds.engine.engine_parts import EngineParts
from tds.engine.stage_call import Call
from tds.loss import LossMeter
from tds.loss_reduction import LossReduction, all_reduce_loss
from tds.p2p.collective_scope import collective_scope

# What eval_batch returns, and what it must leave alone.


@contextmanager
def preserve_training_state(module: Any, device: torch.device) -> Iterator[None]:
    """Put random numbers and the module's counts of forwards (which seed layers) back as they were."""
    tracker = checkpointing.get_cuda_rng_tracker()
    states = tracker.get_states()
    try:
        with random_numbers_kept(device), forwards_uncounted(module):
            yield
    finally:
        tracker.set_states(states)
        checkpointing.reset()


def check_arguments(reduce_output: str | None, num_micro_batches: int) -> None:
    """Raise for what ``eval_batch`` cannot do, before it runs.

    Raises:
        NotImplementedError: an unknown ``reduce_output``.
        ValueError: no micro-batches.
    """
    if reduce_output is not None and str(reduce_output).lower() != "avg":
        raise NotImplementedError(f'reduce_output must be "avg" or None, got {reduce_output!r}')
    if isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be a whole number of 1 or more, got {num_micro_batches!r}")


def evaluation_result(
    engine: EngineParts, call: Call, compute_loss: bool, reduce_output: str | None, bcast_loss: bool
) -> Any:
    """Return the loss or the outputs as ``eval_batch`` promises. Collective."""
    check_arguments(reduce_output, len(call.outputs) or 1)
    is_last = engine.is_last_stage()
    if not compute_loss:
        if not is_last or reduce_output is None:
            return call.outputs if is_last else None
        return mean_output(call.outputs, engine.grid)
    engine.means = means = agree(engine, call.meter).means()
    step_report.write_evaluation(engine, means)
    if reduce_output is None:
        return call.outputs if is_last else None
    if not (bcast_loss or is_last):
        return None
    return means.loss if len(means.own) == 1 else means.own


def mean_output(outputs: Sequence[Any], grid: Any) -> Any:
    """Return the mean of the model's outputs over micro-batches and replicas, tensor by tensor. Collective.

    Raises:
        TypeError: something else than tensors, and tuples, lists and dicts of them.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: mean_output([output[key] for output in outputs], grid) for key in first}
    if isinstance(first, (tuple, list)):
        return [mean_output(parts, grid) for parts in zip(*outputs, strict=True)]
    if not isinstance(first, torch.Tensor):
        raise TypeError(
            f'reduce_output="avg" takes the mean of tensors, got an output of {type(first).__name__}. '
            "Pass reduce_output=None to have the outputs as they are."
        )
    mean = sum(outputs) / len(outputs)
    if grid.data_parallel_size > 1:
        dist.all_reduce(mean, group=grid.get_data_parallel_group())
        mean = mean / grid.data_parallel_size
    return mean


def agree(engine: EngineParts, meter: LossMeter) -> LossReduction:
    """Return what the losses of all replicas came to, the same on every rank. Collective."""
    grid = engine.grid
    with collective_scope(engine.stage_id, "agreeing on the loss"):
        return all_reduce_loss(
            meter if engine.is_last_stage() else None,
            torch.device(engine.device),
            data_group=grid.get_data_parallel_group(),
            data_size=grid.data_parallel_size,
            pipe_group=grid.get_pipe_parallel_group(),
            pipe_size=grid.pipe_parallel_size,
            last_rank=grid.stage_to_global(engine.loss_stage),
        )
