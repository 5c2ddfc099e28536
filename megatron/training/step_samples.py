"""Sample ids of a step, for messages about anomalous steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.batch import Share, share_of


@dataclass(frozen=True)
class StepSamples:
    """The ``num_samples`` samples of one step over all replicas, from ``first`` on.

    Args:
        step: number of the step, counted from 1 as in progress lines.
        micro_batch_size: number of samples in a micro-batch of one replica.
        replicas: number of data-parallel replicas.
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
        """Largest number of micro-batches of any replica."""
        return self.share(0).num_micro_batches

    def share(self, replica: int) -> Share:
        """Return the micro-batches of a replica."""
        num_micro_batches = self.num_samples // self.micro_batch_size
        return share_of(num_micro_batches, self.replicas, replica, is_interleaved=self.is_interleaved)

    @property
    def last(self) -> int:
        """Last sample of the step."""
        return self.first + self.num_samples - 1

    @property
    def text(self) -> str:
        """The samples of the step as text."""
        return range_text(self.first, self.last)

    def micro_batch_text(self, replica: int, micro_batch: int) -> str:
        """Return the samples of micro-batch ``micro_batch`` of a replica as text."""
        first = self.first + self.share(replica).index_in_step(micro_batch) * self.micro_batch_size
        return range_text(first, first + self.micro_batch_size - 1)


def range_text(first: int, last: int) -> str:
    """Return "sample 5" or "samples 5-8"."""
    return f"sample {first}" if first == last else f"samples {first}-{last}"
