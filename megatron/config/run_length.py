"""RunLength: the end of a run in steps, samples or tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.config.batch_rampup import BatchSizes
from megatron.config.seq_length import SeqLengths


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
        trained_tokens: token limit with --seq-length-curriculum, which counts the tokens after truncation. The run ends
            after the step that reaches it.
        lengths: sequence length of each step; needed for ``trained_tokens``.

    Source:
        Megatron-LM, training.py, ``update_train_iters``; Megatron-DeepSpeed, training.py, ``train``.
    """

    batch_sizes: BatchSizes
    steps: int | None = None
    samples: int | None = None
    min_samples: int | None = None
    trained_tokens: int | None = None
    lengths: SeqLengths | None = None

    def steps_left(self, step: int, samples_consumed: int, tokens_dropped: int = 0) -> int:
        """Count the remaining steps after ``step`` steps and ``samples_consumed`` samples.

        Args:
            tokens_dropped: tokens of these samples that were truncated.
        """
        limits = []
        if self.steps is not None:
            limits.append(max(self.steps - step, 0))
        if self.samples is not None:
            limits.append(self.batch_sizes.steps_within(self.samples, samples_consumed))
        if self.min_samples is not None:
            limits.append(self.batch_sizes.steps_until(self.min_samples, samples_consumed))
        if self.trained_tokens is not None and self.lengths is not None:
            tokens = self.trained_tokens - (samples_consumed * self.lengths.full - tokens_dropped)
            limits.append(self.lengths.steps_until(tokens, self.batch_sizes, step, samples_consumed))
        return min(limits)


def indivisible(values: Iterable[int], divisor: int) -> list[int]:
    """List the sizes that are not multiples of ``divisor``."""
    return [value for value in values if value % divisor]
