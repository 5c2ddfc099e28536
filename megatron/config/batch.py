"""BatchConfig and batch size ramp-up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megatron.config.option import option
from megatron.config.seq_length import SeqLengths, parse_lengths

# How many samples a step takes while the batch grows: arithmetic on the samples consumed, and on nothing else.
#
# ``--rampup-batch-size START INCREMENT SAMPLES`` begins with START samples a step and adds INCREMENT until the whole
# global batch is reached, after SAMPLES samples. Each of the n = (global batch - START) / INCREMENT sizes before the
# last holds for SAMPLES / n samples:
#
#     size(c) = START + INCREMENT * floor(c n / SAMPLES)    for c < SAMPLES samples consumed, else the global batch
#
# which is what Megatron-LM does. A step that begins below a bound is taken whole with the size it began with. The size
# follows from the samples consumed alone, so a run goes on as it would have in any layout.

FLAG = "--rampup-batch-size"
_RULE = "must be START INCREMENT SAMPLES, three whole numbers above 0 such as 32 32 100000"


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step over all replicas, by samples consumed; ``samples`` 0: ``full`` in every step."""

    full: int
    start: int = 0
    increment: int = 0
    samples: int = 0

    @property
    def num_increments(self) -> int:
        """Sizes below the full one."""
        return (self.full - self.start) // self.increment if self.samples else 0

    def at(self, samples_consumed: int) -> int:
        """Return the samples of the step that begins after so many."""
        if samples_consumed >= self.samples:
            return self.full
        return self.start + self.increment * (samples_consumed * self.num_increments // self.samples)

    def all(self) -> list[int]:
        """Return every size that a step can have, rising."""
        return [self.start + self.increment * number for number in range(self.num_increments)] + [self.full]

    def consumed_after(self, steps: int, samples_consumed: int = 0) -> int:
        """Return the samples consumed when ``steps`` more steps have been taken."""
        while steps and samples_consumed < self.samples:
            size = self.at(samples_consumed)
            number = samples_consumed * self.num_increments // self.samples
            bound = -(-(number + 1) * self.samples // self.num_increments)  # the first sample of the next size
            taken = min(-(-(bound - samples_consumed) // size), steps)
            samples_consumed, steps = samples_consumed + taken * size, steps - taken
        return samples_consumed + steps * self.full

    def steps_until(self, samples: Fraction | float, samples_consumed: int = 0) -> int:
        """Return the fewest steps after ``samples_consumed`` after which at least ``samples`` are consumed."""
        steps, consumed = 0, samples_consumed
        while consumed < min(samples, self.samples):
            size = self.at(consumed)
            number = consumed * self.num_increments // self.samples
            bound = -(-(number + 1) * self.samples // self.num_increments)
            taken = -(-(min(bound, math.ceil(samples)) - consumed) // size)
            steps, consumed = steps + taken, consumed + taken * size
        return steps + max(math.ceil((samples - consumed) / self.full), 0)

    def steps_within(self, samples: int, samples_consumed: int = 0) -> int:
        """Return the most steps after ``samples_consumed`` after which no more than ``samples`` are consumed."""
        steps = self.steps_until(samples, samples_consumed)
        return steps if self.consumed_after(steps, samples_consumed) <= samples else max(steps - 1, 0)


def parse_rampup(text: str, full: int) -> BatchSizes:
    """Return the sizes that ``START INCREMENT SAMPLES`` means where the global batch is ``full``.

    Raises:
        ValueError: not such a text, or START does not reach ``full`` by steps of INCREMENT.
    """
    words = text.replace("_", "").split()
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{FLAG} {_RULE}; got {text!r}")
    start, increment, samples = (int(word) for word in words)
    if start >= full:
        raise ValueError(
            f"{FLAG} must start below the global batch, got a start of {start} and a global batch of {full}. "
            "Leave it out, or lower START"
        )
    if (full - start) % increment:
        raise ValueError(
            f"{FLAG} must reach the global batch by whole increments, got {full} - {start} = {full - start}, which is "
            f"no multiple of the increment {increment}. Change INCREMENT or START"
        )
    return BatchSizes(full, start, increment, samples)


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


# Which micro-batches of a step a replica takes, how many samples it has, how long they are, and how many steps there
# are.


class Share(NamedTuple):
    """A replica's part of a step: ``number`` micro-batches behind the ``first`` ones, which earlier replicas take.

    ``mean`` is what a replica takes on the mean: losses are weighed by it, the same on all.
    """

    first: int
    number: int
    mean: float


def share_of(num_micro_batches: int, replicas: int, replica: int) -> Share:
    """Return a replica's part of the micro-batches of a step; of those left over, the first replicas take one each."""
    number, more = divmod(num_micro_batches, replicas)
    return Share(replica * number + min(replica, more), number + int(replica < more), num_micro_batches / replicas)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """``global batch = batch_size x gas x data-parallel size``; an iteration is an optimizer step in every mode.

    In an elastic job the last replicas may take a micro-batch less than ``gas`` (``megatron.config.elastic``): the
    requested global batch is then below the product, by less than a micro-batch of each.
    """

    batch_size: int = option(
        4,
        "samples of one forward pass on one replica (micro-batch)",
        minimum=1,
        aliases=("--micro-batch-size",),
        short="samples of a micro-batch",
    )
    gas: int = option(
        0, "micro-batches per step on one replica", minimum=1, shown_default="1", short="micro-batches per step"
    )
    requested_global_batch_size: int = option(
        0,
        "samples per step over all replicas; gives --gas when that is not set, else must agree",
        flag="--global-batch-size",
        minimum=1,
        shown_default="batch-size x gas x replicas",
    )
    rampup_batch_size: str | None = option(
        None,
        "START INCREMENT SAMPLES: steps of START samples, of INCREMENT more from time to time, and of the whole global "
        "batch from so many samples on",
        join=" ".join,
        shown_default="the whole global batch in every step",
    )
    seq_length: int = option(256, "tokens of a sample", minimum=1, short="tokens of a sample")
    seq_length_schedule: str | None = option(
        None,
        'lengths at which samples are read from so many tokens of training on: "0: 512; 1e9: 2048; 5e9: 4096"; each '
        "divides --seq-length, and samples are cut into pieces of it",
        family_kind="decoder",
        elsewhere="what frames a sample of T5 or BERT, and what is masked in it, is made for its whole length and "
        "cannot be cut; leave it out",
        shown_default="--seq-length in every step",
    )
    train_iters: int = option(
        200, "optimizer steps of the run; 0: no step, evaluate and save only", minimum=0, short="optimizer steps"
    )
    eval_iters: int = option(
        10, "steps of each evaluation; 0: no evaluation", minimum=0, short="steps of an evaluation"
    )
    eval_interval: int = option(
        100, "steps between evaluations; 0: never", minimum=0, short="steps between evaluations"
    )
    train_samples: int | None = None
    """--train-samples; ``train_iters`` is then the number of steps of a new run with this global batch."""
    train_tokens: int | None = None
    """--train-tokens; ``train_iters`` as for ``train_samples``."""
    requested_train_iters: int | None = None
    """--train-iters if it was given next to --train-tokens."""

    def __post_init__(self) -> None:
        if not self.gas:
            object.__setattr__(self, "gas", 1)

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size

    @property
    def num_micro_batches(self) -> int:
        return self.gas

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Return the samples of one step over all replicas; with a ramp of the steps behind it."""
        full, requested = self.batch_size * self.gas * data_parallel_size, self.requested_global_batch_size
        return requested if 0 < full - requested < self.batch_size * data_parallel_size else full

    def share(self, data_parallel_size: int, replica: int) -> Share:
        """Return what a replica takes of a step; with a ramp of the steps behind it."""
        return share_of(self.global_batch_size(data_parallel_size) // self.batch_size, data_parallel_size, replica)

    def gas_text(self, data_parallel_size: int) -> str:
        """Return "4", or "3 or 4" where some replicas take one less."""
        least = self.share(data_parallel_size, data_parallel_size - 1).number
        return str(self.gas) if least == self.gas else f"{least} or {self.gas}"

    @property
    def lengths(self) -> SeqLengths:
        """The length of a step by tokens consumed.

        Raises:
            ValueError: --seq-length-schedule cannot be read.
        """
        schedule = self.seq_length_schedule
        return SeqLengths(self.seq_length, () if schedule is None else parse_lengths(schedule))

    def sizes(self, data_parallel_size: int) -> BatchSizes:
        """Return the samples of a step over all replicas, by samples consumed.

        Raises:
            ValueError: --rampup-batch-size cannot be read, or does not lead to the global batch.
        """
        full = self.global_batch_size(data_parallel_size)
        if self.rampup_batch_size is None:
            return BatchSizes(full)
        return parse_rampup(self.rampup_batch_size, full)

    def run_length(self, data_parallel_size: int, tokens_per_sample: int) -> RunLength:
        """Return the limits of the run.

        Args:
            tokens_per_sample: tokens that --train-tokens counts for a sample.
        """
        sizes = self.sizes(data_parallel_size)
        if self.train_samples is None and self.train_tokens is None:
            return RunLength(sizes, self.train_iters)
        tokens = self.train_tokens
        min_samples = None if tokens is None else -(-tokens // tokens_per_sample)
        return RunLength(sizes, self.requested_train_iters, self.train_samples, min_samples)
