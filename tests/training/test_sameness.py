"""Ranks that run something else are told before the first step, in one table (rows I05 and I06)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pretrain_gpt2
from megatron import accelerators, device
from megatron.accelerators import ALL_OFF, PARTS, Adaptor
from megatron.errors import ConfigError
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.topology import Topology
from megatron.runtime.exit_guard import is_raised_on_all_ranks
from megatron.training import initialize, rank_consistency
from tests.helpers.harness import run_ranks
from tests.helpers.runs import launch_script, make_flags, parse_script_config


def inject_on_rank_1(inject_fault: Callable[[], None]) -> Callable[[int], None]:
    return lambda rank: inject_fault() if rank == 1 else None


def change_code() -> None:
    os.environ["LOCAL_RANK"] = "0"  # as on a node of its own
    rank_consistency.code_checksum = lambda root=None, script=None: 0  # type: ignore[assignment]
    rank_consistency.git_commit = lambda root: "0123abc"  # type: ignore[assignment]


def change_torch_version() -> None:
    original_version = rank_consistency._package_version
    rank_consistency._package_version = lambda name: "1.0" if name == "torch" else original_version(name)


def change_min_lr() -> None:
    os.environ["MEGATRON_DEFAULTS"] = "--min-lr 1e-9"


def change_environment() -> None:
    os.environ["NCCL_ALGO"] = "Tree"
    os.environ["MEGATRON_ACCELERATOR"] = "math"


@pytest.mark.parametrize(
    ("inject_fault", "expected_texts"),
    [
        (change_code, ("code: crc ", "crc 00000000 on rank 1", "code: git commit: ", "0123abc on rank 1")),
        (change_torch_version, ("version: torch: ", "1.0 on rank 1")),
        (change_min_lr, ("arguments: optimizer.min_lr: ", "1e-09 on rank 1")),
        (
            change_environment,
            (
                "environment: NCCL_ALGO: unset on rank 0; Tree on rank 1",
                "environment: MEGATRON_ACCELERATOR: unset on rank 0; math on rank 1",
            ),
        ),
    ],
    ids=["code", "torch", "arguments", "environment"],
)
def test_rank_difference_exits_all_ranks_with_code_2_and_table(
    inject_fault, expected_texts, corpus: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert launch_script(2, make_flags(corpus, tmp_path / "run"), log, inject_on_rank_1(inject_fault)) == [2, 2]
    text = log.read_text()
    assert all(expected_text in text for expected_text in expected_texts), text
    assert text.count("all ranks must run the same code") == 1
    assert "Traceback" not in text


def test_plugin_patch_variables_are_compared():
    switches = {Adaptor(part, "", ()).switch for part in PARTS}
    assert {ALL_OFF, accelerators.VARIABLE, *switches} <= set(rank_consistency.VARIABLES)


def test_differences_list_ranks_as_ranges():
    same, changed = {"a": "1"}, {"a": "2"}
    assert list(rank_consistency.differences([same, changed, changed, same, changed])) == [
        "a: 1 on rank 0, 3; 2 on rank 1-2, 4"
    ]


def test_missing_code_checksum_is_not_a_difference():
    assert list(rank_consistency.differences([{"code": "x"}, {}, {"code": "x"}])) == []


def test_git_commit_is_read_from_git_files(tmp_path):
    assert rank_consistency.git_commit(tmp_path) == "unknown"
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git/packed-refs").write_text("# pack-refs\nabc refs/heads/main\n")
    assert rank_consistency.git_commit(tmp_path) == "abc"
    (tmp_path / ".git/refs/heads/main").write_text("def\n")
    assert rank_consistency.git_commit(tmp_path) == "def"


def test_rank_death_during_group_setup_exits_other_ranks(corpus, tmp_path) -> None:
    """Row I09."""

    def inject_fault(rank: int) -> None:
        original_touch = initialize._test_groups
        initialize._test_groups = lambda *args: os._exit(9) if rank == 3 else original_touch(*args)  # type: ignore[assignment]

    argv = make_flags(corpus, tmp_path / "run", "--model-parallel-size 2 --pipe-parallel-size 2")
    assert launch_script(4, argv, tmp_path / "log", inject_fault) == [4, 4, 4, 9]
    assert (tmp_path / "log").read_text().count("exiting") == 3


def test_shared_gpu_error_names_device_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for three GPUs of two hosts, of which the first two ranks have the same one."""
    rank_devices = [("a", 0, "unset"), ("a", 0, "0"), ("a", 1, "0,1"), ("b", 0, "0")]

    gpu_models = ["H200, 132 multiprocessors"] * 4

    def compare(rank: int, backend: str = "nccl", tensor_size: int = 1) -> str | None:
        host, device_idx, visible_devices = rank_devices[rank]
        os.environ["LOCAL_RANK"] = str(device_idx)
        if visible_devices != "unset":
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        rank_consistency.gethostname = lambda: host
        rank_consistency.identity = lambda torch_device: f"GPU-{torch_device.index}"
        rank_consistency.device.model_name = lambda torch_device: gpu_models[rank]  # type: ignore[assignment]
        rank_consistency.dist.get_backend = lambda: backend  # type: ignore[assignment]
        grid = build_grid(Topology.from_world_size(4, tensor=tensor_size, pipe=1), rank)
        try:
            rank_consistency.compare_devices(torch.device("cuda", device_idx), grid)
        except ConfigError as error:
            assert is_raised_on_all_ranks(error)
            return str(error)
        return None

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    messages = run_ranks(4, compare)
    assert len(set(messages)) == 1 and messages[0] is not None
    assert (
        "GPU-0 of a: rank 0 (LOCAL_RANK=0, CUDA_VISIBLE_DEVICES=unset); rank 1 (LOCAL_RANK=0, CUDA_VISIBLE_DEVICES=0)"
    ) in messages[0]
    assert "rank 2" not in messages[0] and "rank 3" not in messages[0] and "a distinct LOCAL_RANK" in messages[0]
    assert run_ranks(4, compare, "host_copies") == [None] * 4, "what goes through the host may share"
    rank_devices[1] = ("a", 2, "0,1,2")
    assert run_ranks(4, compare) == [None] * 4
    gpu_models[2:] = ["H100, 114 multiprocessors"] * 2
    assert run_ranks(4, compare, "nccl", 2) == [None] * 4, "replicas may differ"
    gpu_models[2] = gpu_models[0]
    model_messages = run_ranks(4, compare, "nccl", 2)
    assert len(set(model_messages)) == 1 and model_messages[0] is not None
    assert "H100, 114 multiprocessors on rank 3; H200, 132 multiprocessors on rank 0-2" in model_messages[0]
    assert "would diverge (ranks 2-3)" in model_messages[0]


def test_devices_are_compared_before_nccl_setup(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(initialize, "compare_devices", lambda *_: calls.append("devices"))
    monkeypatch.setattr(initialize, "_test_groups", lambda *_: calls.append("nccl"))
    monkeypatch.setattr(initialize, "_init_process_group", lambda *_: None)
    monkeypatch.setattr(initialize, "initialize_model_parallel", lambda *_, **__: single_grid())
    monkeypatch.setattr(device, "seed", lambda _: None)
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    initialize.start(parse_script_config(pretrain_gpt2, make_flags(corpus, tmp_path), 1))
    assert calls == ["devices", "nccl"]
