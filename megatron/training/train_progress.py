"""TrainProgress: a run's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from megatron.checkpoint import former


@dataclass
class TrainProgress:
    """A run's position.

    A skipped step counts as a step, and its samples count as consumed. The learning rate does not advance: it follows
    ``updates``, or ``samples_updated`` if the schedule lengths are samples. Samples that a rollback skips count in the
    same way.

    A checkpoint also stores the tokens consumed. They count --seq-length tokens per sample, regardless of the
    sequence-length schedule.

    Attributes:
        step: steps taken, skipped ones included.
        updates: steps that updated the weights.
        samples_consumed: samples read, or skipped by a rollback; the position in the data.
        samples_skipped: samples consumed in steps without an update.
    """

    step: int = 0
    updates: int = 0
    samples_consumed: int = 0
    samples_skipped: int = 0

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokens_per_sample: int) -> TrainProgress:
        """Return the position for resuming from a checkpoint with this metadata.

        If --seq-length has changed, the run resumes at the first sample that begins at or after the tokens consumed.
        """
        saved = former.convert_progress(metadata)
        progress = cls(**{field.name: saved[field.name] for field in fields(cls)})
        if "tokens_consumed" in saved:
            progress.samples_consumed = -(-saved["tokens_consumed"] // tokens_per_sample)
            ratio = Fraction(progress.samples_consumed, max(saved["samples_consumed"], 1))
            progress.samples_skipped = round(progress.samples_skipped * ratio)
        return progress

    def to_metadata(self, tokens_per_sample: int) -> dict[str, int]:
        """Return the ``progress`` entry for checkpoint metadata."""
        return {**asdict(self), "tokens_consumed": self.samples_consumed * tokens_per_sample}

    def skip_step(self, num_samples: int) -> None:
        """Count a step without an update whose ``num_samples`` samples are not read."""
        self.step += 1
        self.samples_consumed += num_samples
        self.samples_skipped += num_samples

    @property
    def samples_updated(self) -> int:
        """Number of samples that updated the weights."""
        return self.samples_consumed - self.samples_skipped

    @property
    def num_skipped_steps(self) -> int:
        """Number of skipped steps."""
        return self.step - self.updates
