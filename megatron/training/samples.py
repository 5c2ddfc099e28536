"""Which samples a step, or a micro-batch of one rank, has read: for messages about bad numbers."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Micro-batches on each replica."""
        return self.count // (self.micro_batch_size * self.replicas)

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def text(self) -> str:
        """Say which samples these are."""
        return range_text(self.first, self.last)

    def of_micro_batch(self, replica: int, micro_batch: int) -> str:
        """Say which samples micro-batch ``micro_batch`` of a replica holds."""
        first = self.first + (replica * self.num_micro_batches + micro_batch) * self.micro_batch_size
        return range_text(first, first + self.micro_batch_size - 1)


def range_text(first: int, last: int) -> str:
    """Return "sample 5" or "samples 5-8"."""
    return f"sample {first}" if first == last else f"samples {first}-{last}"
