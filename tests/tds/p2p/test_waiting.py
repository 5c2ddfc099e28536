"""A rank that no longer answers stops the others after the default group's timeout, wherever they wait for it."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

import tds
from tds.deepspeed.api import GRID_GROUPS, groups_of
from tds.pipe import PipelineModule
from tds.torch_api import default_timeout
from tests.helpers.harness import GROUP_TIMEOUT_S, run_ranks
from tests.helpers.toys import Toy, make_engine

TIMEOUT_S = 2.0
SLEEPER = 1


def _world(rank: int, size: int, place: str) -> None:
    store = dist.FileStore(f"{place}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))


def _sleep_until_the_others_gave_up(size: int, place: str) -> None:
    end = time.monotonic() + 5 * TIMEOUT_S
    while len(list(Path(place).glob("gave-up-*"))) < size - 1 and time.monotonic() < end:
        time.sleep(0.05)
    raise InterruptedError


def _hang(rank: int, size: int, place: str, toy: Toy, at_loss: bool) -> Any:
    _world(rank, size, place)
    engine = make_engine(toy, size)
    began = time.monotonic()
    if rank == SLEEPER:
        engine.on_loss = lambda _: _sleep_until_the_others_gave_up(size, place)
        if not at_loss:
            engine.on_micro_batch = lambda index: _sleep_until_the_others_gave_up(size, place) if index == 2 else None
    try:
        engine.train_batch(iter(toy.batches()))
    except InterruptedError:
        return None
    except RuntimeError as error:
        waited = time.monotonic() - began
        Path(f"{place}/gave-up-{rank}").touch()
        return waited, str(error)
    return "trained"


@pytest.mark.parametrize(
    ("size", "kind", "at_loss", "words"),
    [(3, "chain", False, "of micro-batch"), (2, "tied", True, "computing the norm of the gradients")],
)
def test_the_others_give_up_when_a_stage_sleeps(
    size: int, kind: str, at_loss: bool, words: str, tmp_path: Path
) -> None:
    toy = Toy(kind, pipeline={"use_reentrant": False})
    results = run_ranks(size, _hang, size, str(tmp_path), toy, at_loss, init=False, deadline_s=30)
    for rank, result in enumerate(results):
        if rank != SLEEPER:
            waited, message = result
            assert words in message, message
            assert waited < TIMEOUT_S + 3, (rank, waited)


def _timeouts(rank: int) -> list[Any]:
    tds.init_distributed("gloo", verbose=False)
    results = []
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    for make in (deepspeed.PipelineModule, PipelineModule):
        toy = Toy("tied")
        module = make(toy.specs(), topology=topology, loss_fn=toy.loss_fn, partition_method="uniform")
        if make is deepspeed.PipelineModule:
            make_engine(toy, 2, module=module)
        groups = list(groups_of(module))
        results.append((len(groups), {g._get_backend(torch.device("cpu")).options._timeout for g in groups}))
    return [default_timeout(), *results]


def test_every_group_of_a_pipeline_has_the_timeout_of_the_default_group() -> None:
    wanted = timedelta(seconds=GROUP_TIMEOUT_S)
    for default, *made in run_ranks(4, _timeouts):
        assert default == wanted
        for number, timeouts in made:
            assert number >= len(GRID_GROUPS) + 2 and timeouts == {wanted}
