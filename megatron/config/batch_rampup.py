"""``--rampup-batch-size``: samples per step as a function of the samples consumed.

``--rampup-batch-size START INCREMENT SAMPLES`` starts with START samples per step and adds INCREMENT until the full
global batch is reached, after SAMPLES samples. Each of the n = (global batch - START) / INCREMENT sizes before the
last is used for SAMPLES / n samples, as in Megatron-LM:

    size(c) = START + INCREMENT * floor(c n / SAMPLES)    for c < SAMPLES samples consumed, else the global batch

A step that starts before a size change keeps the old size. The size depends only on the samples consumed, so a
resumed run continues identically in any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

FLAG = "--rampup-batch-size"
_RULE = "must be START INCREMENT SAMPLES, three positive integers such as 32 32 100000"


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step, over all replicas, as a function of the samples consumed.

    Args:
        full: the global batch size after the ramp.
        start: first step's size.
        increment: difference between two successive sizes.
        samples: samples consumed at the end of the ramp; 0 for a constant size ``full``.
    """

    full: int
    start: int = 0
    increment: int = 0
    samples: int = 0

    @property
    def num_increments(self) -> int:
        """Number of sizes below the full size."""
        return (self.full - self.start) // self.increment if self.samples else 0

    def at(self, samples_consumed: int) -> int:
        """Compute the size of the step that starts after ``samples_consumed`` samples."""
        if samples_consumed >= self.samples:
            return self.full
        return self.start + self.increment * (samples_consumed * self.num_increments // self.samples)

    def all(self) -> list[int]:
        """List every size that a step can have, in increasing order."""
        return [self.start + self.increment * i for i in range(self.num_increments)] + [self.full]

    def consumed_after(self, steps: int, samples_consumed: int = 0) -> int:
        """Compute the total number of samples consumed after ``steps`` more steps, from ``samples_consumed`` on."""
        while steps and samples_consumed < self.samples:
            size = self.at(samples_consumed)
            size_idx = samples_consumed * self.num_increments // self.samples
            next_start = -(-(size_idx + 1) * self.samples // self.num_increments)  # first sample of the next size
            num_steps = min(-(-(next_start - samples_consumed) // size), steps)
            samples_consumed, steps = samples_consumed + num_steps * size, steps - num_steps
        return samples_consumed + steps * self.full

    def steps_until(self, samples: Fraction | float, samples_consumed: int = 0) -> int:
        """Compute the minimum step count after ``samples_consumed`` that consumes at least ``samples`` in total."""
        steps, consumed = 0, samples_consumed
        while consumed < min(samples, self.samples):
            size = self.at(consumed)
            size_idx = consumed * self.num_increments // self.samples
            next_start = -(-(size_idx + 1) * self.samples // self.num_increments)
            num_steps = -(-(min(next_start, math.ceil(samples)) - consumed) // size)
            steps, consumed = steps + num_steps, consumed + num_steps * size
        return steps + max(math.ceil((samples - consumed) / self.full), 0)

    def steps_within(self, samples: int, samples_consumed: int = 0) -> int:
        """Compute the maximum step count after ``samples_consumed`` that consumes at most ``samples`` in total."""
        steps = self.steps_until(samples, samples_consumed)
        return steps if self.consumed_after(steps, samples_consumed) <= samples else max(steps - 1, 0)


def parse_rampup(text: str, full: int) -> BatchSizes:
    """Parse ``START INCREMENT SAMPLES`` for a global batch of ``full`` samples.

    Raises:
        ValueError: the text has another form, or ``full`` - START is not a multiple of INCREMENT.
    """
    words = text.replace("_", "").split()
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{FLAG} {_RULE}; got {text!r}")
    start, increment, samples = (int(word) for word in words)
    if start >= full:
        raise ValueError(
            f"{FLAG} must start below the global batch, got START {start} and a global batch of {full}. Lower START, "
            "or remove it"
        )
    if (full - start) % increment:
        raise ValueError(
            f"{FLAG} must reach the global batch in whole increments, got {full} - {start} = {full - start}, which is "
            f"not a multiple of the increment {increment}. Change INCREMENT or START"
        )
    return BatchSizes(full, start, increment, samples)
