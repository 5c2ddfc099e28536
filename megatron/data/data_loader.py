"""DataLoader: the micro-batches of one data-parallel replica.

A step that begins after c samples takes the samples c ... c + B - 1, where B = b m d is a function of c alone,
constant or growing (``megatron.config.batch``); replica r takes the contiguous part r m b ... (r + 1) m b - 1 of
them, micro-batch after micro-batch; where B is no multiple of b d, the first replicas have one micro-batch more each.
So "samples consumed" is all that there is to resume, with any b, m, d.

A data set that has a length starts anew at its end: sample i of the run is its item i % len. One without a length, as
``GPTDataset``, has an item for any index.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.config.batch import Share, share_of
from megatron.config.batch_rampup import BatchSizes
from megatron.config.seq_length import SeqLengths
from megatron.data.collate import (
    READ_AHEAD_SAMPLES,
    Collate,
    MicroBatch,
    Samples,
    looking_ahead,
    prefetch_of,
    prefetching,
)
from megatron.data.prefetch_workers import PrefetchWorkers
from megatron.data.step_predictions import StepPredictions, predictions_of


class DataLoader:
    """Iterates over micro-batches of replica ``data_rank`` of ``data_size``.

    A micro-batch is ``{"text": int64 [b, L+1]}``; of a data set whose samples are dictionaries, the same keys with the
    arrays or tensors of b samples stacked, and "step_predictions" where the data set tells what it predicts. In a step
    of length l below L all but that are cut into pieces, [b L/l, l+1].

    Args:
        num_micro_batches: of every step; with ``sizes`` of a whole one.
        samples_consumed: samples of all replicas that earlier steps have read.
        sizes: samples of a step over all replicas, where they change or replicas take unequal parts of them.
        lengths: at which samples are read, by tokens consumed; None: they are left whole.
        num_workers: processes that read ahead; 0 reads in this process.
        prefetch_factor: micro-batches that each of them reads ahead.
        pin_memory: give tensors in pinned memory.

    Raises:
        DataError: the data set is empty.
        SampleError: a sample cannot be read, or those of a micro-batch cannot be stacked; with ``num_workers`` or not.
        RuntimeError: a reading process died.
        ValueError: a size of ``sizes`` cannot be shared among the replicas.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        data_rank: int,
        data_size: int,
        samples_consumed: int = 0,
        sizes: BatchSizes | None = None,
        lengths: SeqLengths | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self.prefetch_factor, self.pin_memory = prefetch_factor, pin_memory
        self.micro_batch_size, self.data_rank, self.data_size = micro_batch_size, data_rank, data_size
        self.samples_consumed = samples_consumed
        self.sizes = sizes or BatchSizes(micro_batch_size * num_micro_batches * data_size)
        wrong = [n for n in self.sizes.all() if n % micro_batch_size or n < micro_batch_size * data_size]
        if wrong:
            raise ValueError(
                f"a step must be whole micro-batches of {micro_batch_size}, one or more on each of {data_size} "
                f"replicas, got {wrong[0]} samples"
            )
        self.lengths = lengths

    def share_at(self, samples_consumed: int) -> Share:
        """Return this replica's micro-batches of the step that begins after so many samples."""
        return share_of(self.sizes.at(samples_consumed) // self.micro_batch_size, self.data_size, self.data_rank)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the samples of each micro-batch of this replica and their length, without an end."""
        start = self.samples_consumed
        while True:
            share = self.share_at(start)
            length = self.length_at(start)
            own = start + share.first * self.micro_batch_size
            for micro_batch in range(share.num_micro_batches):
                first = own + micro_batch * self.micro_batch_size
                yield MicroBatch(list(range(first, first + self.micro_batch_size)), length)
            start += self.sizes.at(start)

    def length_at(self, samples_consumed: int) -> int | None:
        """Return the length of the pieces of the step that begins after so many samples; None: samples are whole."""
        if self.lengths is None:
            return None
        length = self.lengths.of_step(samples_consumed)
        return None if length == self.lengths.full else length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        num_predicted = predictions_of(self.dataset)
        predictions = num_predicted and StepPredictions(num_predicted, self.sizes, self.samples_consumed)
        asked, prefetch = self.micro_batches(), prefetch_of(self.dataset)
        if prefetch is not None:
            num_readers = max(self.num_workers, 1)
            depth = -(-READ_AHEAD_SAMPLES // self.micro_batch_size) * num_readers
            asked = looking_ahead(asked, depth, num_readers)
            if not self.num_workers:
                asked = prefetching(asked, prefetch)
        if self.num_workers:
            return PrefetchWorkers(
                self.dataset, asked, self.num_workers, self.prefetch_factor, self.pin_memory, predictions
            )
        batches = map(Collate(self.dataset, predictions), asked)
        return map(_pinned, batches) if self.pin_memory else batches


def _pinned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.pin_memory() for key, tensor in batch.items()}
