"""Recompute really runs the layers again, on every stage and for every granularity."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.models.common.transformer import MLP
from megatron.mpu.activation_storage import ActivationStorage, _SlotBuffer
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import make_flags, trace_rank

STEPS, GAS = 2, 2


def count_forwards(rank: int, pipe: int, extra: str) -> int:
    """Train and return how often this rank ran a layer's feed-forward half."""
    calls = 0
    forward = MLP.forward

    def counting_forward(self: MLP, x: object) -> object:
        nonlocal calls
        calls += 1
        return forward(self, x)  # type: ignore[arg-type]

    MLP.forward = counting_forward  # type: ignore[method-assign, assignment]
    argv = make_flags(1, pipe, micro_batch_size=2, gas=GAS, extra=f"--fp32 {extra}")
    trace_rank(rank, argv, pipe, STEPS, 0)
    return calls


@functools.cache
def count_plain_forwards(pipe: int) -> list[int]:
    return run_ranks(pipe, count_forwards, pipe, "")


@pytest.mark.parametrize(
    ("pipe", "interval"), [(2, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (1, 2), (2, 1)))]
)
def test_recompute_runs_each_layer_twice(pipe: int, interval: int) -> None:
    plain = count_plain_forwards(pipe)
    recomputed = run_ranks(pipe, count_forwards, pipe, f"--checkpoint-activations --checkpoint-num-layers {interval}")
    assert sum(plain) == STEPS * GAS * 4
    assert recomputed == [2 * calls for calls in plain]


STORAGE_FLAGS = "--contigious-checkpointing --checkpoint-in-cpu"
DROPOUT_FLAGS = "--fp32 --attention-dropout 0.1 --hidden-dropout 0.1"


def trace_and_count_buffers(
    rank: int, tensor: int, pipe: int, extra: str, gas: int = 4
) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Return losses, gradients, the bytes of this rank's buffers, and how often one had to grow."""
    storages: list[ActivationStorage] = []
    storage_init, buffers = ActivationStorage.__init__, []
    buffer_init = _SlotBuffer.__init__

    def record_storage(self: ActivationStorage, *args: object) -> None:
        storage_init(self, *args)  # type: ignore[arg-type]
        storages.append(self)

    def record_buffer(self: _SlotBuffer, *args: object) -> None:
        buffer_init(self, *args)  # type: ignore[arg-type]
        buffers.append(self)

    ActivationStorage.__init__, _SlotBuffer.__init__ = record_storage, record_buffer  # type: ignore[method-assign, assignment]
    world_size = tensor * pipe
    trace = trace_rank(rank, make_flags(tensor, pipe, micro_batch_size=2, gas=gas, extra=extra), world_size, STEPS, 0)
    num_grown = sum(len(buffer._blocks) - 1 for buffer in buffers)
    gradients = {name: gradient for name, (_, gradient) in trace.gradients.items()}
    return trace.losses, gradients, sum(storage.buffer_bytes() for storage in storages), num_grown


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
def test_stage_stores_inputs_in_one_buffer(pipe: int, schedule: str, inputs: list[int]) -> None:
    """Two layers on each of two stages (with two chunks one in each). Of an embedding and a layer tokens are kept."""
    plain = run_ranks(
        pipe, trace_and_count_buffers, 1, pipe, f"{DROPOUT_FLAGS} {schedule if 'pipeline' in schedule else ''}"
    )
    extra = f"{DROPOUT_FLAGS} --checkpoint-activations {STORAGE_FLAGS} {schedule}"
    stored = run_ranks(pipe, trace_and_count_buffers, 1, pipe, extra)
    for expected, actual in zip(plain, stored, strict=True):
        assert expected[0] == actual[0]
        assert all(torch.equal(gradient, actual[1][name]) for name, gradient in expected[1].items())
    assert [result[2] // INPUT_BYTES for result in stored] == inputs
    assert [result[3] for result in stored] == [0] * pipe, "a buffer grew"


@pytest.mark.slow
def test_pipeline_with_tensor_ranks_gathers_partitioned_inputs() -> None:
    plain = run_ranks(4, trace_and_count_buffers, 2, 2, DROPOUT_FLAGS.replace("fp32", "fp64"))
    extra = f"{DROPOUT_FLAGS.replace('fp32', 'fp64')} --checkpoint-activations --partition-activations {STORAGE_FLAGS}"
    stored = run_ranks(4, trace_and_count_buffers, 2, 2, extra)
    for expected, actual in zip(plain, stored, strict=True):
        assert expected[0] == actual[0]
        assert all(torch.equal(gradient, actual[1][name]) for name, gradient in expected[1].items())
    assert [result[2] // INPUT_BYTES for result in stored] == [4, 4, 2, 2], "twice as wide, half of each"
