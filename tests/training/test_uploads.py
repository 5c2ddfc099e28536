"""The data of a step are copied while the one before it computes; no loss, sample or error is another for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron import device
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.errors import SampleError
from megatron.mpu.groups import single_grid
from megatron.runtime import rank_status
from megatron.runtime.exit_guard import is_raised_on_all_ranks
from megatron.training.batch_iterators import TimedBatches, UploadedBatches
from megatron.training.data import RunData
from megatron.training.parity import Trace
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import VOCAB, make_flags, trace_rank
from tests.helpers.lazy_streams import CPU, simulate_uploads
from tests.helpers.t5_runs import RUNS

COPY, TAKE, WAIT = "copy", ["wait", "keep for computing"], "host waits"


def numbered_batches(num_batches: int = 100) -> Iterator[dict[str, torch.Tensor]]:
    for idx in range(num_batches):
        yield {"text": torch.tensor([idx])}
    raise SampleError("sample 3")


def batch_value(batch: Any) -> int:
    return int(batch["text"])


def test_prefetch_preserves_batches_and_reads_one() -> None:
    reads: list[int] = []
    batches = UploadedBatches((reads.append(batch_value(batch)) or batch for batch in numbered_batches()), CPU)
    assert batch_value(next(batches)) == 0 and reads == [0]
    batches.read_ahead()
    batches.read_ahead()
    assert reads == [0, 1]
    assert [batch_value(next(batches)) for _ in range(3)] == [1, 2, 3] and reads == [0, 1, 2, 3]


def test_prefetch_error_is_raised_by_next() -> None:
    batches = UploadedBatches(numbered_batches(1), CPU)
    next(batches)
    batches.read_ahead()
    batches.read_ahead()
    with pytest.raises(SampleError, match="sample 3") as error_info:
        next(batches)
    assert not is_raised_on_all_ranks(error_info.value)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("is_busy", [True, False])
def test_prefetch_on_busy_device_is_not_counted_as_wait(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 3.0, 5.0])
    monkeypatch.setattr("megatron.training.batch_iterators.time.perf_counter", lambda: next(times))
    monkeypatch.setattr(device, "is_busy", lambda torch_device: is_busy)
    batches = UploadedBatches(numbered_batches(), CPU)
    next(batches)
    batches.read_ahead()
    next(batches)
    assert batches.drain_waited_s() == (0.5 if is_busy else 2.5)


def test_prefetch_is_shown_in_rank_status_and_restores_operation() -> None:
    def recording_batches() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(2):
            operations.append(rank_status.current_operation())
            yield {}

    operations: list[str | None] = []
    batches = UploadedBatches(recording_batches(), CPU)
    rank_status.write_operation("step 3, reduction and update")
    batches.read_ahead()
    assert operations == ["step 3, reduction and update, reading ahead"]
    assert rank_status.current_operation() == "step 3, reduction and update"
    rank_status.write_operation("")


@pytest.mark.parametrize(("device_type", "expected"), [("cpu", TimedBatches), ("other", UploadedBatches)])
def test_only_accelerator_batches_are_uploaded(device_type: str, expected: type) -> None:
    config = parse(make_flags(1, 1, micro_batch_size=2, gas=2), world_size=1).with_vocab(VOCAB)
    data = RunData({"train": MockTokens(VOCAB, 4)}, None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(device, "can_pin", lambda device_type: False)
        assert type(data.batches("train", config, World(device_type, CPU, single_grid(), 0))) is expected


def run_with_log(rank: int, *call: Any) -> tuple[Trace, list[str]]:
    """Return what this rank trained with lazy streams, and what it did in which order."""
    with pytest.MonkeyPatch.context() as monkeypatch, simulate_uploads(monkeypatch) as log:
        function, *args = call
        return function(rank, *args), list(log)


def assert_equal_traces(actual: list[Trace], expected: list[Trace]) -> None:
    for trace, expected_trace in zip(actual, expected, strict=True):
        assert trace.losses == expected_trace.losses and trace.grad_norms == expected_trace.grad_norms
        assert trace.eval_losses == expected_trace.eval_losses


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_step_copies_first_batch_of_next_step_before_host_waits(num_stages: int) -> None:
    """Two steps of two micro-batches and an evaluation: every loss is that of plain copies."""
    argv = make_flags(1, num_stages, micro_batch_size=2, gas=2, extra="--fp32")
    results = run_ranks(num_stages, run_with_log, trace_rank, argv, num_stages, 2, 2)
    assert_equal_traces([trace for trace, _ in results], run_ranks(num_stages, trace_rank, argv, num_stages, 2, 2))
    first = [COPY, *TAKE, COPY, *TAKE, COPY, WAIT]
    second = [*TAKE, COPY, *TAKE, COPY, WAIT]
    evaluation = [COPY, *TAKE, COPY, *TAKE, WAIT]
    for _, log in results:
        assert log == first + second + evaluation


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_t5_losses_with_uploads_equal_plain_losses(tensor: int, pipe: int, data: int) -> None:
    world_size = tensor * pipe * data
    argv = RUNS.make_flags(tensor, pipe, micro_batch_size=2, gas=4, extra="--fp32 --reset-attention-mask")
    results = run_ranks(world_size, run_with_log, RUNS.trace_rank, argv, world_size, 3, 2, deadline_s=100.0)
    assert_equal_traces(
        [trace for trace, _ in results],
        run_ranks(world_size, RUNS.trace_rank, argv, world_size, 3, 2, deadline_s=100.0),
    )
    assert {bool(log.count(COPY)) for _, log in results} == ({True, False} if tensor == 2 else {True})
