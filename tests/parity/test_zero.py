"""A tiny GPT-2 under ZeRO 1 is the one under ZeRO 0, to the bit in every step (row E07)."""

from __future__ import annotations

import pytest
import torch

from megatron.mpu.shard import Shard
from megatron.training.parity import Trace
from tests.helpers.layouts import batches, traces


def within(part: Shard, whole: Shard, tensor: torch.Tensor) -> torch.Tensor:
    """Return what lies in ``tensor``, the part ``whole``, where ``part`` lies."""
    dim = part.partition_dim
    assert dim is not None
    first = whole.start if whole.partition_dim == dim else 0
    return tensor.narrow(dim, part.start - first, part.length)


def assert_same_bits(plain: list[Trace], cut: list[Trace]) -> None:
    """Losses, norms and weights are equal; each rank holds a part of its weights only."""
    for a, b in zip(plain, cut, strict=True):
        assert a.losses == b.losses
        assert a.grad_norms == b.grad_norms
        assert a.weights.keys() == b.weights.keys()
        for name, (shard, part) in b.weights.items():
            assert torch.equal(part, within(shard, *a.weights[name])), name
        held, of = (sum(part.numel() for _, part in side.weights.values()) for side in (b, a))
        assert held < 0.6 * of


SLOW = [
    (layout, extra)
    for layout in ((1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4))
    for extra in ("--fp32", "--fp32 --clip-grad 0.5", "--bf16 --clip-grad 0.5")
    if (layout, extra) != ((1, 1, 2), "--fp32 --clip-grad 0.5")
]


@pytest.mark.slow  # tests/optim/zero/test_zero.py compares the stages in the short run
@pytest.mark.parametrize(
    ("layout", "extra"),
    [((1, 1, 2), "--fp32 --clip-grad 0.5"), *SLOW],
    ids=str,
)
def test_losses_norms_and_weights_are_those_of_stage_0(layout: tuple[int, int, int], extra: str, steps: int) -> None:
    tensor, pipe, data = layout
    micro, gas = batches(data, 2)
    plain, cut = (traces(*layout, micro, gas, f"{extra}{zero}", steps=steps) for zero in ("", " --zero-stage 1"))
    assert len(plain[0].losses) == steps and len(plain) == tensor * pipe * data
    assert_same_bits(plain, cut)
