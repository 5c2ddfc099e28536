"""How many samples a step takes while the batch grows: arithmetic on the samples consumed, and on nothing else.

``--rampup-batch-size START INCREMENT SAMPLES`` begins with START samples a step and adds INCREMENT until the whole
global batch is reached, after SAMPLES samples. Each of the n = (global batch - START) / INCREMENT sizes before the last
holds for SAMPLES / n samples:

    size(c) = START + INCREMENT * floor(c n / SAMPLES)    for c < SAMPLES samples consumed, else the global batch

which is what Megatron-LM does. A step that begins below a bound is taken whole with the size it began with. The size
follows from the samples consumed alone, so a run goes on as it would have in any layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FLAG = "--rampup-batch-size"
_RULE = "must be START INCREMENT SAMPLES, three whole numbers above 0 such as 32 32 100000"


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step over all replicas, by samples consumed; ``samples`` 0: ``full`` in every step."""

    full: int
    start: int = 0
    increment: int = 0
    samples: int = 0

    @property
    def num_increments(self) -> int:
        """Sizes below the full one."""
        return (self.full - self.start) // self.increment if self.samples else 0

    def at(self, samples_consumed: int) -> int:
        """Return the samples of the step that begins after so many."""
        if samples_consumed >= self.samples:
            return self.full
        return self.start + self.increment * (samples_consumed * self.num_increments // self.samples)

    def all(self) -> list[int]:
        """Return every size that a step can have, rising."""
        return [self.start + self.increment * number for number in range(self.num_increments)] + [self.full]

    def consumed_after(self, steps: int, samples_consumed: int = 0) -> int:
        """Return the samples consumed when ``steps`` more steps have been taken."""
        while steps and samples_consumed < self.samples:
            size = self.at(samples_consumed)
            number = samples_consumed * self.num_increments // self.samples
            bound = -(-(number + 1) * self.samples // self.num_increments)  # the first sample of the next size
            taken = min(-(-(bound - samples_consumed) // size), steps)
            samples_consumed, steps = samples_consumed + taken * size, steps - taken
        return samples_consumed + steps * self.full


def parse_rampup(text: str, full: int) -> BatchSizes:
    """Return the sizes that ``START INCREMENT SAMPLES`` means where the global batch is ``full``.

    Raises:
        ValueError: not such a text, or START does not reach ``full`` by steps of INCREMENT.
    """
    words = text.split()
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{FLAG} {_RULE}; got {text!r}")
    start, increment, samples = (int(word) for word in words)
    if start >= full:
        raise ValueError(
            f"{FLAG} must start below the global batch, got a start of {start} and a global batch of {full}. "
            "Leave it out, or lower START"
        )
    if (full - start) % increment:
        raise ValueError(
            f"{FLAG} must reach the global batch by whole increments, got {full} - {start} = {full - start}, which is "
            f"no multiple of the increment {increment}. Change INCREMENT or START"
        )
    return BatchSizes(full, start, increment, samples)


def indivisible(sizes: Iterable[int], divisor: int) -> list[int]:
    """Return the sizes that are no multiple of ``divisor``."""
    return [size for size in sizes if size % divisor]
