"""How much of the input may be bad."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.preprocess.counts import Counts


class TooManyBad(Exception):
    """A limit is passed; the message says which."""


@dataclass(frozen=True)
class Limits:
    """Whichever is reached first ends the job; with none given no record may be bad.

    Args:
        max_lines: how many records may be bad.
        max_fraction: how many of all records. Before the end it is passed only where it would be if all that is still
            to be read were good, so that the verdict does not depend on which unit comes first.
    """

    max_lines: int | None = None
    max_fraction: float | None = None

    def check(self, counts: Counts, most_records: float) -> None:
        """Check what was read so far.

        Args:
            most_records: there cannot be more in the whole input; at the end those that there were.

        Raises:
            TooManyBad: a limit is passed.
        """
        max_lines = 0 if self.max_lines is None and self.max_fraction is None else self.max_lines
        if max_lines is not None and counts.num_bad > max_lines:
            raise TooManyBad(
                f"at most {max_lines} bad lines are allowed (--max-bad-lines), got {counts.num_bad} so far"
            )
        if self.max_fraction is not None and counts.num_bad > self.max_fraction * most_records:
            raise TooManyBad(
                f"at most {self.max_fraction:g} of all lines may be bad (--max-bad-fraction), got {counts.num_bad} of "
                f"{counts.num_records} so far"
            )
