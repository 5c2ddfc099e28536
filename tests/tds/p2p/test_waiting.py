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
SLEEPING_RANK = 1


def _init_world(rank: int, world_size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S))


def _sleep_until_others_time_out(world_size: int, folder: str) -> None:
    end = time.monotonic() + 5 * TIMEOUT_S
    while len(list(Path(folder).glob("gave-up-*"))) < world_size - 1 and time.monotonic() < end:
        time.sleep(0.05)
    raise InterruptedError


def _hang(rank: int, world_size: int, folder: str, toy: Toy, at_loss: bool) -> Any:
    _init_world(rank, world_size, folder)
    engine = make_engine(toy, world_size)
    start = time.monotonic()
    if rank == SLEEPING_RANK:
        engine.on_loss = lambda _: _sleep_until_others_time_out(world_size, folder)
        if not at_loss:
            engine.on_micro_batch = lambda index: (
                _sleep_until_others_time_out(world_size, folder) if index == 2 else None
            )
    try:
        engine.train_batch(iter(toy.make_batches()))
    except InterruptedError:
        return None
    except RuntimeError as error:
        waited_s = time.monotonic() - start
        Path(f"{folder}/gave-up-{rank}").touch()
        return waited_s, str(error)
    return "trained"


@pytest.mark.parametrize(
    ("world_size", "model", "at_loss", "expected"),
    [(3, "chain", False, "of micro-batch"), (2, "tied", True, "computing the norm of the gradients")],
)
def test_ranks_time_out_when_a_stage_sleeps(
    world_size: int, model: str, at_loss: bool, expected: str, tmp_path: Path
) -> None:
    toy = Toy(model, pipeline={"use_reentrant": False})
    results = run_ranks(world_size, _hang, world_size, str(tmp_path), toy, at_loss, init=False, deadline_s=30)
    for rank, result in enumerate(results):
        if rank != SLEEPING_RANK:
            waited_s, message = result
            assert expected in message, message
            assert waited_s < TIMEOUT_S + 3, (rank, waited_s)


def _collect_timeouts(rank: int) -> list[Any]:
    tds.init_distributed("gloo", verbose=False)
    results = []
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    for module_class in (deepspeed.PipelineModule, PipelineModule):
        toy = Toy("tied")
        module = module_class(toy.layer_specs(), topology=topology, loss_fn=toy.loss_fn, partition_method="uniform")
        if module_class is deepspeed.PipelineModule:
            make_engine(toy, 2, module=module)
        groups = list(groups_of(module))
        results.append((len(groups), {g._get_backend(torch.device("cpu")).options._timeout for g in groups}))
    return [default_timeout(), *results]


def test_all_pipeline_groups_have_default_timeout() -> None:
    expected = timedelta(seconds=GROUP_TIMEOUT_S)
    for default, *results in run_ranks(4, _collect_timeouts):
        assert default == expected
        for num_groups, timeouts in results:
            assert num_groups >= len(GRID_GROUPS) + 2 and timeouts == {expected}
