"""The micro-batches of one data-parallel replica, in an order that does not depend on the layout.

A step that begins after c samples takes the samples c ... c + B - 1, where B = b m d is a function of c alone
(``megatron.rampup``: constant, or growing); replica r takes the contiguous part r m b ... (r + 1) m b - 1 of them,
micro-batch after micro-batch. So "samples consumed" is all that there is to resume, with any b, m, d.

A data set that has a length starts anew at its end: sample i of the run is its item i % len. One without a length, as
``GPT2Samples``, has an item for any index.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.data.collate import Collate, Samples
from megatron.data.read_ahead import ReadAhead
from megatron.data.step_predictions import StepPredictions, predictions_of
from megatron.rampup import BatchSizes


class ReplicaBatches:
    """Iterates over micro-batches of replica ``data_rank`` of ``data_size``.

    A micro-batch is ``{"text": int64 [b, L+1]}``; of a data set whose samples are dictionaries, the same keys with the
    arrays or tensors of b samples stacked, and "step_predictions" where the data set tells what it predicts.

    Args:
        num_micro_batches: of every step; with ``sizes`` of a whole one.
        samples_consumed: samples of all replicas that earlier steps have read.
        sizes: samples of a step over all replicas where they change; each a multiple of b d.
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
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self.prefetch_factor, self.pin_memory = prefetch_factor, pin_memory
        self.micro_batch_size, self.data_rank, self.data_size = micro_batch_size, data_rank, data_size
        self.samples_consumed = samples_consumed
        self.sizes = sizes or BatchSizes(micro_batch_size * num_micro_batches * data_size)

    def num_micro_batches_at(self, samples_consumed: int) -> int:
        """Return the micro-batches on each replica of the step that begins after so many samples."""
        size, share = self.sizes.at(samples_consumed), self.micro_batch_size * self.data_size
        if size % share:
            raise ValueError(f"a step must be a multiple of micro-batch x replicas = {share} samples, got {size}")
        return size // share

    def indices(self) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch of this replica, without an end."""
        start = self.samples_consumed
        while True:
            number = self.num_micro_batches_at(start)
            stop = start + self.sizes.at(start)
            own = start + self.data_rank * self.micro_batch_size * number
            for micro_batch in range(number):
                first = own + micro_batch * self.micro_batch_size
                yield list(range(first, first + self.micro_batch_size))
            start = stop

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        num_predicted = predictions_of(self.dataset)
        predictions = num_predicted and StepPredictions(num_predicted, self.sizes, self.samples_consumed)
        if self.num_workers:
            return ReadAhead(
                self.dataset, self.indices(), self.num_workers, self.prefetch_factor, self.pin_memory, predictions
            )
        batches = map(Collate(self.dataset, predictions), self.indices())
        return map(_pinned, batches) if self.pin_memory else batches


def _pinned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.pin_memory() for key, tensor in batch.items()}
