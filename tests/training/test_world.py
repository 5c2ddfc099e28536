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
from tests.helpers.runs import make_flags, parse_script_config


def test_startup_uses_phase_timeout_instead_of_step_timeout(corpus: Path, tmp_path: Path) -> None:
    argv = make_flags(corpus, tmp_path, "--step-timeout 3 --phase-timeout-minutes 2")

    def collect_timeouts(rank: int) -> list[timedelta]:
        group_timeouts: list[timedelta] = []
        initialize._init_process_group = lambda *args: group_timeouts.append(args[2])  # type: ignore[assignment]
        initialize.initialize_model_parallel = lambda t, p, torch_device, timeout, *_, **__: (
            group_timeouts.append(timeout) or 1 / 0
        )  # type: ignore
        with pytest.raises(ZeroDivisionError):
            initialize.start(parse_script_config(pretrain_gpt2, argv, 1))
        return group_timeouts

    assert run_ranks(1, collect_timeouts, init=False) == [[timedelta(minutes=2)] * 2]


def test_connection_timeout_error_names_phase_timeout_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_timeout(*args: object, **kwargs: object) -> None:
        raise RuntimeError("wait timeout")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(initialize, "rendezvous", lambda *_: None)
    monkeypatch.setattr(initialize.dist, "init_process_group", raise_timeout)
    with pytest.raises(PeerError, match=r"within 120 s \(--phase-timeout-minutes\): wait timeout"):
        initialize._init_process_group("gloo", "cpu", timedelta(minutes=2))


def test_timeout_axes_cover_all_grid_groups() -> None:
    assert {field.name for field in fields(Grid)} - {"topology", "rank"} == set(AXES)


def test_decision_group_uses_host_for_asynchronous_device() -> None:
    def describe_decision_groups(rank: int) -> list[str]:
        grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
        groups = {id(grid.world): "world", id(grid.host): "host"}
        descriptions = []
        for device_type in ("cpu", "meta"):
            group, device = world.World(device_type, torch.device(device_type), grid, rank).decision_group
            descriptions.append(f"{groups[id(group)]} {device}")
        return descriptions

    assert run_ranks(2, describe_decision_groups) == [["world cpu", "host cpu"]] * 2


def test_local_nccl_error_before_first_collective_is_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = {
        "ncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 999 'unknown error'": ConfigError,
        "ncclRemoteError: A call failed.\nLast error:\nConnection closed by remote peer": dist.DistBackendError,
    }
    grid = build_grid(Topology(1, 1, 1), 0)
    grid = replace(grid, world=replace(grid.world, ranks=(0, 1), handle=object()))
    for text, error_type in errors.items():

        def raise_nccl_error(*_: object, text: str = text, **__: object) -> None:
            raise dist.DistBackendError(f"NCCL error in: NCCLUtils.hpp:268\n{text}")

        monkeypatch.setattr(initialize.dist, "all_reduce", raise_nccl_error)
        with pytest.raises(error_type) as error_info:
            initialize._test_groups(grid, torch.device("cpu"))
        assert exit_code(as_peer_error(error_info.value)) == (2 if error_type is ConfigError else 4)


class DeviceRequested(Exception):
    """Where a start asks for a device."""


