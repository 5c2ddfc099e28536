"""The data sets of a run and the iterators of this rank over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.config import Config
from megatron.data import ReplicaBatches
from megatron.errors import DataError
from megatron.mpu.groups import Group
from megatron.training.world import World

DatasetsProvider = Callable[[list[int]], tuple[Any, Any, Any]]
KINDS = ("train", "valid", "test")


@dataclass
class RunData:
    """The three data sets on a rank that reads; None for each elsewhere. ``fingerprint`` is known on all ranks."""

    datasets: dict[str, Any]
    fingerprint: str | None

    def batches(self, kind: str, config: Config, world: World, samples_consumed: int = 0) -> Iterator[Any] | None:
        """Return this replica's micro-batches from ``samples_consumed`` on, or None on a rank that does not read."""
        dataset = self.datasets.get(kind)
        if dataset is None:
            return None
        return iter(
            ReplicaBatches(
                dataset,
                micro_batch_size=config.batch.batch_size,
                num_micro_batches=config.batch.gas,
                data_rank=world.grid.data.rank,
                data_size=world.grid.data.size,
                samples_consumed=samples_consumed,
                num_workers=config.data.num_workers if kind == "train" else 0,
            )
        )


def samples_wanted(config: Config, world: World) -> list[int]:
    """Return how many samples training, all validations and the test will read."""
    batch = config.batch
    per_step = batch.global_batch_size(world.grid.data.size)
    has_eval = batch.eval_iters > 0
    validates = has_eval and batch.eval_interval > 0 and not config.checkpoint.eval_only
    return [
        0 if config.checkpoint.eval_only else batch.train_iters * per_step,
        batch.eval_iters * per_step if validates else 0,
        batch.eval_iters * per_step if has_eval else 0,
    ]


def open_data(provider: DatasetsProvider, config: Config, world: World) -> RunData:
    """Open the data sets on the ranks that read them. Collective.

    Raises:
        DataError: on all ranks, when any rank could not open its data.
    """
    datasets: dict[str, Any] = {}
    failure: Exception | None = None
    if world.reads_data:
        try:
            datasets = dict(zip(KINDS, provider(samples_wanted(config, world)), strict=True))
        except DataError as error:
            failure = error
    told = _tell_all((str(failure) if failure else None, _fingerprint(datasets)), world.grid.host)
    problems = [problem for problem, _ in told if problem]
    if problems:
        raise DataError(problems[0])
    return RunData(datasets, next((fingerprint for _, fingerprint in told if fingerprint), None))


def _fingerprint(datasets: dict[str, Any]) -> str | None:
    return getattr(datasets.get("train"), "fingerprint", None)


def _tell_all(value: Any, host: Group) -> list[Any]:
    if host.size == 1:
        return [value]
    everyone: list[Any] = [None] * host.size
    dist.all_gather_object(everyone, value, group=host.handle)
    return everyone
