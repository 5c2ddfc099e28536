"""Host reads of a step on a device: one, where the loss is agreed on. The CPU stands in for one that has a queue."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tds.engine.engine
import tds.grad_norm
from tds.grad_norm import clip, global_norm
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.packed_layout import TensorGroup
from tds.p2p.transport import StageLinks
from tds.schedule import Backward, Forward, MessageType
from tds.watchdog.diagnosis import Report, with_device_action
from tests.helpers.harness import run_ranks
from tests.helpers.host_reads import count_waits
from tests.helpers.toys import Toy, make_engine

EXPECTED_READS = {"tolist in tds/loss_reduction.py:read": 1}
"""Place -> reads of one step; on every rank, whatever the number of micro-batches."""
HOST_MEMORY_LOCATIONS = (
    "data_consistency.py:_gather",
    "communicator.py:_receive_header",
    "message_header.py:decode_header",
)
"""Of what lies in the host's memory on a device too."""


def _count_reads(rank: int, num_stages: int, toy: Toy) -> tuple[dict[str, int], float, float]:
    engine = make_engine(toy, num_stages)
    for module in (tds.engine.engine, tds.grad_norm):
        module.is_host = lambda device: False  # type: ignore[attr-defined]
    engine.train_batch(iter(toy.make_batches(engine.grid.get_data_parallel_rank())))
    batches = iter(toy.make_batches(engine.grid.get_data_parallel_rank()))
    with count_waits() as locations:
        loss = engine.train_batch(batches)
    device_reads = [
        location for location in locations if "tds/" in location and not location.endswith(HOST_MEMORY_LOCATIONS)
    ]
    return dict(Counter(device_reads)), float(loss), engine.get_global_grad_norm()


@pytest.mark.parametrize(("ranks", "num_stages"), [(1, 1), (2, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_step_reads_device_once_regardless_of_micro_batches(ranks: int, num_stages: int) -> None:
    for micro_batches in (2, 5):
        for reads, _, norm in run_ranks(
            ranks, _count_reads, num_stages, Toy("chain", num_micro_batches=micro_batches, grad_clip=0.1)
        ):
            assert reads == EXPECTED_READS and isinstance(norm, float)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e3])
@pytest.mark.parametrize("bad_value", [None, float("nan"), float("inf")])
def test_device_clipping_equals_host_clipping(
    max_norm: float, bad_value: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = [torch.randn(40, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    if bad_value is not None:
        gradients[1][3] = bad_value
    expected = [gradient.clone() for gradient in gradients]
    norm = global_norm(gradients, [])
    clip(expected, norm, max_norm)
    monkeypatch.setattr(tds.grad_norm, "is_host", lambda device: False)
    clip(gradients, norm, max_norm)
    for actual, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, expected_gradient, rtol=1e-6, atol=0, equal_nan=True)


class _FakeGroup:
    def __init__(self) -> None:
        self.aborted = 0

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(abort=lambda: setattr(self, "aborted", self.aborted + 1))


class _FakeClock:
    """A clock whose marks are reached one after another."""

    def __init__(self) -> None:
        self.marked, self.reached = 0, 0

    def mark(self) -> int:
        self.marked += 1
        return self.marked

    def is_reached(self, mark: int) -> bool:
        return mark <= self.reached

    def free(self, marks: Any) -> None:
        list(marks)


def _make_communicator(are_own: bool) -> tuple[P2PCommunicator, dict[Any, _FakeGroup]]:
    groups = {
        route: _FakeGroup()
        for route in ((MessageType.ACTIVATION, 0, 1), (MessageType.GRADIENT, 1, 0), (MessageType.HEADER, 0, 1))
    }
    links = StageLinks(0, [0, 1], groups, TensorGroup(), torch.device("meta"), are_dedicated=are_own)
    return P2PCommunicator(links), groups


def test_abort_aborts_pending_device_groups() -> None:
    communicator, groups = _make_communicator(are_own=True)
    assert communicator.abort()
    assert [group.aborted for group in groups.values()] == [1, 1, 0]
    communicator, groups = _make_communicator(are_own=False)
    assert not communicator.abort() and not any(group.aborted for group in groups.values())


def test_last_action_reached_by_device_is_reported() -> None:
    communicator, _ = _make_communicator(are_own=True)
    clock: Any = _FakeClock()
    communicator.clock = clock
    actions = [Forward(0), Forward(1), Backward(0)]
    communicator.begin(actions, is_training=True)
    assert communicator.device_action() is None
    for action in actions:
        communicator._post_receives = lambda action_idx: None  # type: ignore[method-assign]
        communicator.begin_action(action)
    clock.reached = 2
    assert communicator.device_action() == Forward(1)
    report = with_device_action(Report(True, None, 1.0, "has been adding up"), communicator.device_action())
    assert report.words == "has been adding up; its device runs its forward of micro-batch 1"
    assert with_device_action(report, None) is report
