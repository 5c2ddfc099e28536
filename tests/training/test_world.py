"""How long ranks wait for each other while the world forms."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt2
from megatron.config import Config, ParallelConfig, parse
from megatron.errors import ConfigError, PeerError, exit_code
from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.topology import Topology
from megatron.runtime.exit_guard import as_peer_error
from megatron.training import global_vars, initialize, world
from megatron.training.mock_data import mock_tokenizer
from megatron.training.setup import build_engine, make_streams
from megatron.training.timeouts import AXES
from tds.deepspeed.api import groups_of
from tests.helpers.harness import run_ranks
from tests.helpers.runs import flags, parse_as


def test_the_start_is_limited_by_the_phase_and_not_by_the_step(corpus: Path, tmp_path: Path) -> None:
    argv = flags(corpus, tmp_path, "--step-timeout 3 --phase-timeout-minutes 2")

    def timeouts(rank: int) -> list[timedelta]:
        found: list[timedelta] = []
        initialize._init_process_group = lambda *given: found.append(given[2])  # type: ignore[assignment]
        initialize.initialize_model_parallel = lambda t, p, place, timeout, *_, **__: found.append(timeout) or 1 / 0  # type: ignore
        with pytest.raises(ZeroDivisionError):
            initialize.start(parse_as(pretrain_gpt2, argv, 1))
        return found

    assert run_ranks(1, timeouts, init=False) == [[timedelta(minutes=2)] * 2]


def test_ranks_that_do_not_connect_are_told_with_the_flag_that_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("wait timeout")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(initialize, "rendezvous", lambda *_: None)
    monkeypatch.setattr(initialize.dist, "init_process_group", refuse)
    with pytest.raises(PeerError, match=r"within 120 s \(--phase-timeout-minutes\), got: wait timeout"):
        initialize._init_process_group("gloo", "cpu", timedelta(minutes=2))


def test_each_group_of_the_grid_gets_the_limit_of_each_phase() -> None:
    assert {field.name for field in fields(Grid)} - {"topology", "rank"} == set(AXES)


def test_hosts_agree_over_the_host_where_a_device_would_have_to_be_waited_for() -> None:
    def councils(rank: int) -> list[str]:
        grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
        groups = {id(grid.world): "world", id(grid.host): "host"}
        found = []
        for kind in ("cpu", "meta"):
            group, place = world.World(kind, torch.device(kind), grid, rank).decision_group
            found.append(f"{groups[id(group)]} {place}")
        return found

    assert run_ranks(2, councils) == [["world cpu", "host cpu"]] * 2


def test_whatever_nccl_cannot_do_here_before_the_ranks_have_worked_together_is_a_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = {
        "ncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 999 'unknown error'": ConfigError,
        "ncclRemoteError: A call failed.\nLast error:\nConnection closed by remote peer": dist.DistBackendError,
    }
    grid = build_grid(Topology(1, 1, 1), 0)
    grid = replace(grid, world=replace(grid.world, ranks=(0, 1), handle=object()))
    for text, kind in errors.items():

        def refuse(*_: object, text: str = text, **__: object) -> None:
            raise dist.DistBackendError(f"NCCL error in: NCCLUtils.hpp:268\n{text}")

        monkeypatch.setattr(initialize.dist, "all_reduce", refuse)
        with pytest.raises(kind) as caught:
            initialize._touch_every_group(grid, torch.device("cpu"))
        assert exit_code(as_peer_error(caught.value)) == (2 if kind is ConfigError else 4)


class Settling(Exception):
    """Where a start asks for a device."""


@pytest.mark.parametrize(
    ("extra", "said", "found"),
    [
        ("--pipe-parallel-size 2", None, "32"),
        ("--pipe-parallel-size 2", "8", "8"),
        ("", None, None),
        ("--model-parallel-size 2", None, "1"),
    ],
    ids=["a pipeline", "the user says", "no pipeline", "tensor ranks alone"],
)
def test_a_pipeline_asks_for_many_queues_ahead_of_its_device_and_tensor_ranks_for_one(
    extra: str, said: str | None, found: str | None, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configure_device(config: Config) -> str:
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == found
        assert os.environ["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True,pinned_max_round")
        raise Settling

    monkeypatch.setattr(os, "environ", {} if said is None else {"CUDA_DEVICE_MAX_CONNECTIONS": said})
    monkeypatch.setattr(initialize, "configure_device", configure_device)
    with pytest.raises(Settling):
        initialize.start(parse_as(pretrain_gpt2, flags(corpus, tmp_path, extra), 2))


@pytest.mark.parametrize(
    ("backend", "local_rank", "ranks", "found"),
    [
        ("gloo", 3, 4, ("host_copies", 1, "1", ["4 ranks share 2 cuda devices on this host"])),
        ("gloo", 1, 2, ("host_copies", 1, "1", [])),
        (None, 3, 4, ("nccl", 3, "3", [])),
        ("nccl", 3, 4, ("nccl", 3, "3", [])),
    ],
    ids=["more ranks than devices", "as many", "no backend", "nccl"],
)
def test_over_gloo_ranks_share_the_devices_of_their_host_and_send_through_it(
    backend: str | None, local_rank: int, ranks: int, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed, which takes its device by LOCAL_RANK, gets the same."""
    asked, bound, said = [], [], []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(initialize, "configure_device", lambda config: "cuda")
    monkeypatch.setattr(initialize, "check_device_fits", lambda *_: None)
    monkeypatch.setattr(initialize.device, "count", lambda kind: 2)
    monkeypatch.setattr(
        initialize.device, "bind", lambda kind, number: bound.append(number) or torch.device(kind, number)
    )
    monkeypatch.setattr(initialize.device, "seed", lambda _: None)
    monkeypatch.setattr(initialize.log, "info", said.append)
    monkeypatch.setattr(initialize, "_init_process_group", lambda *given: asked.append(given[0]))
    monkeypatch.setattr(initialize, "initialize_model_parallel", lambda *_, **__: build_grid(Topology(1, 1, 1), 0))
    monkeypatch.setattr(initialize, "check_ranks_identical", lambda *_: None)
    config = Config(parallel=ParallelConfig(device="cuda", distributed_backend=backend))
    here = initialize.start(config)
    assert (asked[0], bound[0], os.environ["LOCAL_RANK"], said) == found
    assert here.local_rank == local_rank, "the first rank of a host is still one"


