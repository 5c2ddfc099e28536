"""Recompute really runs the layers again, on every stage and for every granularity."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.models.common.transformer import MLP
from megatron.mpu.activation_storage import ActivationStorage, _Buffer
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import flags, trace_rank

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


@functools.cache
def plain_forwards(pipe: int) -> list[int]:
    return run_ranks(pipe, count_forwards, pipe, "")


@pytest.mark.parametrize(
    ("pipe", "every"), [(2, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (1, 2), (2, 1)))]
)
def test_each_layer_runs_twice_a_micro_batch(pipe: int, every: int) -> None:
    plain = plain_forwards(pipe)
    again = run_ranks(pipe, count_forwards, pipe, f"--checkpoint-activations --checkpoint-num-layers {every}")
    assert sum(plain) == STEPS * GAS * 4
    assert again == [2 * calls for calls in plain]


KEPT = "--contigious-checkpointing --checkpoint-in-cpu"
DROPPED = "--fp32 --attention-dropout 0.1 --hidden-dropout 0.1"


def traced_and_counted(
    rank: int, tensor: int, pipe: int, extra: str, gas: int = 4
) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Return losses, gradients, the bytes of this rank's buffers, and how often one had to grow."""
    keepers: list[ActivationStorage] = []
    built, blocks = ActivationStorage.__init__, []
    make = _Buffer.__init__

    def noting(self: ActivationStorage, *args: object) -> None:
        built(self, *args)  # type: ignore[arg-type]
        keepers.append(self)

    def noting_buffer(self: _Buffer, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        blocks.append(self)

    ActivationStorage.__init__, _Buffer.__init__ = noting, noting_buffer  # type: ignore[method-assign, assignment]
    size = tensor * pipe
    trace = trace_rank(rank, flags(tensor, pipe, micro=2, gas=gas, extra=extra), size, STEPS, 0)
    grown = sum(len(buffer._blocks) - 1 for buffer in blocks)
    gradients = {name: gradient for name, (_, gradient) in trace.gradients.items()}
    return trace.losses, gradients, sum(keeper.buffer_bytes() for keeper in keepers), grown


INPUT_BYTES = 16 * 2 * 32 * 4  # s b h in fp32


@pytest.mark.parametrize(
    ("pipe", "schedule", "inputs"),
    [
        (2, "", [2 * 2, 2 * 1]),
        pytest.param(2, "--pipeline-schedule gpipe", [2 * 4, 2 * 4], marks=pytest.mark.slow),
        pytest.param(2, "--pipeline-schedule zb-h1", [2 * 2, 2 * 2], marks=pytest.mark.slow),
        pytest.param(2, "--pipeline-chunks 2", [5, 3], marks=pytest.mark.slow),
        pytest.param(2, "--checkpoint-num-layers 2", [1 * 2, 1 * 1], marks=pytest.mark.slow),
        pytest.param(1, "", [4], marks=pytest.mark.slow),
    ],
)
def test_a_stage_has_one_buffer_for_its_layers_and_the_micro_batches_in_flight(
    pipe: int, schedule: str, inputs: list[int]
) -> None:
    """Two layers on each of two stages (with two chunks one in each). Of an embedding and a layer tokens are kept."""
    plain = run_ranks(pipe, traced_and_counted, 1, pipe, f"{DROPPED} {schedule if 'pipeline' in schedule else ''}")
    extra = f"{DROPPED} --checkpoint-activations {KEPT} {schedule}"
    kept = run_ranks(pipe, traced_and_counted, 1, pipe, extra)
    for one, other in zip(plain, kept, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())
    assert [each[2] // INPUT_BYTES for each in kept] == inputs
    assert [each[3] for each in kept] == [0] * pipe, "a buffer grew"


@pytest.mark.slow
def test_a_pipeline_of_two_tensor_ranks_gathers_what_each_has_kept() -> None:
    plain = run_ranks(4, traced_and_counted, 2, 2, DROPPED.replace("fp32", "fp64"))
    extra = f"{DROPPED.replace('fp32', 'fp64')} --checkpoint-activations --partition-activations {KEPT}"
    kept = run_ranks(4, traced_and_counted, 2, 2, extra)
    for one, other in zip(plain, kept, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())
    assert [each[2] // INPUT_BYTES for each in kept] == [4, 4, 2, 2], "twice as wide, half of each"
