"""Sample ids of a step, for messages about anomalous steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.batch import Share, share_of


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step over all replicas: ``count`` from ``first`` on, in contiguous parts by replica.

    Args:
        step: its number, counted from 1 as progress lines do.
        micro_batch_size: samples of a micro-batch on one replica.
        replicas: data-parallel replicas.
    """

    step: int
    first: int
    count: int
    micro_batch_size: int
    replicas: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches on a replica, the most of all."""
        return self.share(0).num_micro_batches

    def share(self, replica: int) -> Share:
        """Return the micro-batches of a replica."""
        return share_of(self.count // self.micro_batch_size, self.replicas, replica)

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def text(self) -> str:
        """Say which samples these are."""
        return range_text(self.first, self.last)

    def of_micro_batch(self, replica: int, micro_batch: int) -> str:
        """Say which samples micro-batch ``micro_batch`` of a replica holds."""
        first = self.first + (self.share(replica).first + micro_batch) * self.micro_batch_size
        return range_text(first, first + self.micro_batch_size - 1)


def range_text(first: int, last: int) -> str:
    """Return "sample 5" or "samples 5-8"."""
    return f"sample {first}" if first == last else f"samples {first}-{last}"
