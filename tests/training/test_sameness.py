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
from megatron.runtime.exit_guard import is_same_everywhere
from megatron.training import initialize, rank_consistency
from tests.helpers.harness import run_ranks
from tests.helpers.runs import flags, parse_as, start_script


def on_rank_1(act: Callable[[], None]) -> Callable[[int], None]:
    return lambda rank: act() if rank == 1 else None


def other_code() -> None:
    os.environ["LOCAL_RANK"] = "0"  # as on a node of its own
    rank_consistency.code_checksum = lambda root=None: 0  # type: ignore[assignment]
    rank_consistency.commit = lambda root: "0123abc"  # type: ignore[assignment]


def other_torch() -> None:
    version = rank_consistency._version
    rank_consistency._version = lambda name: "1.0" if name == "torch" else version(name)


def other_rate() -> None:
    os.environ["MEGATRON_DEFAULTS"] = "--min-lr 1e-9"


def other_environment() -> None:
    os.environ["NCCL_ALGO"] = "Tree"
    os.environ["MEGATRON_ACCELERATOR"] = "math"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (other_code, ("code: crc ", "crc 00000000 on rank 1", "code: git commit: ", "0123abc on rank 1")),
        (other_torch, ("version: torch: ", "1.0 on rank 1")),
        (other_rate, ("arguments: optimizer.min_lr: ", "1e-09 on rank 1")),
        (
            other_environment,
            (
                "environment: NCCL_ALGO: unset on rank 0; Tree on rank 1",
                "environment: MEGATRON_ACCELERATOR: unset on rank 0; math on rank 1",
            ),
        ),
    ],
    ids=["code", "torch", "arguments", "environment"],
)
def test_a_rank_that_runs_something_else_ends_all_with_2_and_a_table(act, words, corpus: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert start_script(2, flags(corpus, tmp_path / "run"), log, on_rank_1(act)) == [2, 2]
    text = log.read_text()
    assert all(word in text for word in words), text
    assert text.count("all ranks must run the same code") == 1
    assert "Traceback" not in text


def test_what_brings_and_switches_patches_of_a_plug_in_is_compared():
    switches = {Adaptor(part, "", ()).switch for part in PARTS}
    assert {ALL_OFF, accelerators.VARIABLE, *switches} <= set(rank_consistency.VARIABLES)


def test_ranks_are_told_by_runs_of_their_numbers():
    same, other = {"a": "1"}, {"a": "2"}
    assert list(rank_consistency.differences([same, other, other, same, other])) == [
        "a: 1 on rank 0, 3; 2 on rank 1-2, 4"
    ]


def test_ranks_that_do_not_look_into_the_code_do_not_differ_by_it():
    assert list(rank_consistency.differences([{"code": "x"}, {}, {"code": "x"}])) == []


def test_the_commit_is_read_from_gits_files(tmp_path):
    assert rank_consistency.commit(tmp_path) == "unknown"
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git/packed-refs").write_text("# pack-refs\nabc refs/heads/main\n")
    assert rank_consistency.commit(tmp_path) == "abc"
    (tmp_path / ".git/refs/heads/main").write_text("def\n")
    assert rank_consistency.commit(tmp_path) == "def"


def test_a_rank_that_dies_ahead_of_the_first_message_of_a_group_is_an_error_and_no_hang(corpus, tmp_path) -> None:
    """Row I09."""

    def plant(rank: int) -> None:
        touch = initialize._touch_every_group
        initialize._touch_every_group = lambda *args: os._exit(9) if rank == 3 else touch(*args)  # type: ignore[assignment]

    argv = flags(corpus, tmp_path / "run", "--model-parallel-size 2 --pipe-parallel-size 2")
    assert start_script(4, argv, tmp_path / "log", plant) == [4, 4, 4, 9]
    assert (tmp_path / "log").read_text().count("exiting") == 3


def test_two_ranks_on_one_gpu_are_named_with_what_made_them_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for three GPUs of two hosts, of which the first two ranks have the same one."""
    chosen = [("a", 0, "unset"), ("a", 0, "0"), ("a", 1, "0,1"), ("b", 0, "0")]

    kinds = ["H200, 132 multiprocessors"] * 4

    def compare(rank: int, backend: str = "nccl", tensor: int = 1) -> str | None:
        host, index, visible = chosen[rank]
        os.environ["LOCAL_RANK"] = str(index)
        if visible != "unset":
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        rank_consistency.gethostname = lambda: host
        rank_consistency.identity = lambda place: f"GPU-{place.index}"
        rank_consistency.device.model_name = lambda place: kinds[rank]  # type: ignore[assignment]
        rank_consistency.dist.get_backend = lambda: backend  # type: ignore[assignment]
        grid = build_grid(Topology.of_world(4, tensor=tensor, pipe=1), rank)
        try:
            rank_consistency.compare_devices(torch.device("cuda", index), grid)
        except ConfigError as error:
            assert is_same_everywhere(error)
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
    chosen[1] = ("a", 2, "0,1,2")
    assert run_ranks(4, compare) == [None] * 4
    kinds[2:] = ["H100, 114 multiprocessors"] * 2
    assert run_ranks(4, compare, "nccl", 2) == [None] * 4, "replicas may differ"
    kinds[2] = kinds[0]
    unlike = run_ranks(4, compare, "nccl", 2)
    assert len(set(unlike)) == 1 and unlike[0] is not None
    assert "H100, 114 multiprocessors on rank 3; H200, 132 multiprocessors on rank 0-2" in unlike[0]
    assert "would diverge (ranks 2-3)" in unlike[0]


def test_a_start_compares_devices_before_nccl_sees_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(initialize, "compare_devices", lambda *_: order.append("devices"))
    monkeypatch.setattr(initialize, "_touch_every_group", lambda *_: order.append("nccl"))
    monkeypatch.setattr(initialize, "_init_process_group", lambda *_: None)
    monkeypatch.setattr(initialize, "initialize_model_parallel", lambda *_, **__: single_grid())
    monkeypatch.setattr(device, "seed", lambda _: None)
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    initialize.start(parse_as(pretrain_gpt2, flags(corpus, tmp_path), 1))
    assert order == ["devices", "nccl"]
