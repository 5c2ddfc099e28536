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
from tds.p2p.packed_layout import Slice
from tds.p2p.transport import StageLinks
from tds.schedule import Backward, Forward, Kind
from tds.watchdog.diagnosis import Report, on_device
from tests.helpers.harness import run_ranks
from tests.helpers.host_reads import counted
from tests.helpers.toys import Toy, make_engine

BUDGET = {"tolist in tds/loss_reduction.py:read": 1}
"""Place -> reads of one step; on every rank, whatever the number of micro-batches."""
ON_HOST = ("data_consistency.py:_gather", "communicator.py:_take_header", "message_header.py:decode_header")
"""Of what lies in the host's memory on a device too."""


def _reads(rank: int, num_stages: int, toy: Toy) -> tuple[dict[str, int], float, float]:
    engine = make_engine(toy, num_stages)
    for module in (tds.engine.engine, tds.grad_norm):
        module.is_host = lambda device: False  # type: ignore[attr-defined]
    engine.train_batch(iter(toy.batches(engine.grid.get_data_parallel_rank())))
    batches = iter(toy.batches(engine.grid.get_data_parallel_rank()))
    with counted() as found:
        loss = engine.train_batch(batches)
    own = [each for each in found if "tds/" in each and not each.endswith(ON_HOST)]
    return dict(Counter(own)), float(loss), engine.get_global_grad_norm()


@pytest.mark.parametrize(("ranks", "num_stages"), [(1, 1), (2, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_step_reads_once_and_a_micro_batch_never(ranks: int, num_stages: int) -> None:
    for micro_batches in (2, 5):
        for reads, _, norm in run_ranks(ranks, _reads, num_stages, Toy("chain", micro_batches=micro_batches, clip=0.1)):
            assert reads == BUDGET and isinstance(norm, float)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e3])
@pytest.mark.parametrize("spoilt", [None, float("nan"), float("inf")])
def test_clipping_on_a_device_is_that_of_the_host(
    max_norm: float, spoilt: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = [torch.randn(40, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    if spoilt is not None:
        gradients[1][3] = spoilt
    wanted = [gradient.clone() for gradient in gradients]
    norm = global_norm(gradients, [])
    clip(wanted, norm, max_norm)
    monkeypatch.setattr(tds.grad_norm, "is_host", lambda device: False)
    clip(gradients, norm, max_norm)
    for one, two in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=0, equal_nan=True)


class _Group:
    def __init__(self) -> None:
        self.aborted = 0

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(abort=lambda: setattr(self, "aborted", self.aborted + 1))


class _Events:
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


def _on_device(are_own: bool) -> tuple[P2PCommunicator, dict[Any, _Group]]:
    groups = {route: _Group() for route in ((Kind.ACTIVATION, 0, 1), (Kind.GRADIENT, 1, 0), (Kind.HEADER, 0, 1))}
    links = StageLinks(0, [0, 1], groups, Slice(), torch.device("meta"), are_own=are_own)
    return P2PCommunicator(links), groups


def test_behind_an_error_what_waits_on_a_device_is_aborted() -> None:
    exchange, groups = _on_device(are_own=True)
    assert exchange.abort()
    assert [group.aborted for group in groups.values()] == [1, 1, 0]
    exchange, groups = _on_device(are_own=False)
    assert not exchange.abort() and not any(group.aborted for group in groups.values())


def test_the_last_action_that_the_device_has_reached_is_told() -> None:
    exchange, _ = _on_device(are_own=True)
    clock: Any = _Events()
    exchange.clock = clock
    actions = [Forward(0), Forward(1), Backward(0)]
    exchange.begin(actions, is_training=True)
    assert exchange.action_of_device() is None
    for action in actions:
        exchange._post_for = lambda place: None  # type: ignore[method-assign]
        exchange.begin_action(action)
    clock.reached = 2
    assert exchange.action_of_device() == Forward(1)
    words = on_device(Report(True, None, 1.0, "has been adding up"), exchange.action_of_device())
    assert words.words == "has been adding up; its device runs its forward of micro-batch 1"
    assert on_device(words, None) is words
