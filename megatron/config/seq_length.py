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
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

FLAG = "--seq-length-schedule"
MAX_TOKENS = 2**62
"""Maximum number of tokens, which are counted in 64 bits."""

_RULE = 'must be entries "TOKENS: LENGTH" separated by semicolons, such as "0: 512; 1e9: 2048; 5e9: 4096"'


@dataclass(frozen=True)
class SeqLengths:
    """Slice length as a function of the tokens consumed. Without ``steps``, every step uses ``full``.

    Args:
        full: tokens per sample (--seq-length).
        steps: (tokens, length), both increasing, from 0 tokens in the first entry to the length ``full`` in the last.
    """

    full: int
    steps: tuple[tuple[int, int], ...] = ()

    def at(self, tokens: int) -> int:
        """Return the length for a step that starts after ``tokens`` consumed tokens."""
        count = bisect_right(self.steps, tokens, key=lambda step: step[0])
        return self.steps[count - 1][1] if count else self.full

    def length_of_step(self, samples_consumed: int) -> int:
        """Return the length for the step that starts after ``samples_consumed`` samples."""
        return self.at(samples_consumed * self.full)

    def all(self) -> list[int]:
        """List every length that a step can have, in increasing order."""
        return [length for _, length in self.steps] or [self.full]

    def starts(self) -> list[tuple[int, int, int]]:
        """List (tokens, first sample index after these tokens, length) for each entry."""
        return [(tokens, -(-tokens // self.full), length) for tokens, length in self.steps]

    @property
    def is_changing(self) -> bool:
        """True if the length changes during training."""
        return len(self.steps) > 1


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
