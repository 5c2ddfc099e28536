"""Over NCCL each pair of stages has channels of its own, opened in one order. Here gloo stands in for it.

The stand-in: the first operation of a pair in a group holds the host until the other side comes with its own first.
"""

from __future__ import annotations

import functools
import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tds import channels
from tds.schedule import Kind
from tests.harness import fork_ranks, run_ranks
from tests.tds.toys import Toy, check_equal, make_engine, train

ALONE_S = 1.5


def _meet_first(operation: Any, met: set[Any]) -> Any:
    """Let the first ``operation`` of each pair in each group wait for the other side, as NCCL does."""

    @functools.wraps(operation)
    def started(tensor: torch.Tensor, other: int, group: Any = None, tag: int = 0) -> Any:
        own = dist.get_rank()
        key = f"{group.group_name}/{min(own, other)}-{max(own, other)}"
        if tag != int(Kind.HEADER) and key not in met:
            met.add(key)
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{key}/{own}", "here")
            store.wait([f"{key}/{other}"], timedelta(seconds=ALONE_S))
        return operation(tensor, other, group=group, tag=tag)

    return started


def _like_nccl(rank: int, toy: Toy, num_stages: int, opens: bool) -> Any:
    channels.NEEDS_PAIRS = ("gloo",)
    if not opens:
        channels.open_channels = lambda *_: None
    met: set[Any] = set()
    for name in ("isend", "irecv", "send", "recv"):
        setattr(dist, name, _meet_first(getattr(dist, name), met))
    return train(make_engine(toy, num_stages), toy)


@pytest.mark.parametrize(("ranks", "num_stages"), [(2, 2), (4, 4), (4, 2)])
def test_channels_that_block_at_first_use_are_opened_before(ranks: int, num_stages: int) -> None:
    toy = Toy("many")
    check_equal(run_ranks(ranks, _like_nccl, toy, num_stages, True), toy, ranks // num_stages, tolerance=1e-12)


def test_without_opening_them_the_first_step_would_stand_still() -> None:
    codes, _, reports = fork_ranks(2, _like_nccl, Toy("chain"), 2, False)
    assert codes == [1, 1]
    assert "stage 0 lost stage 1 (rank 1) while irecv the gradient of micro-batch 0: Wait timeout" in reports[0]


def _groups(rank: int) -> dict[Any, list[int]]:
    channels.NEEDS_PAIRS = ("gloo",)
    engine = make_engine(Toy("chain"), 3)
    groups = engine._stage.exchange.links.groups
    assert len({group.group_name for group in groups.values()}) == (3 if rank in (0, 2) else 5)
    return {key: dist.get_process_group_ranks(group) for key, group in groups.items()}


def test_each_pair_has_a_group_for_each_kind_so_that_no_send_waits_behind_a_receive() -> None:
    first, middle, _ = run_ranks(3, _groups)
    assert first == {(Kind.ACTIVATION, 1): [0, 1], (Kind.GRADIENT, 1): [0, 1], (Kind.HEADER, 1): [0, 1, 2]}
    assert middle[Kind.GRADIENT, 2] == [1, 2] and middle[Kind.ACTIVATION, 0] == [0, 1]


def test_gloo_is_refused_for_a_pipeline_on_gpus() -> None:
    with pytest.raises(ValueError, match="a pipeline on GPUs needs nccl.*--distributed-backend gloo with 2 stages"):
        channels.refuse_host_backend("gloo", 2, torch.device("cuda", 0))
    channels.refuse_host_backend("gloo", 1, torch.device("cuda", 0))
    channels.refuse_host_backend("nccl", 2, torch.device("cuda", 0))


def test_one_queue_for_the_gpu_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channels, "_has_warned", False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    channels.warn_of_one_queue(2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    channels.warn_of_one_queue(1)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "tds"):
        channels.warn_of_one_queue(2)
        channels.warn_of_one_queue(2)
    assert [r.message.split("=")[0] for r in caplog.records] == ["CUDA_DEVICE_MAX_CONNECTIONS"]
