"""Recompute really runs the layers again, on every stage and for every granularity."""

from __future__ import annotations

import pytest

from megatron.model.mlp import MLP
from tests.harness import run_ranks
from tests.parity.layouts import flags, trace_rank

STEPS, GAS = 2, 2


def count_forwards(rank: int, pipe: int, extra: str) -> int:
    """Train and return how often this rank ran a layer's feed-forward half."""
    calls = 0
    forward = MLP.forward

    def counting(self: MLP, x: object) -> object:
        nonlocal calls
        calls += 1
        return forward(self, x)  # type: ignore[arg-type]

    MLP.forward = counting  # type: ignore[method-assign, assignment]
    argv = flags(1, pipe, micro=2, gas=GAS, extra=f"--fp32 {extra}")
    trace_rank(rank, argv, pipe, STEPS, 0)
    return calls


@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_each_layer_runs_twice_a_micro_batch(pipe: int, every: int) -> None:
    plain = run_ranks(pipe, count_forwards, pipe, "")
    again = run_ranks(pipe, count_forwards, pipe, f"--checkpoint-activations --checkpoint-num-layers {every}")
    assert sum(plain) == STEPS * GAS * 4
    assert again == [2 * calls for calls in plain]
