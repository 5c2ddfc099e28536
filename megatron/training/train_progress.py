"""TrainProgress: a run's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from megatron.checkpoint import former

_DROPPED = ("tokens_dropped", "tokens_dropped_skipped")
"""Counters that a checkpoint stores only if they are not 0, in a run with a curriculum."""


@dataclass
class TrainProgress:
    """A run's position.

    A skipped step counts as a step, and its samples count as consumed. The learning rate does not advance: it follows
    ``updates``, or ``samples_updated`` if the schedule lengths are samples. Samples that a rollback skips count in the
    same way.

    A checkpoint also stores the tokens consumed. They count --seq-length tokens per sample, regardless of the
    sequence-length schedule or curriculum. The tokens that a curriculum truncates are counted separately.

    Attributes:
        step: steps taken, skipped ones included.
        updates: steps that updated the weights.
        samples_consumed: samples read, or skipped by a rollback; the position in the data.
        samples_skipped: samples consumed in steps without an update.
        tokens_dropped: tokens of the samples consumed that --seq-length-curriculum truncated.
        tokens_dropped_skipped: those of them in ``samples_skipped``.
    """

    step: int = 0
    updates: int = 0
    samples_consumed: int = 0
    samples_skipped: int = 0
    tokens_dropped: int = 0
    tokens_dropped_skipped: int = 0

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokens_per_sample: int) -> TrainProgress:
        """Return the position for resuming from a checkpoint with this metadata.

        If --seq-length has changed, the run resumes at the first sample that begins at or after the tokens consumed.
        """
        saved = former.convert_progress(metadata)
        names = [field.name for field in fields(cls) if field.name in saved or field.name not in _DROPPED]
        progress = cls(**{name: saved[name] for name in names})
        if "tokens_consumed" in saved:
            progress.samples_consumed = -(-saved["tokens_consumed"] // tokens_per_sample)
            ratio = Fraction(progress.samples_consumed, max(saved["samples_consumed"], 1))
            progress.samples_skipped = round(progress.samples_skipped * ratio)
        return progress

    def to_metadata(self, tokens_per_sample: int) -> dict[str, int]:
        """Return the ``progress`` entry for checkpoint metadata."""
        counters = {name: value for name, value in asdict(self).items() if value or name not in _DROPPED}
        return {**counters, "tokens_consumed": self.samples_consumed * tokens_per_sample}

    def end_step(self, num_samples: int, tokens_dropped: int, *, is_updated: bool) -> None:
        """Count a step.

        Args:
            num_samples: its samples, over all replicas.
            tokens_dropped: tokens of these samples that were truncated.
            is_updated: False for a step without an update.
        """
        self.step += 1
        self.updates += int(is_updated)
        self.samples_consumed += num_samples
        self.tokens_dropped += tokens_dropped
        if not is_updated:
            self.samples_skipped += num_samples
            self.tokens_dropped_skipped += tokens_dropped

    def tokens_trained(self, tokens_per_sample: int) -> int:
        """Count the tokens consumed without those that were truncated."""
        return self.samples_consumed * tokens_per_sample - self.tokens_dropped

    def tokens_updated(self, tokens_per_sample: int) -> int:
        """Count the tokens that updated the weights, without those that were truncated."""
        return self.samples_updated * tokens_per_sample - (self.tokens_dropped - self.tokens_dropped_skipped)

    @property
    def samples_updated(self) -> int:
        """Number of samples that updated the weights."""
        return self.samples_consumed - self.samples_skipped

    @property
    def num_skipped_steps(self) -> int:
        """Number of skipped steps."""
        return self.step - self.updates
