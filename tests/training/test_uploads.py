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
from megatron.runtime.exit_guard import is_same_everywhere
from megatron.training.batch_iterators import TimedBatches, UploadedBatches
from megatron.training.data import RunData
from megatron.training.parity import Trace
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import VOCAB, flags, trace_rank
from tests.helpers.lazy_streams import CPU, uploading
from tests.helpers.t5_runs import RUNS

COPY, TAKE, WAIT = "copy", ["wait", "keep for computing"], "host waits"


def numbered(last: int = 100) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(last):
        yield {"text": torch.tensor([number])}
    raise SampleError("sample 3")


def of(batch: Any) -> int:
    return int(batch["text"])


def test_reading_ahead_changes_nothing_of_what_is_given_and_reads_one() -> None:
    read: list[int] = []
    batches = UploadedBatches((read.append(of(each)) or each for each in numbered()), CPU)
    assert of(next(batches)) == 0 and read == [0]
    batches.read_ahead()
    batches.read_ahead()
    assert read == [0, 1]
    assert [of(next(batches)) for _ in range(3)] == [1, 2, 3] and read == [0, 1, 2, 3]


def test_an_error_of_what_is_read_ahead_is_raised_when_it_is_asked_for() -> None:
    batches = UploadedBatches(numbered(1), CPU)
    next(batches)
    batches.read_ahead()
    batches.read_ahead()
    with pytest.raises(SampleError, match="sample 3") as raised:
        next(batches)
    assert not is_same_everywhere(raised.value)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("is_busy", [True, False])
def test_reading_while_the_device_has_work_is_no_wait(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 3.0, 5.0])
    monkeypatch.setattr("megatron.training.batch_iterators.time.perf_counter", lambda: next(times))
    monkeypatch.setattr(device, "is_busy", lambda place: is_busy)
    batches = UploadedBatches(numbered(), CPU)
    next(batches)
    batches.read_ahead()
    next(batches)
    assert batches.drain_waited_s() == (0.5 if is_busy else 2.5)


def test_who_hangs_in_it_is_found_and_then_the_position_is_as_before() -> None:
    def telling() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(2):
            seen.append(rank_status.heartbeat_now())
            yield {}

    seen: list[str | None] = []
    batches = UploadedBatches(telling(), CPU)
    rank_status.heartbeat_note("step 3, reduction and update")
    batches.read_ahead()
    assert seen == ["step 3, reduction and update, reading ahead"]
    assert rank_status.heartbeat_now() == "step 3, reduction and update"
    rank_status.heartbeat_note("")


@pytest.mark.parametrize(("kind", "expected"), [("cpu", TimedBatches), ("other", UploadedBatches)])
def test_only_a_device_beside_the_cpu_has_its_data_copied(kind: str, expected: type) -> None:
    config = parse(flags(1, 1, micro=2, gas=2), world_size=1).with_vocab(VOCAB)
    data = RunData({"train": MockTokens(VOCAB, 4)}, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "can_pin", lambda kind: False)
        assert type(data.batches("train", config, World(kind, CPU, single_grid(), 0))) is expected


def logged(rank: int, *call: Any) -> tuple[Trace, list[str]]:
    """Return what this rank trained with lazy streams, and what it did in which order."""
    with pytest.MonkeyPatch.context() as patch, uploading(patch) as log:
        function, *args = call
        return function(rank, *args), list(log)


def assert_same(ours: list[Trace], plain: list[Trace]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert one.losses == other.losses and one.grad_norms == other.grad_norms
        assert one.eval_losses == other.eval_losses


@pytest.mark.parametrize("pipe", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_copies_the_first_data_of_the_next_one_before_the_host_waits(pipe: int) -> None:
    """Two steps of two micro-batches and an evaluation: every loss is that of plain copies."""
    argv = flags(1, pipe, micro=2, gas=2, extra="--fp32")
    done = run_ranks(pipe, logged, trace_rank, argv, pipe, 2, 2)
    assert_same([trace for trace, _ in done], run_ranks(pipe, trace_rank, argv, pipe, 2, 2))
    first = [COPY, *TAKE, COPY, *TAKE, COPY, WAIT]
    second = [*TAKE, COPY, *TAKE, COPY, WAIT]
    evaluation = [COPY, *TAKE, COPY, *TAKE, WAIT]
    for _, log in done:
        assert log == first + second + evaluation


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_copies_of_t5_give_the_losses_of_plain_ones(tensor: int, pipe: int, data: int) -> None:
    size = tensor * pipe * data
    argv = RUNS.flags(tensor, pipe, micro=2, gas=4, extra="--fp32 --reset-attention-mask")
    done = run_ranks(size, logged, RUNS.trace_rank, argv, size, 3, 2, deadline_s=100.0)
    assert_same([trace for trace, _ in done], run_ranks(size, RUNS.trace_rank, argv, size, 3, 2, deadline_s=100.0))
    assert {bool(log.count(COPY)) for _, log in done} == ({True, False} if tensor == 2 else {True})
