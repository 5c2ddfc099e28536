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
from tests.helpers.layouts import batches


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Traced runs of one family, compared with the same training in one process.

    Args:
        script: module whose ``model_provider`` and ``forward_step`` train the family.
        sizes: the command line without the layout.
        vocab: vocabulary size, a prime, so that every tensor size needs padding.
        gas: number of micro-batches per step of the reference, and the default of the other layouts.
        of_4: flags added if there are 4 tensor ranks.
        documents: flags that restrict attention to one document.
        defaults: defaults of the script.
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
        """Return the command line of a layout; ``extra`` is last and takes precedence."""
        layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --batch-size {micro} --gas {gas}"
        return [*self.sizes, *layout.split(), *extra.split()]

    def trace_rank(self, rank: int, argv: list[str], world_size: int, steps: int, eval_every: int) -> Trace:
        """Trace the training steps on one rank."""
        config = parse(argv, world_size=world_size, family=self.family, defaults=self.defaults).with_vocab(self.vocab)
        world = initialize.start(config)
        scripts = (self.script.model_provider, self.script.forward_step)
        return trace_steps(config, world, random_data(config), *scripts, steps=steps, eval_every=eval_every)

    @functools.cache  # noqa: B019 - for a session, and a family has one
    def traces(
        self, tensor: int, pipe: int, data: int, extra: str, steps: int, gas: int = 0, eval_every: int = 0,
        context: int = 1,
    ) -> list[Trace]:  # fmt: skip
        """Return each rank's trace in this layout; identical calls are run once per session."""
        micro, gas = batches(data, gas or self.gas)
        extra = extra if context == 1 else f"{extra} --context-parallel-size {context}"
        argv = self.flags(tensor, pipe, micro=micro, gas=gas, extra=extra)
        size = tensor * pipe * data * context
        return run_ranks(size, self.trace_rank, argv, size, steps, eval_every, deadline_s=100.0)

    def difference(
        self, tensor: int, pipe: int, data: int, extra: str, steps: int, schedule: str = "", gas: int = 0,
        context: int = 1,
    ) -> Difference:  # fmt: skip
        """Compare this layout with one process on the same global batches, and print the differences.

        Args:
            schedule: flags that affect this layout only.
        """
        extra = f"{extra} {self.of_4}" if tensor == 4 and self.of_4 else extra
        reference = self.traces(1, 1, 1, extra, steps)[0]
        ranks = self.traces(tensor, pipe, data, f"{extra} {schedule}", steps, gas, context=context)
        differences = compare(reference, ranks)
        print(f"tensor {tensor} pipe {pipe} data {data} context {context} {extra} {schedule}: {differences}")
        return differences

    def check_acts(self, flag: str) -> None:
        """Check that ``flag`` changes the loss; a parity test cannot detect a flag that has no effect in any layout."""
        plain, changed = (self.traces(1, 1, 1, f"--fp64 {extra}", 1)[0] for extra in ("", flag))
        assert abs(plain.losses[0] - changed.losses[0]) > 1e-6

    def check_floor(self, tensor: int, pipe: int, data: int) -> None:
        """Check that this layout in fp32 differs from one process only by rounding."""
        differences = self.difference(tensor, pipe, data, "--fp32 --clip-grad 0.5", 6)
        assert differences.first_loss <= 2e-6
        assert differences.loss <= 5e-5
        assert differences.gradient <= 3e-6, differences.worst
        assert differences.first_norm <= 1e-6
