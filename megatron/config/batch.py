"""How many samples a step takes, how long they are, and how many steps there are."""

from __future__ import annotations

from dataclasses import dataclass

from megatron import rampup
from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """``global batch = batch_size x gas x data-parallel size``; an iteration is an optimizer step in every mode."""

    batch_size: int = option(
        4, "samples of one forward pass on one replica (micro-batch)", minimum=1, aliases=("--micro-batch-size",)
    )
    gas: int = option(0, "micro-batches per step on one replica", minimum=1, shown_default="1")
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
    seq_length: int = option(256, "tokens of a sample", minimum=1)
    train_iters: int = option(200, "optimizer steps of the run; 0: no step, evaluate and save only", minimum=0)
    eval_iters: int = option(10, "steps of each evaluation; 0: no evaluation", minimum=0)
    eval_interval: int = option(100, "steps between evaluations; 0: never", minimum=0)

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
        return self.batch_size * self.gas * data_parallel_size

    def sizes(self, data_parallel_size: int) -> rampup.BatchSizes:
        """Return the samples of a step over all replicas, by samples consumed.

        Raises:
            ValueError: --rampup-batch-size cannot be read, or does not lead to the global batch.
        """
        full = self.global_batch_size(data_parallel_size)
        if self.rampup_batch_size is None:
            return rampup.BatchSizes(full)
        return rampup.parse_rampup(self.rampup_batch_size, full)
