"""Argument check and mean output of ``eval_batch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tds.engine.grid import PipelineGrid


def check_arguments(reduce_output: str | None, num_micro_batches: int) -> None:
    """Check the arguments of ``eval_batch`` before it runs.

    Raises:
        NotImplementedError: ``reduce_output`` is neither "avg" nor None.
        ValueError: ``num_micro_batches`` is not a positive int.
    """
    if reduce_output is not None and str(reduce_output).lower() != "avg":
        raise NotImplementedError(f'reduce_output must be "avg" or None, got {reduce_output!r}')
    if isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be a positive integer, got {num_micro_batches!r}")


def mean_output(outputs: Sequence[Any], grid: PipelineGrid) -> Any:
    """Average each output tensor over micro-batches and replicas. Collective.

    Raises:
        TypeError: an output is not a tensor, or a tuple, list or dict of tensors.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: mean_output([output[key] for output in outputs], grid) for key in first}
    if isinstance(first, (tuple, list)):
        return [mean_output(elements, grid) for elements in zip(*outputs, strict=True)]
    if not isinstance(first, torch.Tensor):
        raise TypeError(
            f'reduce_output="avg" averages tensors, got an output of type {type(first).__name__}. '
            "Pass reduce_output=None to get the outputs unreduced."
        )
    mean = sum(outputs) / len(outputs)
    if grid.data_parallel_size > 1:
        dist.all_reduce(mean, group=grid.get_data_parallel_group())
        mean = mean / grid.data_parallel_size
    return mean
