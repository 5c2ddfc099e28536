"""Micro-batches for the first and the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.dataloader import RepeatingLoader

if TYPE_CHECKING:
    from tds.engine import PipelineEngine


class BatchSource:
    """Reads (inputs, labels) from an iterator through the user's batch function.

    A rank without an iterator still calls the function, with None, so that it can take part in a broadcast over the
    tensor group.
    """

    def __init__(self, iterator: Iterator[Any] | None, batch_fn: Callable[[Any], Any] | None, stage: int) -> None:
        self.iterator = iterator
        self.batch_fn = batch_fn
        self.stage = stage
        self._first: tuple[Any, Any] | None = None

    def read_ahead(self) -> None:
        """Read the first batch, so that an iterator at its end raises before anything is on its way."""
        self._first = self._read()

    def next(self) -> tuple[Any, Any]:
        """Return the next (inputs, labels).

        Raises:
            RuntimeError: there is neither an iterator nor a batch function.
            TypeError: the batch is no pair.
        """
        first, self._first = self._first, None
        return self._read() if first is None else first

    def _read(self) -> tuple[Any, Any]:
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


class TrainingLoader(RepeatingLoader):
    """DeepSpeed's ``RepeatingLoader``; its curriculum learning reaches the sampler and the post-processing
    of the loader within through it."""

    loader: Any

    @property
    def data_sampler(self) -> Any:
        """The sampler of the loader."""
        return self.loader.data_sampler

    @property
    def post_process_func(self) -> Callable[[Any, Any], Any] | None:
        """What the loader does to each micro-batch, given the state of the sampler."""
        return self.loader.post_process_func

    @post_process_func.setter
    def post_process_func(self, function: Callable[[Any, Any], Any] | None) -> None:
        self.loader.post_process_func = function


def training_loader(engine: PipelineEngine) -> TrainingLoader:
    """Return a loader over ``training_data`` that gives each replica its part and starts anew at the end.

    Raises:
        NotImplementedError: DeepSpeed's curriculum sampler on several stages.
    """
    if engine.curriculum_learning_enabled() and engine.num_stages > 1:
        raise NotImplementedError(
            "DeepSpeed's curriculum sampler draws on rank 0 for ranks of its own data-parallel group, so it cannot "
            f'feed the last of {engine.num_stages} stages: "data_efficiency.data_sampling.curriculum_learning" needs '
            "one stage. Pass an iterator to train_batch, and cut sequences to the length of DeepSpeed's "
            "CurriculumScheduler in the batch function (set_batch_fn): shapes may change from call to call."
        )
    sampler: Any = torch.utils.data.distributed.DistributedSampler(
        engine.training_data,
        num_replicas=engine.grid.data_parallel_size,
        rank=engine.grid.get_data_parallel_rank(),
        shuffle=False,
    )
    return TrainingLoader(engine.deepspeed_io(engine.training_data, data_sampler=sampler))


def stage_inputs(inputs: Any, device: torch.device, *, needs_grad: bool) -> Any:
    """Return copies of a micro-batch's inputs on ``device``: layers may change them in place. A list becomes a tuple.

    Args:
        needs_grad: let floats require a gradient, without which reentrant recompute detaches the first layers.

    Raises:
        TypeError: something else than tensors, and tuples, lists and dicts of them.
    """
    if isinstance(inputs, torch.Tensor):
        copy = inputs.detach().to(device, copy=True)
        return copy.requires_grad_() if needs_grad and copy.is_floating_point() else copy
    if isinstance(inputs, (tuple, list)):
        return tuple(stage_inputs(each, device, needs_grad=needs_grad) for each in inputs)
    if isinstance(inputs, Mapping):
        return {key: stage_inputs(each, device, needs_grad=needs_grad) for key, each in inputs.items()}
    raise TypeError(
        f"the first stage's inputs must be tensors, or tuples, lists or dicts of them, got {type(inputs).__name__}"
    )


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``; lists become tuples, as DeepSpeed gives them."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return tuple(to_device(each, device) for each in value)
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    return value
