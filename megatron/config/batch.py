"""BatchConfig: batch sizes and run length; Share: one replica's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config.batch_rampup import BatchSizes, parse_rampup, parse_schedule
from megatron.config.curriculum import curriculum_phases
from megatron.config.option import option
from megatron.config.run_length import RunLength
from megatron.config.seq_length import SeqLengths, parse_lengths
from megatron.config.skipped_steps import SkippedSteps


class Share(NamedTuple):
    """Micro-batches that one replica runs in a step.

    Args:
        first: the replica's first micro-batch index within the step.
        num_micro_batches: the replica's micro-batch count.
        mean_num_micro_batches: mean count over the replicas, by which every replica normalises its losses.
        spacing: distance within the step between the replica's micro-batches.
    """

    first: int
    num_micro_batches: int
    mean_num_micro_batches: float
    spacing: int = 1

    def index_in_step(self, micro_batch: int) -> int:
        """Convert the replica's ``micro_batch`` to its index within the step."""
        return self.first + micro_batch * self.spacing


def share_of(num_micro_batches: int, replicas: int, replica: int, *, is_interleaved: bool = False) -> Share:
    """Compute a replica's share of the micro-batches; if they do not divide evenly, the first replicas run one more.

    Args:
        is_interleaved: replica r runs micro-batches r, r + replicas, ..., as in Megatron, instead of consecutive ones.
    """
    count, remainder = divmod(num_micro_batches, replicas)
    first = replica if is_interleaved else replica * count + min(replica, remainder)
    mean = num_micro_batches / replicas
    return Share(first, count + int(replica < remainder), mean, replicas if is_interleaved else 1)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """``global batch = batch_size x gas x data-parallel size``; an iteration is an optimizer step in every mode.

    In an elastic job the last replicas may run one micro-batch less than ``gas`` (``megatron.config.elastic``). The
    global batch is then ``requested_global_batch_size``, which is less than this product.
    """

    batch_size: int = option(
        4,
        "micro-batch size: samples of one forward on one replica",
        minimum=1,
        aliases=("--micro-batch-size",),
        short="micro-batch size",
    )
    gas: int = option(
        0,
        "gradient accumulation: micro-batches per step on one replica",
        minimum=1,
        shown_default="1",
        short="micro-batches per step",
    )
    requested_global_batch_size: int = option(
        0,
        "samples per step over all replicas; determines --gas if that is not set, otherwise must agree with it",
        flag="--global-batch-size",
        minimum=1,
        shown_default="batch-size x gas x replicas",
    )
    rampup_batch_size: str | None = option(
        None,
        "START INCREMENT SAMPLES: start with START samples per step and add INCREMENT at regular intervals, up to "
        "the global batch after SAMPLES samples",
        join=" ".join,
        shown_default="the full global batch in every step",
    )
    step_batch_size_schedule: str | None = option(
        None,
        "samples per step by training tokens: TOKENS:SAMPLES entries such as 0:768 250B:1536; the last one is the "
        "global batch",
        family_kind="decoder",
        elsewhere="use --rampup-batch-size",
        join=" ".join,
        shown_default="the full global batch in every step",
    )
    seq_length: int = option(256, "number of tokens of a sample", minimum=1, short="tokens per sample")
    seq_length_schedule: str | None = option(
        None,
        'sequence lengths by training tokens: "0: 512; 1e9: 2048; 5e9: 4096"; each divides --seq-length, and '
        "samples are split into sequences of that length",
        family_kind="decoder",
        elsewhere="T5 and BERT build and mask each sample at its full length, which cannot be split; remove it",
        shown_default="--seq-length in every step",
    )
    seq_length_curriculum: str | None = option(
        None,
        "DeepSpeed's curriculum (curriculum_learning in its JSON), which truncates the samples of a step to a length "
        "that follows the step number and drops the tokens after it: schedule_type and key=value pairs, such as "
        "fixed_linear min_difficulty=64 max_difficulty=2048 total_curriculum_step=1000 difficulty_step=8",
        family_kind="decoder",
        elsewhere="T5 and BERT build and mask each sample at its full length, which cannot be truncated; remove it",
        join=" ".join,
        shown_default="--seq-length in every step",
    )
    train_iters: int = option(
        200, "number of optimizer steps of the run; 0: evaluate and save only", minimum=0, short="optimizer steps"
    )
    iterations_to_skip: str | None = option(
        None,
        "steps without an update: numbers and ranges such as 5 101-200. Their samples count as consumed, and the "
        "schedule of --lr does not advance",
        join=" ".join,
        aliases=("--skip-train-iteration-range",),
        shown_default="none",
    )
    eval_iters: int = option(
        10, "number of steps of an evaluation; 0: no evaluation", minimum=0, short="steps of an evaluation"
    )
    eval_interval: int = option(
        100, "steps between evaluations; 0: never", minimum=0, short="steps between evaluations"
    )
    train_samples: int | None = None
    """--train-samples; ``train_iters`` is then the number of steps of a new run with this global batch."""
    train_tokens: int | None = None
    """--train-tokens; ``train_iters`` has the same meaning as for ``train_samples``."""
    requested_train_iters: int | None = None
    """--train-iters if it was given together with --train-tokens."""

    def __post_init__(self) -> None:
        if not self.gas:
            object.__setattr__(self, "gas", 1)

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size

    @property
    def num_micro_batches(self) -> int:
        return self.gas

    @property
    def has_growing_batch(self) -> bool:
        """True if the global batch grows during the run."""
        return self.rampup_batch_size is not None or self.step_batch_size_schedule is not None

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Count samples per step over all replicas; with a batch ramp-up, after the ramp."""
        full, requested = self.batch_size * self.gas * data_parallel_size, self.requested_global_batch_size
        return requested if 0 < full - requested < self.batch_size * data_parallel_size else full

    def share(self, data_parallel_size: int, replica: int, *, is_interleaved: bool = False) -> Share:
        """Compute a replica's share of a step; with a batch ramp-up, after the ramp. See ``share_of``."""
        num_micro_batches = self.global_batch_size(data_parallel_size) // self.batch_size
        return share_of(num_micro_batches, data_parallel_size, replica, is_interleaved=is_interleaved)

    def describe_gas(self, data_parallel_size: int) -> str:
        """Describe a replica's micro-batches: "4", or "3 or 4" if some replicas run one less."""
        least = self.share(data_parallel_size, data_parallel_size - 1).num_micro_batches
        return str(self.gas) if least == self.gas else f"{least} or {self.gas}"

    @property
    def seq_lengths(self) -> SeqLengths:
        """Sequence length of each step.

        Raises:
            ValueError: --seq-length-schedule or --seq-length-curriculum is invalid.
        """
        if self.seq_length_curriculum is not None:
            return SeqLengths(self.seq_length, curriculum=curriculum_phases(self.seq_length_curriculum))
        schedule = self.seq_length_schedule
        return SeqLengths(self.seq_length, () if schedule is None else parse_lengths(schedule))

    def batch_sizes(self, data_parallel_size: int) -> BatchSizes:
        """Compute samples per step, over all replicas, as a function of the samples consumed.

        Raises:
            ValueError: --rampup-batch-size or --step-batch-size-schedule is invalid or does not reach the global
                batch.
        """
        full = self.global_batch_size(data_parallel_size)
        if self.step_batch_size_schedule is not None:
            return parse_schedule(self.step_batch_size_schedule, full, self.seq_length)
        if self.rampup_batch_size is None:
            return BatchSizes(full)
        return parse_rampup(self.rampup_batch_size, full)

    @property
    def skipped_steps(self) -> SkippedSteps:
        """Steps that --iterations-to-skip skips.

        Raises:
            ValueError: --iterations-to-skip is invalid.
        """
        return SkippedSteps.parse(self.iterations_to_skip or "")

    def problems(self) -> Iterator[str]:
        """Yield an error message for each malformed value in this section."""
        try:
            _ = self.skipped_steps
        except ValueError:
            yield (
                "--iterations-to-skip must be step numbers of at least 1 or ranges, separated by spaces, got "
                f"{self.iterations_to_skip!r}. Write it as 5 101-200"
            )

    def run_length(self, data_parallel_size: int, tokens_per_sample: int) -> RunLength:
        """Compute the run limits.

        Args:
            tokens_per_sample: tokens per sample that --train-tokens counts.
        """
        batch_sizes = self.batch_sizes(data_parallel_size)
        if self.train_samples is None and self.train_tokens is None:
            return RunLength(batch_sizes, self.train_iters)
        tokens, lengths = self.train_tokens, self.seq_lengths
        min_samples = None if tokens is None or lengths.truncates else -(-tokens // tokens_per_sample)
        samples = self.train_samples
        if samples is not None and self.step_batch_size_schedule is not None:  # the last step may exceed the samples
            min_samples = samples if min_samples is None else min(samples, min_samples)
            samples = None
        trained_tokens = tokens if lengths.truncates else None
        return RunLength(batch_sizes, self.requested_train_iters, samples, min_samples, trained_tokens, lengths)
