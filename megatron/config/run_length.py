"""RunLength: the end of a run in steps, samples or tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.config.batch_rampup import BatchSizes


@dataclass(frozen=True)
class RunLength:
    """Run limits: a run ends when it reaches the first of them.

    ``steps_left`` depends only on the run's position, so a run that is resumed with another global batch ends
    after the same number of samples.

    Attributes:
        batch_sizes: global batch size as a function of the samples consumed.
        steps: step count; None if only samples or tokens limit the run.
        samples: limit in samples. The run ends before a step that would exceed it.
        min_samples: token limit, converted to samples. The run ends after the step that reaches it.

    Source:
        Megatron-LM, training.py, ``update_train_iters``; Megatron-DeepSpeed, training.py, ``train``.
    """

    batch_sizes: BatchSizes
    steps: int | None = None
    samples: int | None = None
    min_samples: int | None = None

    def steps_left(self, step: int, samples_consumed: int) -> int:
        """Count the remaining steps after ``step`` steps and ``samples_consumed`` samples."""
        limits = []
        if self.steps is not None:
            limits.append(max(self.steps - step, 0))
        if self.samples is not None:
            limits.append(self.batch_sizes.steps_within(self.samples, samples_consumed))
        if self.min_samples is not None:
            limits.append(self.batch_sizes.steps_until(self.min_samples, samples_consumed))
        return min(limits)


def indivisible(values: Iterable[int], divisor: int) -> list[int]:
    """List the sizes that are not multiples of ``divisor``."""
    return [value for value in values if value % divisor]
