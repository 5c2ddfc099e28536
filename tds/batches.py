"""Micro-batches for the first and the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class BatchSource:
    """Reads (inputs, labels) from an iterator through the user's batch function.

    A rank without an iterator still calls the function, with None, so that it can take part in a broadcast over the
    tensor group.
    """

    def __init__(self, iterator: Iterator[Any] | None, batch_fn: Callable[[Any], Any] | None, stage: int) -> None:
        self.iterator = iterator
        self.batch_fn = batch_fn
        self.stage = stage

    def next(self) -> tuple[Any, Any]:
        """Return the next (inputs, labels).

        Raises:
            RuntimeError: there is neither an iterator nor a batch function.
            TypeError: the batch is no pair.
        """
        if self.iterator is None and self.batch_fn is None:
            raise RuntimeError(
                f"stage {self.stage} needs data: pass an iterator to train_batch or eval_batch, or training_data to "
                "initialize; a rank that does not read needs a batch function (set_batch_fn)"
            )
        batch = next(self.iterator) if self.iterator is not None else None
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise TypeError(
                f"a micro-batch must be a pair (inputs, labels), got {type(batch).__name__}{size} on stage {self.stage}"
            )
        return batch[0], batch[1]


def stage_inputs(inputs: Any, device: torch.device, *, needs_grad: bool) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return copies of a micro-batch's inputs on ``device``: layers may change them in place.

    Args:
        needs_grad: let floats require a gradient, without which reentrant recompute detaches the first layers.
    """
    if isinstance(inputs, torch.Tensor):
        copy = inputs.detach().to(device, copy=True)
        return copy.requires_grad_() if needs_grad and copy.is_floating_point() else copy
    if isinstance(inputs, (tuple, list)) and all(isinstance(each, torch.Tensor) for each in inputs):
        return tuple(stage_inputs(each, device, needs_grad=needs_grad) for each in inputs)  # type: ignore[misc]
    raise TypeError(f"a stage's inputs must be a tensor or a tuple of tensors, got {type(inputs).__name__}")


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``; lists become tuples, as DeepSpeed gives them."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return tuple(to_device(each, device) for each in value)
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    return value
