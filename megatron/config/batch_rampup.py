"""Samples per step as a function of the samples consumed: --rampup-batch-size and --step-batch-size-schedule.

``--rampup-batch-size START INCREMENT SAMPLES`` starts with START samples per step and adds INCREMENT until the full
global batch is reached, after SAMPLES samples. Each of the n = (global batch - START) / INCREMENT sizes before the
last is used for SAMPLES / n samples, as in Megatron-LM:

    size(c) = START + INCREMENT * floor(c n / SAMPLES)    for c < SAMPLES samples consumed, else the global batch

``--step-batch-size-schedule "0:768 250B:1536"`` lists the sizes and the tokens from which they are used.

A step that starts before a size change keeps the old size. The size depends only on the samples consumed, so a
resumed run continues identically in any layout.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

FLAG = "--rampup-batch-size"
SCHEDULE_FLAG = "--step-batch-size-schedule"
_RULE = "must be START INCREMENT SAMPLES, three positive integers such as 32 32 100000"
_SCHEDULE_RULE = "must be TOKENS:SAMPLES entries with increasing numbers, the first from 0, such as 0:768 250B:1536"
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step, over all replicas, as a function of the samples consumed.

    Args:
        full: the last and largest size, the global batch.
        starts: (samples consumed from which it is used, size) of every smaller size, in increasing order, the first
            from 0; () for a constant size.
        samples: samples consumed from which the size is ``full``.
    """

    full: int
    starts: tuple[tuple[int, int], ...] = ()
    samples: int = 0

    @classmethod
    def ramp(cls, full: int, start: int, increment: int, samples: int) -> BatchSizes:
        """Build the sizes of --rampup-batch-size; the first samples of its sizes are rounded up to integers."""
        n = (full - start) // increment
        return cls(full, tuple((-(-i * samples // n), start + increment * i) for i in range(n)), samples)

    def at(self, samples_consumed: int) -> int:
        """Compute the size of the step that starts after ``samples_consumed`` samples."""
        if samples_consumed >= self.samples:
            return self.full
        return self.starts[self._phase_of(samples_consumed)][1]

    def all(self) -> list[int]:
        """List every size that a step can have, in increasing order."""
        return [size for _, size in self.starts] + [self.full]

    def consumed_after(self, steps: int, samples_consumed: int = 0) -> int:
        """Compute the total number of samples consumed after ``steps`` more steps, from ``samples_consumed`` on."""
        while steps and samples_consumed < self.samples:
            size, next_start = self.at(samples_consumed), self._next_start(samples_consumed)
            num_steps = min(-(-(next_start - samples_consumed) // size), steps)
            samples_consumed, steps = samples_consumed + num_steps * size, steps - num_steps
        return samples_consumed + steps * self.full

    def steps_until(self, samples: Fraction | float, samples_consumed: int = 0) -> int:
        """Compute the minimum step count after ``samples_consumed`` that consumes at least ``samples`` in total."""
        steps, consumed = 0, samples_consumed
        while consumed < min(samples, self.samples):
            size, next_start = self.at(consumed), self._next_start(consumed)
            num_steps = -(-(min(next_start, math.ceil(samples)) - consumed) // size)
            steps, consumed = steps + num_steps, consumed + num_steps * size
        return steps + max(math.ceil((samples - consumed) / self.full), 0)

    def steps_within(self, samples: int, samples_consumed: int = 0) -> int:
        """Compute the maximum step count after ``samples_consumed`` that consumes at most ``samples`` in total."""
        steps = self.steps_until(samples, samples_consumed)
        return steps if self.consumed_after(steps, samples_consumed) <= samples else max(steps - 1, 0)

    def _phase_of(self, samples_consumed: int) -> int:
        """Find the index in ``starts`` of the size in use, before the size is ``full``."""
        return bisect_right(self.starts, samples_consumed, key=lambda start: start[0]) - 1

    def _next_start(self, samples_consumed: int) -> int:
        """Find the samples consumed from which the next size is used, before the size is ``full``."""
        phase = self._phase_of(samples_consumed) + 1
        return self.starts[phase][0] if phase < len(self.starts) else self.samples


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
    return BatchSizes.ramp(full, start, increment, samples)


def parse_schedule(text: str, full: int, tokens_per_sample: int) -> BatchSizes:
    """Parse ``TOKENS:SAMPLES TOKENS:SAMPLES ...`` for a global batch of ``full`` samples, the last size.

    Token counts are rounded down to samples, as in Megatron-LM.

    Raises:
        ValueError: the text has another form, or its last size is not ``full``.
    """
    entries = schedule_entries(text)
    starts = [(tokens // tokens_per_sample, size) for tokens, size in entries]
    if len({start for start, _ in starts}) < len(starts):
        raise ValueError(
            f"{SCHEDULE_FLAG} must use every size for at least one sample of {tokens_per_sample} tokens, got {text!r}. "
            "Raise the token counts"
        )
    if starts[-1][1] != full:
        raise ValueError(
            f"{SCHEDULE_FLAG} must end with the global batch, got {starts[-1][1]} samples and a global batch of "
            f"{full}. Remove --global-batch-size or --gas, or change the last size"
        )
    return BatchSizes(full, tuple(starts[:-1]), starts[-1][0])


def schedule_entries(text: str) -> list[tuple[int, int]]:
    """Parse a value of --step-batch-size-schedule to (tokens, samples per step) pairs in increasing order.

    Raises:
        ValueError: the text has another form, the first entry is not from 0, or a size does not exceed the previous
            one.
    """
    try:
        pairs = [entry.split(":") for entry in text.replace(",", " ").split()]
        entries = sorted((_parse_count(tokens), _parse_count(size)) for tokens, size in pairs)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{SCHEDULE_FLAG} {_SCHEDULE_RULE}; got {text!r}") from None
    sizes = [0, *(size for _, size in entries)]
    if not entries or entries[0][0] or any(size <= previous for previous, size in zip(sizes, sizes[1:], strict=False)):
        raise ValueError(f"{SCHEDULE_FLAG} {_SCHEDULE_RULE}; got {text!r}")
    return entries


def _parse_count(word: str) -> int:
    """Parse a number that may end in K, M, B or T, such as 2.4B."""
    word = word.strip().upper()
    factor = _SUFFIXES.get(word[-1:], 1)
    number = Fraction(word if factor == 1 else word[:-1]) * factor
    if number < 0:
        raise ValueError(word)
    return int(number)
