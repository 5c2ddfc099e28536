"""Traces of a small model of one family in any layout, trained by its script, for the parity tests."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron.config import parse
from megatron.training import initialize
from megatron.training.mock_data import random_data
from megatron.training.parity import Difference, Trace, compare, trace_steps
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import split_global_batch


@dataclass(frozen=True, kw_only=True, eq=False)
class ParityRuns:
    """Traced runs of one family, compared with the same training in one process.

    Args:
        script: module whose ``model_provider`` and ``forward_step`` train the family.
        model_flags: the command line without the layout.
        vocab_size: vocabulary size, a prime, so that every tensor size needs padding.
        gas: number of micro-batches per step of the reference, and the default of the other layouts.
        flags_of_4_ranks: flags added if there are 4 tensor ranks.
        document_flags: flags that restrict attention to one document.
        defaults: defaults of the script.
    """

    family: str
    script: ModuleType
    model_flags: tuple[str, ...]
    vocab_size: int
    gas: int
    flags_of_4_ranks: str = ""
    document_flags: str = "--reset-attention-mask"
    defaults: Mapping[str, Any] | None = None

    def make_flags(self, tensor: int, pipe: int, *, micro_batch_size: int, gas: int, extra: str = "") -> list[str]:
        """Return the command line of a layout; ``extra`` is last and takes precedence."""
        layout = (
            f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro_batch_size} --gas {gas}"
        )
        return [*self.model_flags, *layout.split(), *extra.split()]

    def trace_rank(self, rank: int, argv: list[str], world_size: int, steps: int, eval_every: int) -> Trace:
        """Trace the training steps on one rank."""
        config = parse(argv, world_size=world_size, family=self.family, defaults=self.defaults).with_vocab(
            self.vocab_size
        )
        world = initialize.start(config)
        scripts = (self.script.model_provider, self.script.forward_step)
        return trace_steps(config, world, random_data(config), *scripts, num_steps=steps, eval_every=eval_every)

    @functools.cache  # noqa: B019 - for a session, and a family has one
    def trace_layout(
        self, tensor: int, pipe: int, data: int, extra: str, steps: int, gas: int = 0, eval_every: int = 0,
        context: int = 1,
    ) -> list[Trace]:  # fmt: skip
        """Return each rank's trace in this layout; identical calls are run once per session."""
        micro_batch_size, gas = split_global_batch(data, gas or self.gas)
        extra = extra if context == 1 else f"{extra} --context-parallel-size {context}"
        argv = self.make_flags(tensor, pipe, micro_batch_size=micro_batch_size, gas=gas, extra=extra)
        world_size = tensor * pipe * data * context
        return run_ranks(world_size, self.trace_rank, argv, world_size, steps, eval_every, deadline_s=100.0)

    def compare_layout(
        self, tensor: int, pipe: int, data: int, extra: str, steps: int, schedule: str = "", gas: int = 0,
        context: int = 1,
    ) -> Difference:  # fmt: skip
        """Compare this layout with one process on the same global batches, and print the differences.

        Args:
            schedule: flags that affect this layout only.
        """
        extra = f"{extra} {self.flags_of_4_ranks}" if tensor == 4 and self.flags_of_4_ranks else extra
        reference = self.trace_layout(1, 1, 1, extra, steps)[0]
        rank_traces = self.trace_layout(tensor, pipe, data, f"{extra} {schedule}", steps, gas, context=context)
        differences = compare(reference, rank_traces)
        print(f"tensor {tensor} pipe {pipe} data {data} context {context} {extra} {schedule}: {differences}")
        return differences

    def check_flag_changes_loss(self, flag: str) -> None:
        """Check that ``flag`` changes the loss; a parity test cannot detect a flag that has no effect in any layout.

        Some flags change the first loss only after a step: norms whose weights are all 1 are equal on either side of
        a rotation.
        """
        plain, changed = (self.trace_layout(1, 1, 1, f"--fp64 {extra}", 3)[0] for extra in ("", flag))
        assert max(abs(old - new) for old, new in zip(plain.losses, changed.losses, strict=True)) > 1e-6

    def check_fp32(self, tensor: int, pipe: int, data: int) -> None:
        """Check that this layout in fp32 differs from one process only by rounding."""
        differences = self.compare_layout(tensor, pipe, data, "--fp32 --clip-grad 0.5", 6)
        assert differences.first_loss <= 2e-6
        assert differences.loss <= 5e-5
        assert differences.gradient <= 3e-6, differences.worst_gradient
        assert differences.first_norm <= 1e-6
