"""Traces of a small model of one family in any layout, as its script trains it, for the parity tests."""

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
from tests.helpers.layouts import batches


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """The runs of a family.

    Args:
        script: whose ``model_provider`` and ``forward_step`` train it.
        sizes: the command line but for the layout.
        vocab: a prime, padded for every tensor size.
        gas: micro-batches of a step where none are said; the reference has these.
        of_4: what 4 tensor ranks need beside.
        documents: flags that keep documents apart.
        defaults: of the script.
    """

    family: str
    script: ModuleType
    sizes: tuple[str, ...]
    vocab: int
    gas: int
    of_4: str = ""
    documents: str = "--reset-attention-mask"
    defaults: Mapping[str, Any] | None = None

    def flags(self, tensor: int, pipe: int, *, micro: int, gas: int, extra: str = "") -> list[str]:
        """Return the command line of a layout; ``extra`` comes last and wins."""
        layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro} --gas {gas}"
        return [*self.sizes, *layout.split(), *extra.split()]

    def trace_rank(self, rank: int, argv: list[str], world_size: int, steps: int, eval_every: int) -> Trace:
        """What each rank runs."""
        config = parse(argv, world_size=world_size, family=self.family, defaults=self.defaults).with_vocab(self.vocab)
        here = initialize.start(config)
        scripts = (self.script.model_provider, self.script.forward_step)
        return trace_steps(config, here, random_data(config), *scripts, steps=steps, eval_every=eval_every)

    @functools.cache  # noqa: B019 - for a session, and a family has one
    def traces(
        self, tensor: int, pipe: int, data: int, extra: str, steps: int, gas: int = 0, eval_every: int = 0,
        context: int = 1,
    ) -> list[Trace]:  # fmt: skip
        """Return each rank's trace in this layout; equal calls run once in a session."""
        micro, gas = batches(data, gas or self.gas)
        extra = extra if context == 1 else f"{extra} --context-parallel-size {context}"
        argv = self.flags(tensor, pipe, micro=micro, gas=gas, extra=extra)
        size = tensor * pipe * data * context
        return run_ranks(size, self.trace_rank, argv, size, steps, eval_every, deadline_s=100.0)

    def difference(
        self, tensor: int, pipe: int, data: int, extra: str, steps: int, schedule: str = "", gas: int = 0,
        context: int = 1,
    ) -> Difference:  # fmt: skip
        """Compare this layout with one process that sees the same global batches, and show what was observed.

        Args:
            schedule: flags that act on this layout alone.
        """
        extra = f"{extra} {self.of_4}" if tensor == 4 and self.of_4 else extra
        reference = self.traces(1, 1, 1, extra, steps)[0]
        ranks = self.traces(tensor, pipe, data, f"{extra} {schedule}", steps, gas, context=context)
        found = compare(reference, ranks)
        print(f"tensor {tensor} pipe {pipe} data {data} context {context} {extra} {schedule}: {found}")
        return found

    def check_acts(self, flag: str) -> None:
        """Check that ``flag`` changes the loss: layouts, compared with one process, would not tell if both lost it."""
        plain, changed = (self.traces(1, 1, 1, f"--fp64 {extra}", 1)[0] for extra in ("", flag))
        assert abs(plain.losses[0] - changed.losses[0]) > 1e-6

    def check_floor(self, tensor: int, pipe: int, data: int) -> None:
        """Check that fp32 differs from one process by the rounding of its sums alone."""
        found = self.difference(tensor, pipe, data, "--fp32 --clip-grad 0.5", 6)
        assert found.first_loss <= 2e-6
        assert found.loss <= 5e-5
        assert found.gradient <= 3e-6, found.worst
        assert found.first_norm <= 1e-6
