"""SkippedSteps: the steps of --iterations-to-skip, which consume samples without an update."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import parse_steps


@dataclass(frozen=True)
class SkippedSteps:
    """Steps, counted from 1, that a run skips: their samples count as consumed, and the weights do not change.

    Source: Megatron-LM, training.py, ``train`` (--iterations-to-skip); BigScience's Megatron-DeepSpeed, training.py,
    ``train`` (--skip-train-iteration-range).
    """

    ranges: tuple[range, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SkippedSteps:
        """Parse numbers and ranges separated by spaces, such as "5 101-200".

        Raises:
            ValueError: a word is neither a number of at least 1 nor a range.
        """
        return cls(tuple(parse_steps(word) for word in text.split()))

    def __contains__(self, step: int) -> bool:
        return any(step in steps for steps in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @property
    def num_steps(self) -> int:
        """Number of different steps."""
        return len(set().union(*self.ranges))
