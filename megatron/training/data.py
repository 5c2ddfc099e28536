"""RunData: a run's data sets, and this rank's iterators over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron import device
from megatron.config import Config
from megatron.config.batch_rampup import BatchSizes
from megatron.config.seq_length import SeqLengths
from megatron.data import DataLoader
from megatron.data.blended_dataset import SampleOrder
from megatron.data.collate import Samples
from megatron.data.sample_order import as_ordered
from megatron.errors import DataError
from megatron.training.batch_iterators import TimedBatches, UploadedBatches
from megatron.training.data_agreement import SPLITS, RankData, find_disagreement
from megatron.training.world import World

DatasetsProvider = Callable[[list[int]], tuple[Any, Any, Any]]


@dataclass
class RunData:
    """A run's data sets.

    Args:
        datasets: split -> data set on ranks that read data; empty on other ranks. Other fields are set on all ranks.
        fingerprint: training data identity, if known.
        order: order in which the training samples come from the corpora, if the data set reports it.
        corpora: split -> weights by corpus name, for splits with several corpora.
        has_training: True if the run has training data; a run without steps needs none.
        exclusion: digest of the documents that --exclude lists; None without the flag.
    """

    datasets: dict[str, Samples]
    fingerprint: str | None
    order: SampleOrder | None = None
    corpora: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    has_training: bool = True
    exclusion: str | None = None

    def batches(
        self, split: str, config: Config, world: World, samples_consumed: int = 0, corpus: str | None = None,
        length: int | None = None, steps_taken: int = 0,
    ) -> TimedBatches | None:  # fmt: skip
        """Iterate over this replica's micro-batches from ``samples_consumed`` on; None on a rank without data.

        If the device is not a CPU, the micro-batches are copied to it asynchronously.

        Args:
            split: train, valid or test.
            corpus: read only samples from this corpus.
            length: split each sample into sequences of this many tokens; None: follow --seq-length-schedule or
                --seq-length-curriculum for training, and read samples in other splits at full length.
            steps_taken: steps before ``samples_consumed``, which --seq-length-curriculum follows.
        """
        dataset = self.datasets.get(split)
        if dataset is None:
            return None
        is_training = split == "train"
        ordered, replicas = as_ordered(dataset), world.grid.data.size
        lengths = config.batch.seq_lengths if is_training else SeqLengths(config.batch.seq_length)
        if length is not None:
            lengths = SeqLengths(lengths.full, ((0, length),))
        batches = DataLoader(
            dataset if corpus is None or ordered is None else ordered.parts[corpus],
            micro_batch_size=config.batch.batch_size,
            num_micro_batches=config.batch.gas,
            data_rank=world.grid.data.rank,
            data_size=replicas,
            samples_consumed=samples_consumed,
            steps_taken=steps_taken,
            batch_sizes=config.batch.batch_sizes(replicas)
            if is_training
            else BatchSizes(config.batch.global_batch_size(replicas)),
            is_interleaved=config.data.has_megatron_order,
            lengths=lengths,
            num_workers=config.data.num_reading_processes if is_training else 0,
            prefetch_factor=config.data.prefetch_factor,
            pin_memory=device.can_pin(world.device_type),
        )
        return TimedBatches(batches) if world.device_type == "cpu" else UploadedBatches(batches, world.device)

    def use_order(self, order: SampleOrder) -> None:
        """Continue the training data in ``order``."""
        self.order = order
        ordered = as_ordered(self.datasets.get("train"))
        if ordered is not None:
            ordered.use_order(order)


def evaluated_splits(config: Config) -> dict[str, bool]:
    """Return "valid" and "test" -> True if the run evaluates the split.

    As in Megatron, a split without files or documents is not evaluated. ``--eval-only`` always needs the test split.
    """
    batch, paths, is_eval_only = config.batch, config.data.corpora, config.checkpoint.eval_only
    _, valid, test = config.data.split_shares
    has_eval = batch.eval_iters > 0
    has_test_files = paths["data_path"] is not None or paths["valid_data_path"] is None or bool(paths["test_data_path"])
    return {
        "valid": has_eval and batch.eval_interval > 0 and not is_eval_only and valid > 0,
        "test": has_eval and has_test_files and (test > 0 or is_eval_only),
    }


def num_samples_of_splits(config: Config, world: World) -> list[int]:
    """Return the numbers of samples for training, validation and testing.

    The training count is --train-samples, as in Megatron, so that it does not change if a run is resumed with another
    batch size. Without that flag, it is a new run's sample count. With --data-order megatron, each validation reads
    other samples; otherwise all validations read the same samples.
    """
    batch, replicas = config.batch, world.grid.data.size
    training = batch.batch_sizes(replicas).consumed_after(batch.train_iters)
    if batch.train_samples is not None and batch.train_tokens is None and batch.train_iters:
        training = batch.train_samples
    samples_per_step = batch.global_batch_size(replicas)
    evaluated = evaluated_splits(config)
    num_validations = num_validations_of_run(config) if config.data.has_megatron_order else 1
    return [
        0 if config.checkpoint.eval_only else training,
        num_validations * batch.eval_iters * samples_per_step if evaluated["valid"] else 0,
        batch.eval_iters * samples_per_step if evaluated["test"] else 0,
    ]


def num_validations_of_run(config: Config) -> int:
    """Return the number of validations that Megatron reserves samples for: one more than the run has intervals."""
    interval = config.batch.eval_interval
    return config.batch.train_iters // interval + 1 if interval else 0


def first_validation_sample(config: Config, step: int, samples_per_step: int) -> int:
    """Return the first sample for the validation after ``step`` steps.

    With --data-order megatron, a validation continues after the previous one's samples. After more validations than
    planned, for example because a resumed run has smaller batches, it restarts at the first sample.
    """
    if not config.data.has_megatron_order:
        return 0
    validation_idx = max(step - 1, 0) // config.batch.eval_interval
    return validation_idx % num_validations_of_run(config) * config.batch.eval_iters * samples_per_step


def open_data(provider: DatasetsProvider, config: Config, world: World) -> RunData:
    """Open the data sets on the ranks that read them. Collective.

    Raises:
        DataError: a rank could not open its data, or ranks have opened different data; raised on all ranks.
    """
    datasets: dict[str, Samples] = {}
    failure: Exception | None = None
    if world.reads_data:
        try:
            num_samples = num_samples_of_splits(config, world)
            provided = _mock_data(config, num_samples) if config.data.is_mock else provider(num_samples)
            opened = dict(zip(SPLITS, provided, strict=True))
            datasets = {split: dataset for split, dataset in opened.items() if dataset is not None}
            _check_exclusion(config, datasets)
        except DataError as error:
            failure = error
    all_rank_data = world.grid.host.gather_objects(RankData.from_datasets(datasets, world.reads_data, failure))
    problem = next((rank_data.problem for rank_data in all_rank_data if rank_data.problem), None) or find_disagreement(
        all_rank_data
    )
    if problem:
        raise DataError(problem)
    reader = next((rank_data for rank_data in all_rank_data if rank_data.reads_data), all_rank_data[0])
    has_training = "train" in reader.identities
    return RunData(datasets, reader.fingerprint, reader.order, reader.corpora, has_training, reader.exclusion)


def _check_exclusion(config: Config, datasets: Mapping[str, Samples]) -> None:
    """Raise DataError if a data set of the script would ignore --exclude."""
    if config.data.exclude is None:
        return
    for split, dataset in datasets.items():
        if getattr(dataset, "exclusion", None) is None:
            raise DataError(
                f"--exclude {config.data.exclude} has no effect on the {split} data of this script, a "
                f"{type(dataset).__name__}. Build the data with megatron.data.build_train_valid_test and "
                "get_data_paths(), or remove the flag"
            )


def _mock_data(config: Config, num_samples: Sequence[int]) -> tuple[Any, ...]:
    """Make random data sets for --data-path mock with a seed per split; None for a split without samples."""
    from megatron.training.global_vars import get_tokenizer
    from megatron.training.mock_data import random_data

    seed, tokenizer = config.run.seed, get_tokenizer()
    return tuple(
        random_data(config, seed + split_idx, tokenizer) if count else None
        for split_idx, count in enumerate(num_samples)
    )
