"""RunLength: the end of a run in steps, samples or tokens.

``--rampup-batch-size START INCREMENT SAMPLES`` starts with START samples per step and adds INCREMENT until the full
global batch is reached, after SAMPLES samples. Each of the n = (global batch - START) / INCREMENT sizes before the
last is used for SAMPLES / n samples:

    size(c) = START + INCREMENT * floor(c n / SAMPLES)    for c < SAMPLES samples consumed, else the global batch

as in Megatron-LM. A step that starts below a bound keeps its size until its end. The size depends only on the samples
consumed, so a resumed run continues identically in any layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.config.batch_rampup import BatchSizes


@dataclass(frozen=True)
class RunLength:
    """The limits of a run. The first limit that is reached ends it.

    ``steps_left`` depends only on the position of the run, so a run that is resumed with another global batch ends
    after the same number of samples.

    Attributes:
        sizes: global batch sizes, by samples consumed.
        steps: number of steps; None if only samples or tokens limit the run.
        samples: limit in samples. A step that would exceed it is not taken.
        min_samples: samples at which the limit of tokens is reached. The step that reaches it is completed.

    Source:
        Megatron-LM, training.py, ``update_train_iters``; Megatron-DeepSpeed, training.py, ``train``.
    """

    sizes: BatchSizes
    steps: int | None = None
    samples: int | None = None
    min_samples: int | None = None

    def steps_left(self, step: int, samples_consumed: int) -> int:
        """Return the number of steps that follow ``step`` steps and ``samples_consumed`` samples."""
        limits = []
        if self.steps is not None:
            limits.append(max(self.steps - step, 0))
        if self.samples is not None:
            limits.append(self.sizes.steps_within(self.samples, samples_consumed))
        if self.min_samples is not None:
            limits.append(self.sizes.steps_until(self.min_samples, samples_consumed))
        return min(limits)


def indivisible(sizes: Iterable[int], divisor: int) -> list[int]:
    """Return the sizes that are not multiples of ``divisor``."""
    return [size for size in sizes if size % divisor]
