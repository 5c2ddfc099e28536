"""The data sets of a run and the iterators of this rank over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron import device
from megatron.config import Config
from megatron.data import ReplicaBatches, SampleOrder
from megatron.data.collate import Samples
from megatron.data.ordered import as_ordered
from megatron.errors import DataError
from megatron.training.data_agreement import KINDS, Told, disagreement
from megatron.training.timed_batches import TimedBatches, UploadedBatches
from megatron.training.world import World

DatasetsProvider = Callable[[list[int]], tuple[Any, Any, Any]]


@dataclass
class RunData:
    """The three data sets on a rank that reads, none elsewhere; the rest is known on all ranks.

    Args:
        order: which corpus each sample of the training comes from, where the data set says so.
        corpora: kind -> name and weight of each corpus, where there are several.
        has_training: whether the run has training data; one that takes no step needs none.
    """

    datasets: dict[str, Samples]
    fingerprint: str | None
    order: SampleOrder | None = None
    corpora: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    has_training: bool = True

    def batches(
        self, kind: str, config: Config, world: World, samples_consumed: int = 0, corpus: str | None = None
    ) -> TimedBatches | None:
        """Return this replica's micro-batches from ``samples_consumed`` on, or None on a rank that does not read.

        They are on their way to the device already, where there is one beside the CPU.

        Args:
            corpus: read this one's own samples alone.
        """
        dataset = self.datasets.get(kind)
        if dataset is None:
            return None
        is_training = kind == "train"
        ordered = as_ordered(dataset)
        batches = ReplicaBatches(
            dataset if corpus is None or ordered is None else ordered.parts[corpus],
            micro_batch_size=config.batch.batch_size,
            num_micro_batches=config.batch.gas,
            data_rank=world.grid.data.rank,
            data_size=world.grid.data.size,
            samples_consumed=samples_consumed,
            sizes=config.batch.sizes(world.grid.data.size) if is_training else None,
            num_workers=config.data.num_workers if is_training else 0,
            prefetch_factor=config.data.prefetch_factor,
            pin_memory=device.can_pin(world.kind),
        )
        return TimedBatches(batches) if world.kind == "cpu" else UploadedBatches(batches, world.device)

    def use_order(self, order: SampleOrder) -> None:
        """Let the training go on in ``order``."""
        self.order = order
        ordered = as_ordered(self.datasets.get("train"))
        if ordered is not None:
            ordered.use_order(order)


def samples_wanted(config: Config, world: World) -> list[int]:
    """Return how many samples training, all validations and the test will read."""
    batch, replicas = config.batch, world.grid.data.size
    per_step = batch.global_batch_size(replicas)
    has_eval = batch.eval_iters > 0
    validates = has_eval and batch.eval_interval > 0 and not config.checkpoint.eval_only
    return [
        0 if config.checkpoint.eval_only else batch.sizes(replicas).consumed_after(batch.train_iters),
        batch.eval_iters * per_step if validates else 0,
        batch.eval_iters * per_step if has_eval else 0,
    ]


def open_data(provider: DatasetsProvider, config: Config, world: World) -> RunData:
    """Open the data sets on the ranks that read them. Collective.

    Raises:
        DataError: on all ranks, when any rank could not open its data, or ranks have opened different ones.
    """
    datasets: dict[str, Samples] = {}
    failure: Exception | None = None
    if world.reads_data:
        try:
            opened = dict(zip(KINDS, provider(samples_wanted(config, world)), strict=True))
            datasets = {kind: dataset for kind, dataset in opened.items() if dataset is not None}
        except DataError as error:
            failure = error
    told = world.grid.host.gather_objects(Told.of(datasets, world.reads_data, failure))
    problem = next((one.problem for one in told if one.problem), None) or disagreement(told)
    if problem:
        raise DataError(problem)
    known = next((one for one in told if one.reads), told[0])
    return RunData(datasets, known.fingerprint, known.order, known.corpora, "train" in known.prints)
