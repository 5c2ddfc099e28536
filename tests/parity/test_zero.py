"""A tiny GPT-2 under ZeRO 1 is bitwise equal to one under ZeRO 0 in every step (row E07)."""

from __future__ import annotations

import pytest
import torch

from megatron.mpu.shard import Shard
from megatron.training.parity import Trace
from tests.helpers.layouts import split_global_batch, trace_layout


def slice_within(inner: Shard, outer: Shard, tensor: torch.Tensor) -> torch.Tensor:
    """Slice the shard ``inner`` from ``tensor``, the shard ``outer`` of the same weight."""
    dim = inner.partition_dim
    assert dim is not None
    outer_start = outer.start if outer.partition_dim == dim else 0
    return tensor.narrow(dim, inner.start - outer_start, inner.length)


def assert_same_bits(plain: list[Trace], sharded: list[Trace]) -> None:
    """Check that losses, norms and weights are equal, and that each rank stores only a shard of its weights."""
    for plain_trace, sharded_trace in zip(plain, sharded, strict=True):
        assert plain_trace.losses == sharded_trace.losses
        assert plain_trace.grad_norms == sharded_trace.grad_norms
        assert plain_trace.weights.keys() == sharded_trace.weights.keys()
        for name, (shard, local_weight) in sharded_trace.weights.items():
            assert torch.equal(local_weight, slice_within(shard, *plain_trace.weights[name])), name
        sharded_numel, full_numel = (
            sum(local_weight.numel() for _, local_weight in trace.weights.values())
            for trace in (sharded_trace, plain_trace)
        )
        assert sharded_numel < 0.6 * full_numel


SLOW_CASES = [
    (layout, extra)
    for layout in ((1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4))
    for extra in ("--fp32", "--fp32 --clip-grad 0.5", "--bf16 --clip-grad 0.5")
    if (layout, extra) != ((1, 1, 2), "--fp32 --clip-grad 0.5")
]


@pytest.mark.slow  # tests/optim/zero/test_zero.py compares the stages in the short run
@pytest.mark.parametrize(
    ("layout", "extra"),
    [((1, 1, 2), "--fp32 --clip-grad 0.5"), *SLOW_CASES],
    ids=str,
)
def test_zero_1_is_bitwise_zero_0(layout: tuple[int, int, int], extra: str, steps: int) -> None:
    tensor, pipe, data = layout
    micro, gas = split_global_batch(data, 2)
    plain, sharded = (
        trace_layout(*layout, micro, gas, f"{extra}{zero_flag}", steps=steps) for zero_flag in ("", " --zero-stage 1")
    )
    assert len(plain[0].losses) == steps and len(plain) == tensor * pipe * data
    assert_same_bits(plain, sharded)
