"""How much of the input may be bad."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.preprocess.counts import Counts

_TOO_FEW_FOR_A_FRACTION = 1000


class TooManyBad(Exception):
    """A limit is passed; the message says which."""


@dataclass(frozen=True)
class Limits:
    """Whichever is reached first ends the job; with none given no record may be bad.

    Args:
        max_lines: how many records may be bad.
        max_fraction: how many of all that were read; looked at once 1,000 were, and at the end.
    """

    max_lines: int | None = None
    max_fraction: float | None = None

    def check(self, counts: Counts, *, at_end: bool = False) -> None:
        """Check what was read so far.

        Raises:
            TooManyBad: a limit is passed.
        """
        max_lines = 0 if self.max_lines is None and self.max_fraction is None else self.max_lines
        if max_lines is not None and counts.num_bad > max_lines:
            raise TooManyBad(
                f"at most {max_lines} bad lines are allowed (--max-bad-lines), got {counts.num_bad} so far"
            )
        if self.max_fraction is None or (counts.num_records < _TOO_FEW_FOR_A_FRACTION and not at_end):
            return
        if counts.num_bad > self.max_fraction * counts.num_records:
            raise TooManyBad(
                f"at most {self.max_fraction:g} of all lines may be bad (--max-bad-fraction), got {counts.num_bad} of "
                f"{counts.num_records} so far"
            )
