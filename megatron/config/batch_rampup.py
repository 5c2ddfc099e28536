"""``--rampup-batch-size``: samples of a step by samples consumed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

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

    def steps_until(self, samples: Fraction | float, samples_consumed: int = 0) -> int:
        """Return the fewest steps after ``samples_consumed`` after which at least ``samples`` are consumed."""
        steps, consumed = 0, samples_consumed
        while consumed < min(samples, self.samples):
            size = self.at(consumed)
            number = consumed * self.num_increments // self.samples
            bound = -(-(number + 1) * self.samples // self.num_increments)
            taken = -(-(min(bound, math.ceil(samples)) - consumed) // size)
            steps, consumed = steps + taken, consumed + taken * size
        return steps + max(math.ceil((samples - consumed) / self.full), 0)

    def steps_within(self, samples: int, samples_consumed: int = 0) -> int:
        """Return the most steps after ``samples_consumed`` after which no more than ``samples`` are consumed."""
        steps = self.steps_until(samples, samples_consumed)
        return steps if self.consumed_after(steps, samples_consumed) <= samples else max(steps - 1, 0)


def parse_rampup(text: str, full: int) -> BatchSizes:
    """Return the sizes that ``START INCREMENT SAMPLES`` means where the global batch is ``full``.

    Raises:
        ValueError: not such a text, or START does not reach ``full`` by steps of INCREMENT.
    """
    words = text.replace("_", "").split()
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
