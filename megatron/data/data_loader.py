"""DataLoader: one data-parallel replica's micro-batches.

A step that begins after c consumed samples reads the samples c ... c + B - 1. The global batch size is B = b m d, with
m micro-batches with b samples on each of d replicas. It depends only on c, and is constant or grows
(``megatron.config.batch``). Replica r reads the contiguous range r m b ... (r + 1) m b - 1 of the step's samples, one
micro-batch after another. With interleaved replicas, as in Megatron, its micro-batch j consists of the b samples from
(j d + r) b on. If B is not a multiple of b d, the first replicas read one additional micro-batch each. The consumed
samples are therefore the only state needed to resume, with any b, m and d.

A dataset with a length restarts at its end: the run's sample i is its item i % len. A dataset without a length, such
as ``GPTDataset``, has an item for every index.
"""

from __future__ import annotations

import itertools
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
    add_prefetch_indices,
    make_prefetch,
    prefetch_ahead,
)
from megatron.data.prefetch_workers import PrefetchWorkers
from megatron.data.step_predictions import StepPredictions, make_num_predicted


class DataLoader:
    """Endless iterable over the micro-batches of replica ``data_rank`` of ``data_size``.

    A micro-batch is ``{"text": int64 [b, L+1]}``. If the dataset's samples are dictionaries, the micro-batch
    has the same keys, the stacked arrays or tensors from b samples, and "step_predictions" if the dataset has
    ``num_predicted``. In a step with sequence length l < L, all values except "step_predictions" are split into
    chunks, [b L/l, l+1], or truncated to [b, l+1].

    Args:
        num_micro_batches: micro-batches per step and replica; ignored if ``batch_sizes`` is given.
        samples_consumed: samples that earlier steps have read, over all replicas.
        steps_taken: number of earlier steps.
        batch_sizes: samples per step over all replicas, by samples consumed; required if the global batch size changes
            or replicas have different micro-batch counts.
        is_interleaved: the replicas read a step's micro-batches in turn, instead of one contiguous range each.
        lengths: sequence length of each step; None: samples are neither split nor truncated.
        num_workers: processes that read ahead; 0: samples are read in this process.
        prefetch_factor: micro-batches that each worker reads ahead.
        pin_memory: return tensors in pinned memory.

    Raises:
        DataError: the dataset is empty.
        SampleError: a sample cannot be read, or a micro-batch's samples cannot be stacked (for any
            ``num_workers``).
        RuntimeError: a worker died.
        ValueError: a size in ``batch_sizes`` cannot be divided among the replicas.
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
        steps_taken: int = 0,
        batch_sizes: BatchSizes | None = None,
        is_interleaved: bool = False,
        lengths: SeqLengths | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self.prefetch_factor, self.pin_memory = prefetch_factor, pin_memory
        self.micro_batch_size, self.data_rank, self.data_size = micro_batch_size, data_rank, data_size
        self.samples_consumed, self.steps_taken, self.is_interleaved = samples_consumed, steps_taken, is_interleaved
        self.batch_sizes = batch_sizes or BatchSizes(micro_batch_size * num_micro_batches * data_size)
        invalid = [
            batch_size
            for batch_size in self.batch_sizes.all()
            if batch_size % micro_batch_size or batch_size < micro_batch_size * data_size
        ]
        if invalid:
            raise ValueError(
                f"a step must have a multiple of {micro_batch_size} samples (the micro-batch size), at least one "
                f"micro-batch for each of {data_size} replicas, got {invalid[0]} samples"
            )
        self.lengths = lengths

    def share_at(self, samples_consumed: int) -> Share:
        """Compute this replica's micro-batch share in the step after ``samples_consumed`` samples."""
        num_micro_batches = self.batch_sizes.at(samples_consumed) // self.micro_batch_size
        return share_of(num_micro_batches, self.data_size, self.data_rank, is_interleaved=self.is_interleaved)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield sample indices and sequence length for each of this replica's micro-batches, without end."""
        start, is_truncated = self.samples_consumed, self.lengths is not None and self.lengths.truncates
        for step in itertools.count(self.steps_taken):
            share = self.share_at(start)
            length = self.length_at(start, step)
            for micro_batch_idx in range(share.num_micro_batches):
                first = start + share.index_in_step(micro_batch_idx) * self.micro_batch_size
                indices = list(range(first, first + self.micro_batch_size))
                yield MicroBatch(indices, length, is_truncated=is_truncated)
            start += self.batch_sizes.at(start)

    def length_at(self, samples_consumed: int, step: int) -> int | None:
        """Look up the sequence length for the step after ``samples_consumed`` samples and ``step`` steps.

        Returns:
            The length; None for the full length.
        """
        if self.lengths is None:
            return None
        length = self.lengths.length_of_step(samples_consumed, step)
        return None if length == self.lengths.full else length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        num_predicted = make_num_predicted(self.dataset)
        predictions = num_predicted and StepPredictions(num_predicted, self.batch_sizes, self.samples_consumed)
        micro_batches, prefetch = self.micro_batches(), make_prefetch(self.dataset)
        if prefetch is not None:
            num_readers = max(self.num_workers, 1)
            depth = -(-READ_AHEAD_SAMPLES // self.micro_batch_size) * num_readers
            micro_batches = add_prefetch_indices(micro_batches, depth, num_readers)
            if not self.num_workers:
                micro_batches = prefetch_ahead(micro_batches, prefetch)
        if self.num_workers:
            return PrefetchWorkers(
                self.dataset, micro_batches, self.num_workers, self.prefetch_factor, self.pin_memory, predictions
            )
        batches = map(Collate(self.dataset, predictions), micro_batches)
        return map(_pin_memory, batches) if self.pin_memory else batches


def _pin_memory(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.pin_memory() for key, tensor in batch.items()}
