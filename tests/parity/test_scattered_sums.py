"""ZeRO 1 as on NCCL, in every layout and on both engines: one process (row E09).

Sums are reduce-scattered, and updated weights come while the next forward runs; what has not come is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron.optim.gradients import buffer as grad_buffer
from megatron.optim.zero import param_gather
from megatron.training.parity import Trace, compare
from tds import gradients
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import check_fp64, make_flags, split_global_batch, trace_one_process, trace_rank

STEPS = 3


def train_scattered(rank: int, argv: list[str], size: int) -> Trace:
    """Train with reduce-scatters, which gloo makes of all-reduces, and evaluate after each step."""
    grad_buffer.USE_REDUCE_SCATTER = param_gather.DEFER_GATHER = True
    original_start = param_gather.ParamGather.start

    def start_and_poison(self: Any, weights: Any, bucket_numel: Any) -> None:
        original_start(self, weights, bucket_numel)
        assert self._pending
        for weight in weights.values():
            local_shard = weight.partition.slice(weight.parameter, self._group.rank).clone()
            weight.parameter.fill_(float("nan"))
            weight.partition.slice(weight.parameter, self._group.rank).copy_(local_shard)

    param_gather.ParamGather.start = start_and_poison  # type: ignore[method-assign]
    gradients.BUCKET_BYTES = 10_000
    return trace_rank(rank, argv, size, STEPS, 1)


def check_layout(tensor: int, pipe: int, data: int, extra: str = "", engine_flags: str = "") -> None:
    """Compare with one process that sees the same global batches."""
    micro, gas = split_global_batch(data, 2)
    size = tensor * pipe * data
    argv = make_flags(
        tensor, pipe, micro_batch_size=micro, gas=gas, extra=f"--fp64 --zero-stage 1 {extra} {engine_flags}"
    )
    traces = run_ranks(size, train_scattered, argv, size, deadline_s=100.0)
    reference = trace_one_process(*split_global_batch(1, 2), f"--fp64 {extra}", eval_every=1)
    check_fp64(compare(reference, traces))
    sharded_numel, full_numel = (
        sum(gradient.numel() for _, gradient in trace.gradients.values()) for trace in (traces[0], reference)
    )
    assert 0 < sharded_numel < 0.6 * full_numel, "each replica has its parts of the gradients alone"


@pytest.mark.slow  # stages with tied weights, below, are the quick ones
def test_single_stage_equals_single_process() -> None:
    check_layout(1, 1, 2, "--clip-grad 0.5")


def test_stages_with_tied_weights_equal_single_process() -> None:
    check_layout(1, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "extra", "engine_flags"),
    [
        ((1, 1, 4), "", ""),
        ((1, 1, 2), "--checkpoint-activations", "--offload-optimizer"),
        ((2, 1, 2), "--clip-grad 0.5", "--sequence-parallel"),
        ((2, 1, 2), "--untie-embeddings-and-output-weights", ""),
        ((1, 2, 2), "--clip-grad 0.5", "--pipeline-schedule zb-h1"),
        ((1, 2, 2), "", "--pipeline-chunks 2"),
        ((1, 2, 2), "", "--no-overlap-grad-reduce --pipeline-schedule gpipe"),
    ],
    ids=str,
)
def test_every_layout_equals_single_process(layout: tuple[int, int, int], extra: str, engine_flags: str) -> None:
    check_layout(*layout, extra, engine_flags)
