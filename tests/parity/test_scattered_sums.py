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
from tests.helpers.layouts import batches, check_fp64, flags, serial, trace_rank

STEPS = 3


def scattered(rank: int, argv: list[str], size: int) -> Trace:
    """Train with reduce-scatters, which gloo makes of all-reduces, and evaluate after each step."""
    grad_buffer.SCATTERS = param_gather.GATHERS_LATER = True
    start = param_gather.ParamGather.start

    def spoiling(self: Any, pieces: Any, numbers: Any) -> None:
        start(self, pieces, numbers)
        assert self._due
        for piece in pieces.values():
            own = piece.partition.slice(piece.parameter, self._group.rank).clone()
            piece.parameter.fill_(float("nan"))
            piece.partition.slice(piece.parameter, self._group.rank).copy_(own)

    param_gather.ParamGather.start = spoiling  # type: ignore[method-assign]
    gradients.BUCKET_BYTES = 10_000
    return trace_rank(rank, argv, size, STEPS, 1)


def check(tensor: int, pipe: int, data: int, extra: str = "", on_pipe: str = "") -> None:
    """Compare with one process that sees the same global batches."""
    micro, gas = batches(data, 2)
    size = tensor * pipe * data
    argv = flags(tensor, pipe, micro=micro, gas=gas, extra=f"--fp64 --zero-stage 1 {extra} {on_pipe}")
    traces = run_ranks(size, scattered, argv, size, deadline_s=100.0)
    reference = serial(*batches(1, 2), f"--fp64 {extra}", eval_every=1)
    check_fp64(compare(reference, traces))
    held, whole = (sum(part.numel() for _, part in trace.gradients.values()) for trace in (traces[0], reference))
    assert 0 < held < 0.6 * whole, "each replica has its parts of the gradients alone"


@pytest.mark.slow  # stages with tied weights, below, are the quick ones
def test_one_stage_equals_one_process() -> None:
    check(1, 1, 2, "--clip-grad 0.5")


def test_stages_with_tied_weights_equal_one_process() -> None:
    check(1, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "extra", "on_pipe"),
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
def test_every_layout_equals_one_process(layout: tuple[int, int, int], extra: str, on_pipe: str) -> None:
    check(*layout, extra, on_pipe)
