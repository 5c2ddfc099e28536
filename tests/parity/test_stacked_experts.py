"""Experts' weights in one storage: no copy of them in any layout, and the bits of separate weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron.ops import grouped, stacked_weights
from megatron.optim.zero import unit_memory
from megatron.training import setup
from megatron.training.parity import Trace
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import make_flags, split_global_batch, trace_rank
from tests.parity.test_experts import EP, RECOMPUTED, SEQUENCE_PARALLEL, UNSHARDED_EXPERTS, ZERO
from tests.parity.test_schedules import check_same_bits

MODEL = (
    "--bf16 --num-layers 2 --disable-bias-linear --clip-grad 0.5 --num-experts 4 --moe-ffn-hidden-size 32 "
    "--activation gated-silu"
)
SLOW = pytest.mark.slow


def require_view(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the view of stacked weights; raise an error where they would be copied."""
    assert stacked_weights.distance_of(weights) is not None, "the weights are not in one storage"
    return stacked_weights.stacked(weights)


def train(layout: tuple[int, int, int], extra: str) -> list[Trace]:
    tensor, pipe, data = layout
    micro, gas = split_global_batch(data, 4)
    argv = make_flags(tensor, pipe, micro_batch_size=micro, gas=gas, extra=f"{MODEL} {extra}")
    size = tensor * pipe * data
    return run_ranks(size, trace_rank, argv, size, 2, 0, deadline_s=100.0)


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ((1, 1, 2), f"{EP} 2 {ZERO} 1"),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ((1, 1, 1), ""),
                ((1, 1, 1), "--offload-optimizer"),
                ((1, 1, 2), f"{ZERO} 1 --verbose-deepspeed"),  # on DeepSpeed's engine
                ((1, 1, 2), "--optimizer muon"),
                ((1, 1, 2), f"{ZERO} 2"),
                ((1, 1, 2), f"{ZERO} 3"),
                ((1, 1, 2), f"{ZERO} 3 {RECOMPUTED}"),
                ((2, 1, 1), f"{SEQUENCE_PARALLEL} {RECOMPUTED}"),
                ((2, 1, 2), f"{EP} 2 {SEQUENCE_PARALLEL} {UNSHARDED_EXPERTS}"),
                ((1, 2, 1), f"{ZERO} 1"),
                ((1, 2, 1), "--pipeline-schedule zb-h1"),
                ((1, 2, 2), f"{EP} 2 --pipeline-schedule zb-h1 {RECOMPUTED}"),
                ((1, 2, 1), "--num-layers 4 --pipeline-chunks 2"),
            )
        ),
    ],
)
def test_stacked_weights_are_views_and_bitwise_equal(
    layout: tuple[int, int, int], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "IMPLEMENTATION", grouped.GROUPED)
    with monkeypatch.context() as separate:
        separate.setattr(setup, "stack_expert_weights", lambda module: None)
        expected = train(layout, extra)
    monkeypatch.setattr(unit_memory, "SHARES_STORAGE", True)
    monkeypatch.setattr(grouped, "stacked", require_view)
    check_same_bits(expected, train(layout, extra))
