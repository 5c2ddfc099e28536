"""``--seq-length-schedule``: a sequence length that grows during training.

With ``--seq-length-schedule "0: 512; 1e9: 2048; 5e9: 4096"``, a step uses the length of the last entry whose number of
tokens has been consumed before the step. A sample is always a window of L + 1 tokens, with L = --seq-length: L inputs,
and the label of the last input. If the length l of a step, a divisor of L, is shorter, the L / l slices of the window
are read as separate samples. Slice k consists of columns k l ... k l + l of the window, so neighbours share one token,
and each token is a label exactly once, as in the full window:

    window of L = 8     t0 t1 t2 t3 t4 t5 t6 t7 t8
    slices of l = 4     t0 t1 t2 t3 t4
                                    t4 t5 t6 t7 t8

The tokens of a step, the samples and their order are therefore independent of the schedule, and so is the position at
which a run resumes. The number of tokens consumed is the number of samples consumed times L.

``--seq-length-curriculum`` truncates samples instead (``megatron.config.curriculum``): a step of length l reads columns
0 ... l of each window, and drops the tokens after them. Its lengths follow the step number.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.batch_rampup import BatchSizes

FLAG = "--seq-length-schedule"
MAX_TOKENS = 2**62
"""Maximum number of tokens, which are counted in 64 bits."""

_RULE = 'must be entries "TOKENS: LENGTH" separated by semicolons, such as "0: 512; 1e9: 2048; 5e9: 4096"'


@dataclass(frozen=True)
class SeqLengths:
    """Sequence length of each step. Without ``steps`` and ``curriculum``, every step uses ``full``.

    Args:
        full: tokens per sample (--seq-length).
        steps: (tokens, length) of --seq-length-schedule, both increasing, from 0 tokens in the first entry to the
            length ``full`` in the last. Samples are split.
        curriculum: (first step, length) of --seq-length-curriculum, in increasing steps from step 1. Samples are
            truncated.
    """

    full: int
    steps: tuple[tuple[int, int], ...] = ()
    curriculum: tuple[tuple[int, int], ...] = ()

    def at(self, tokens: int) -> int:
        """Return the length for a step that starts after ``tokens`` consumed tokens."""
        count = bisect_right(self.steps, tokens, key=lambda step: step[0])
        return self.steps[count - 1][1] if count else self.full

    def length_of_step(self, samples_consumed: int, step: int) -> int:
        """Return the length for the step that starts after ``samples_consumed`` samples and ``step`` steps."""
        if self.truncates:
            return self.curriculum[bisect_right(self.curriculum, step + 1, key=lambda phase: phase[0]) - 1][1]
        return self.at(samples_consumed * self.full)

    def all(self) -> list[int]:
        """List every length that a step or an evaluation can have, in increasing order."""
        if self.truncates:
            return sorted({self.full, *(length for _, length in self.curriculum)})
        return [length for _, length in self.steps] or [self.full]

    def starts(self) -> list[tuple[int, int, int]]:
        """List (tokens, first sample index after these tokens, length) for each entry of --seq-length-schedule."""
        return [(tokens, -(-tokens // self.full), length) for tokens, length in self.steps]

    @property
    def is_changing(self) -> bool:
        """True if a step or an evaluation can have another length than others."""
        return len(self.all()) > 1

    @property
    def truncates(self) -> bool:
        """True if shorter samples are truncated, False if they are split."""
        return bool(self.curriculum)

    def num_sequences(self, length: int) -> int:
        """Count the sequences of ``length`` tokens that a step reads from each sample."""
        return 1 if self.truncates else self.full // length

    def num_dropped(self, length: int) -> int:
        """Count the tokens that a step with ``length`` drops from each sample."""
        return self.full - length if self.truncates else 0

    def tokens_after(self, steps: int, batch_sizes: BatchSizes) -> int:
        """Count the tokens that a run's first ``steps`` steps train on."""
        tokens = samples = 0
        for first, stop, length in self._phases():
            last = steps if stop is None else min(stop - 1, steps)
            if last < first:
                break
            after = batch_sizes.consumed_after(last - first + 1, samples)
            tokens, samples = tokens + (after - samples) * length, after
        return tokens

    def steps_until(self, tokens: int, batch_sizes: BatchSizes, step: int = 0, samples_consumed: int = 0) -> int:
        """Compute the minimum step count that trains on at least ``tokens`` tokens.

        Args:
            step, samples_consumed: steps and samples before the first of these steps.
        """
        num_steps, samples = 0, samples_consumed
        for _, stop, length in self._phases():
            num_left = None if stop is None else stop - 1 - step - num_steps  # steps left in this phase
            if tokens <= 0 or (num_left is not None and num_left <= 0):
                continue
            needed = batch_sizes.steps_until(samples + -(-tokens // length), samples)
            taken = needed if num_left is None else min(needed, num_left)
            after = batch_sizes.consumed_after(taken, samples)
            num_steps, samples, tokens = num_steps + taken, after, tokens - (after - samples) * length
        return num_steps

    def tokens_of(self, samples: int, batch_sizes: BatchSizes) -> int:
        """Count the tokens that a run trains on in its first ``samples`` samples, which may end within a step."""
        steps = max(batch_sizes.steps_until(samples) - 1, 0)
        left = samples - batch_sizes.consumed_after(steps)
        return self.tokens_after(steps, batch_sizes) + left * self.length_of_step(samples, steps)

    def samples_of(self, tokens: int, batch_sizes: BatchSizes) -> float:
        """Count the samples in which a run trains on its first ``tokens`` tokens; the inverse of ``tokens_of``."""
        steps = max(self.steps_until(tokens, batch_sizes) - 1, 0)
        samples, left = batch_sizes.consumed_after(steps), tokens - self.tokens_after(steps, batch_sizes)
        return samples + left / self.length_of_step(samples, steps)

    def _phases(self) -> Iterator[tuple[int, int | None, int]]:
        """Yield (first step, first step of the next phase, trained tokens per sample); the last phase has no end."""
        phases = self.curriculum or ((1, self.full),)  # the schedule splits samples, so every token is trained on
        stops = [*(first for first, _ in phases[1:]), None]
        for (first, length), stop in zip(phases, stops, strict=True):
            yield first, stop, length


def parse_lengths(text: str) -> tuple[tuple[int, int], ...]:
    """Parse a schedule into (tokens, length) entries, in the order of the text.

    Raises:
        ValueError: the text has another form.
    """
    message = f"{FLAG} {_RULE}; got {text!r}"
    steps = tuple(_parse_entry(entry.strip(), message) for entry in text.split(";") if entry.strip())
    if not steps:
        raise ValueError(f"{message}, which has no entry. Add one, or remove the flag")
    return steps


def _parse_entry(entry: str, message: str) -> tuple[int, int]:
    tokens, colon, length = (field.strip() for field in entry.partition(":"))
    if not colon:
        raise ValueError(f"{message}, where {entry!r} has no colon")
    start, size = _parse_whole_number(tokens), _parse_whole_number(length)
    if start is None:
        raise ValueError(f"{message}, where {tokens!r} is not a whole number of tokens of at least 0")
    if not size:
        raise ValueError(f"{message}, where {length!r} is not a length, a whole number of at least 1")
    return start, size


def _parse_whole_number(word: str) -> int | None:
    """Parse an integer, which may be written as 1e9; None for anything else."""
    if word.isdecimal():
        return int(word) if int(word) <= MAX_TOKENS else None
    try:
        value = float(word)
    except ValueError:
        return None
    is_whole = math.isfinite(value) and value == int(value) and 0 <= value <= MAX_TOKENS
    return int(value) if is_whole else None