SIZES = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 32 --data-path none "
    "--device cpu --fp32 --train-iters 2 --batch-size 2 --gas 2 --lr 1e-3"
)


def _groups_by_ranks(rank: int, layout: str) -> dict[tuple[int, ...], set[str]]:
    """Return the names of the groups of each set of ranks, of our grid and of DeepSpeed's, all over one backend."""
    config = parse([*SIZES.split(), *layout.split()], world_size=4).with_vocab(32)
    here = initialize.start(config)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step).engine
    ours = [getattr(here.grid, axis).handle for axis in ("tensor", "pipe", "data", "model", "world")]
    found: dict[tuple[int, ...], set[str]] = {}
    for group in [*groups_of(engine.module), *ours]:
        if group is not None and dist.get_world_size(group) > 1:
            found.setdefault(tuple(dist.get_process_group_ranks(group)), set()).add(group.group_name)
    return found


@pytest.mark.parametrize("layout", ["--pipe-parallel-size 2 --model-parallel-size 2", "--pipe-parallel-size 4"])
def test_a_set_of_ranks_has_one_group_for_our_grid_and_deepspeeds(layout: str) -> None:
    for found in run_ranks(4, _groups_by_ranks, layout):
        assert {ranks: len(names) for ranks, names in found.items()} == dict.fromkeys(found, 1)
        assert tuple(range(4)) in found


@pytest.mark.parametrize(
    ("ranks", "given", "found"), [("128", None, None), ("129", None, "1"), ("10000", "0", "0"), (None, None, None)]
)
def test_gloo_connects_as_needed_in_a_job_of_many_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, given: str | None, found: str | None
) -> None:
    for name, value in (("WORLD_SIZE", ranks), ("TORCH_GLOO_LAZY_INIT", given)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    initialize.set_lazy_connections()
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == found


def test_groups_that_connect_as_needed_do_all_that_a_run_asks_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # read by each rank, which is forked ahead of its first group

    def use(rank: int) -> list[object]:
        grid = build_grid(Topology.of_world(4, 2, 2), rank)
        number = torch.full((2,), float(rank))
        for group in (grid.tensor, grid.pipe, grid.world, grid.host):
            dist.all_reduce(number, group=group.handle)
        sent = torch.full((3,), float(rank))
        if grid.pipe.rank == 0:
            dist.send(sent, grid.pipe.ranks[1], group=grid.pipe.handle, tag=5)
        else:
            dist.recv(sent, grid.pipe.ranks[0], group=grid.pipe.handle, tag=5)
        dist.barrier(group=grid.host.handle)
        return [number[0].item(), sent[0].item(), grid.host.gather_objects(rank), grid.host.broadcast_object(rank)]

    found = run_ranks(4, use)
    assert [one[0] for one in found] == [2.0 * 6 * 16] * 4 or len({one[0] for one in found}) == 1
    assert [one[1] for one in found] == [0.0, 1.0, 0.0, 1.0]
    assert all(one[2:] == [[0, 1, 2, 3], 0] for one in found)
