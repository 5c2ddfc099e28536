"""Data loader of ``initialize(training_data=...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tds.deepspeed.api import RepeatingLoader


class TrainingLoader(RepeatingLoader):
    """DeepSpeed's ``RepeatingLoader`` with the attributes of the wrapped loader that curriculum learning needs."""

    loader: Any

    @property
    def data_sampler(self) -> Any:
        """The sampler of the wrapped loader."""
        return self.loader.data_sampler

    @property
    def post_process_func(self) -> Callable[[Any, Any], Any] | None:
        """Function that the loader applies to each micro-batch and the state of the sampler."""
        return self.loader.post_process_func

    @post_process_func.setter
    def post_process_func(self, function: Callable[[Any, Any], Any] | None) -> None:
        self.loader.post_process_func = function


def training_loader(data: Any, grid: Any, make_loader: Callable[..., Any], *, has_curriculum: bool) -> TrainingLoader:
    """Create an endless loader over this replica's shard of ``data``.

    Args:
        make_loader: DeepSpeed's function that constructs a loader from the data and a sampler.
        has_curriculum: the JSON enables DeepSpeed's curriculum sampler.

    Raises:
        NotImplementedError: DeepSpeed's curriculum sampler is used with several stages.
    """
    if has_curriculum and grid.pipe_parallel_size > 1:
        raise NotImplementedError(
            '"data_efficiency.data_sampling.curriculum_learning" needs one stage, got '
            f"{grid.pipe_parallel_size} stages: DeepSpeed's curriculum sampler draws samples on rank 0 and sends them "
            "only "
            "to rank 0's data-parallel group, which does not contain the last stage. Pass an iterator to train_batch, "
            "and "
            "truncate sequences to the length of DeepSpeed's CurriculumScheduler in the batch function (set_batch_fn). "
            "Shapes may change from call to call."
        )
    sampler: Any = torch.utils.data.distributed.DistributedSampler(
        data,
        num_replicas=grid.data_parallel_size,
        rank=grid.get_data_parallel_rank(),
        shuffle=False,
    )
    return TrainingLoader(make_loader(data, data_sampler=sampler))
