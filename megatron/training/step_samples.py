"""A step's sample ids, for messages about anomalous steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.batch import Share, share_of


@dataclass(frozen=True)
class StepSamples:
    """The ``num_samples`` samples in one step over all replicas, from ``first`` on.

    Args:
        step: step number, counted from 1 as in progress lines.
        micro_batch_size: samples per micro-batch of one replica.
        replicas: data-parallel replicas.
        is_interleaved: see ``share_of``.
    """

    step: int
    first: int
    num_samples: int
    micro_batch_size: int
    replicas: int
    is_interleaved: bool = False

    @property
    def num_micro_batches(self) -> int:
        """Largest micro-batch count on any replica."""
        return self.share(0).num_micro_batches

    def share(self, replica: int) -> Share:
        """Return a replica's micro-batches."""
        num_micro_batches = self.num_samples // self.micro_batch_size
        return share_of(num_micro_batches, self.replicas, replica, is_interleaved=self.is_interleaved)

    @property
    def last(self) -> int:
        """Last sample in the step."""
        return self.first + self.num_samples - 1

    @property
    def text(self) -> str:
        """The step's samples as text."""
        return range_text(self.first, self.last)

    def micro_batch_text(self, replica: int, micro_batch: int) -> str:
        """Format the samples in a replica's micro-batch."""
        first = self.first + self.share(replica).index_in_step(micro_batch) * self.micro_batch_size
        return range_text(first, first + self.micro_batch_size - 1)


def range_text(first: int, last: int) -> str:
    """Format as "sample 5" or "samples 5-8"."""
    return f"sample {first}" if first == last else f"samples {first}-{last}"