@pytest.mark.parametrize(
    ("extra_flags", "user_value", "expected"),
    [
        ("--pipe-parallel-size 2", None, "32"),
        ("--pipe-parallel-size 2", "8", "8"),
        ("", None, None),
        ("--model-parallel-size 2", None, "1"),
    ],
    ids=["a pipeline", "the user says", "no pipeline", "tensor ranks alone"],
)
def test_pipeline_sets_device_max_connections_before_device_setup(
    extra_flags: str,
    user_value: str | None,
    expected: str | None,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def configure_device(config: Config) -> str:
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
        assert os.environ["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True,pinned_max_round")
        raise DeviceRequested

    monkeypatch.setattr(os, "environ", {} if user_value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": user_value})
    monkeypatch.setattr(initialize, "configure_device", configure_device)
    with pytest.raises(DeviceRequested):
        initialize.start(parse_script_config(pretrain_gpt2, make_flags(corpus, tmp_path, extra_flags), 2))


@pytest.mark.parametrize(
    ("backend", "local_rank", "num_ranks", "expected"),
    [
        ("gloo", 3, 4, ("host_copies", 1, "1", ["4 ranks share 2 cuda devices on this host"])),
        ("gloo", 1, 2, ("host_copies", 1, "1", [])),
        (None, 3, 4, ("nccl", 3, "3", [])),
        ("nccl", 3, 4, ("nccl", 3, "3", [])),
    ],
    ids=["more ranks than devices", "as many", "no backend", "nccl"],
)
def test_gloo_ranks_share_host_devices_with_host_copies(
    backend: str | None, local_rank: int, num_ranks: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed, which takes its device by LOCAL_RANK, gets the same."""
    backends, bound_devices, messages = [], [], []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(initialize, "configure_device", lambda config: "cuda")
    monkeypatch.setattr(initialize, "check_device_fits", lambda *_: None)
    monkeypatch.setattr(initialize.device, "num_devices", lambda device_type: 2)
    monkeypatch.setattr(
        initialize.device,
        "bind",
        lambda device_type, device_idx: bound_devices.append(device_idx) or torch.device(device_type, device_idx),
    )
    monkeypatch.setattr(initialize.device, "seed", lambda _: None)
    monkeypatch.setattr(initialize.log, "info", messages.append)
    monkeypatch.setattr(initialize, "_init_process_group", lambda *args: backends.append(args[0]))
    monkeypatch.setattr(initialize, "initialize_model_parallel", lambda *_, **__: build_grid(Topology(1, 1, 1), 0))
    monkeypatch.setattr(initialize, "check_ranks_identical", lambda *_: None)
    config = Config(parallel=ParallelConfig(device="cuda", distributed_backend=backend))
    world = initialize.start(config)
    assert (backends[0], bound_devices[0], os.environ["LOCAL_RANK"], messages) == expected
    assert world.local_rank == local_rank, "the first rank of a host is still one"


BASE_FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 32 --data-path none "
    "--device cpu --fp32 --train-iters 2 --batch-size 2 --gas 2 --lr 1e-3"
)


def _group_names_by_ranks(rank: int, layout: str) -> dict[tuple[int, ...], set[str]]:
    """Return the names of the groups of each set of ranks, of our grid and of DeepSpeed's, all over one backend."""
    config = parse([*BASE_FLAGS.split(), *layout.split()], world_size=4).with_vocab(32)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step).engine
    grid_groups = [getattr(world.grid, axis).handle for axis in ("tensor", "pipe", "data", "model", "world")]
    names_by_ranks: dict[tuple[int, ...], set[str]] = {}
    for group in [*groups_of(engine.module), *grid_groups]:
        if group is not None and dist.get_world_size(group) > 1:
            names_by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), set()).add(group.group_name)
    return names_by_ranks


@pytest.mark.parametrize("layout", ["--pipe-parallel-size 2 --model-parallel-size 2", "--pipe-parallel-size 4"])
def test_grid_and_deepspeed_share_groups_of_equal_ranks(layout: str) -> None:
    for names_by_ranks in run_ranks(4, _group_names_by_ranks, layout):
        assert {ranks: len(names) for ranks, names in names_by_ranks.items()} == dict.fromkeys(names_by_ranks, 1)
        assert tuple(range(4)) in names_by_ranks


@pytest.mark.parametrize(
    ("world_size", "user_value", "expected"),
    [("128", None, None), ("129", None, "1"), ("10000", "0", "0"), (None, None, None)],
)
def test_gloo_lazy_init_is_enabled_for_many_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None, user_value: str | None, expected: str | None
) -> None:
    for name, value in (("WORLD_SIZE", world_size), ("TORCH_GLOO_LAZY_INIT", user_value)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    initialize.set_lazy_connections()
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == expected


def test_lazy_gloo_groups_support_all_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # read by each rank, which is forked ahead of its first group

    def run_operations(rank: int) -> list[object]:
        grid = build_grid(Topology.from_world_size(4, 2, 2), rank)
        value = torch.full((2,), float(rank))
        for group in (grid.tensor, grid.pipe, grid.world, grid.host):
            dist.all_reduce(value, group=group.handle)
        message = torch.full((3,), float(rank))
        if grid.pipe.rank == 0:
            dist.send(message, grid.pipe.ranks[1], group=grid.pipe.handle, tag=5)
        else:
            dist.recv(message, grid.pipe.ranks[0], group=grid.pipe.handle, tag=5)
        dist.barrier(group=grid.host.handle)
        return [value[0].item(), message[0].item(), grid.host.gather_objects(rank), grid.host.broadcast_object(rank)]

    results = run_ranks(4, run_operations)
    assert [result[0] for result in results] == [2.0 * 6 * 16] * 4 or len({result[0] for result in results}) == 1
    assert [result[1] for result in results] == [0.0, 1.0, 0.0, 1.0]
    assert all(result[2:] == [[0, 1, 2, 3], 0] for result in results)
