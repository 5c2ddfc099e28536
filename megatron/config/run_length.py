"""RunLength: where a run ends, in steps, samples or tokens.

``--rampup-batch-size START INCREMENT SAMPLES`` begins with START samples a step and adds INCREMENT until the whole
global batch is reached, after SAMPLES samples. Each of the n = (global batch - START) / INCREMENT sizes before the
last holds for SAMPLES / n samples:

    size(c) = START + INCREMENT * floor(c n / SAMPLES)    for c < SAMPLES samples consumed, else the global batch

which is what Megatron-LM does. A step that begins below a bound is taken whole with the size it began with. The size
follows from the samples consumed alone, so a run goes on as it would have in any layout.
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
    """Return the sizes that are no multiple of ``divisor``."""
    return [size for size in sizes if size % divisor]
