"""Runs whose tokens, checkpoints and exports lie in an object store are those of the disk, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint import TensorRecord, remote, save
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.checkpoint.uploading import Uploads
from megatron.config import CheckpointConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.training.checkpoint_source import saved_checkpoints
from megatron.training.run_folder import RunPaths, _choose_paths, check_store
from tests.helpers.fake_store import intercept, make_empty_store, needs_moto, s3
from tests.helpers.runs import make_flags, train_ranks, write_corpus

RUN_FLAGS = "--train-iters 6 --save-interval 2 --seq-length 16 --eval-iters 0"


def read_losses(run_dir: Path) -> list[tuple[int, str]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], float(row["loss"]).hex()) for row in map(json.loads, lines) if "loss" in row]


STORE_URL = "memory://b/run"


def save_step(folder: Path, step: int) -> Path:
    return save(folder / CHECKPOINTS, step, [TensorRecord("weights/a", torch.ones(1), Shard((1,)))], {}, SINGLE)


def upload(folder: Path, path: Path) -> None:
    uploads = Uploads(folder, STORE_URL, 0, 1, lambda kind, name: None)
    uploads.add(CHECKPOINTS, path)
    uploads.finish(print)
    assert uploads.close() == []


def make_config(**kwargs: Any) -> Any:
    return SimpleNamespace(checkpoint=CheckpointConfig(**kwargs))


def test_start_downloads_store_checkpoint_unless_run_folder_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """What is downloaded, and where to; nothing that the run folder has."""
    make_empty_store(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint found in memory://b/run"):
        _choose_paths(make_config(load=STORE_URL, save="new"), "gpt2")
    assert _choose_paths(make_config(load=STORE_URL, save="new", load_if_exists=True), "gpt2") == RunPaths(
        Path("new"), may_start_from_scratch=True
    )
    upload(tmp_path / "old", save_step(tmp_path / "old", 10))
    assert _choose_paths(make_config(load=STORE_URL, save="new"), "gpt2") == RunPaths(
        Path("new"), remote=STORE_URL, downloads=Path("new/loaded")
    )
    same_store_config = make_config(load=STORE_URL, save="new", save_remote=f"{STORE_URL}/")
    assert _choose_paths(same_store_config, "gpt2") == RunPaths(
        Path("new"), remote=STORE_URL, downloads=Path("new/checkpoints")
    )
    assert _choose_paths(make_config(load=STORE_URL, save="old", save_remote=STORE_URL), "gpt2") == RunPaths(
        Path("old"), Path("old")
    )
    with monkeypatch.context() as context:
        intercept(context, "find", raise_forbidden)
        with pytest.raises(CheckpointError, match="denies access"):
            _choose_paths(same_store_config, "gpt2")


def raise_forbidden(*_: Any, **__: Any) -> None:
    raise PermissionError("Forbidden")


def test_store_with_other_run_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_empty_store(monkeypatch)
    upload(tmp_path / "old", save_step(tmp_path / "old", 10))
    for folder, checkpoint_flags in (
        (tmp_path / "old", {}),
        (tmp_path / "new", {"load": STORE_URL}),
        (tmp_path / "new", {"eval_only": True}),
    ):
        check_store(RunPaths(folder), CheckpointConfig(save_remote=STORE_URL, **checkpoint_flags))
    with pytest.raises(
        ConfigError, match=r"must be empty or contain this run, got memory://b/run with step-00000010 and 0"
    ):
        check_store(RunPaths(tmp_path / "new"), CheckpointConfig(save_remote=STORE_URL))
    intercept(monkeypatch, "pipe_file", raise_forbidden)
    with pytest.raises(ConfigError, match="--save-remote must name a writable location .*denies access"):
        check_store(RunPaths(tmp_path / "old"), CheckpointConfig(save_remote=STORE_URL))


def test_swapped_local_and_store_paths_are_rejected() -> None:
    problems = list(CheckpointConfig(save="s3://b/run", save_remote="runs/a").problems())
    assert "--save must be a local or shared folder that all nodes can access, got s3://b/run" in problems[0]
    assert "--save-remote must be a location in an object store such as s3://bucket/run, got runs/a" in problems[1]


def test_run_resumes_from_store_without_local_files(tmp_path: Path) -> None:
    """The second start has neither token files nor checkpoints on its disk."""
    store, corpus = f"file://{tmp_path}/bucket/run", write_corpus(tmp_path)
    common_flags = (
        f"--train-iters 2 --eval-iters 0 --seq-length 16 --save-remote {store} --data-cache-path {tmp_path}/cache"
    )
    data: Any = f"file://{corpus}"
    assert train_ranks(1, make_flags(data, tmp_path / "first", f"{common_flags} --exit-interval 1"))[0] == [75]
    shutil.rmtree(tmp_path / "first")
    assert train_ranks(1, make_flags(data, tmp_path / "second", f"{common_flags} --load {store}"))[0] == [0]
    assert [step for step, _ in read_losses(tmp_path / "second")] == [2]
    assert [checkpoint.step for checkpoint in remote.find_checkpoints(store)] == [2, 1]
    assert sorted(path.name for path in saved_checkpoints(tmp_path / "second")) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
def test_run_resumed_from_store_equals_local_run(tmp_path: Path) -> None:
    """The second start has neither token files nor checkpoints on its disk."""
    corpus = write_corpus(tmp_path)
    assert train_ranks(2, make_flags(corpus, tmp_path / "disk", RUN_FLAGS))[0] == [0, 0]
    store = f"file://{tmp_path}/bucket/run"
    common_flags = f"{RUN_FLAGS} --save-remote {store} --data-cache-path {tmp_path}/cache --keep-last 2"
    data: Any = f"file://{corpus}"
    first_argv = make_flags(data, tmp_path / "first", f"{common_flags} --exit-interval 3 --export-hf-interval 2")
    assert train_ranks(2, first_argv)[0] == [75, 75]
    assert [checkpoint.name for checkpoint in remote.find_checkpoints(store)] == ["step-00000003", "step-00000002"]
    export_dir = tmp_path / "bucket/run/hf/step-00000002"
    assert (export_dir / "config.json").exists() and (export_dir / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "first")
    codes, _ = train_ranks(2, make_flags(data, tmp_path / "second", f"{common_flags} --load {store}"))
    assert codes == [0, 0] and read_losses(tmp_path / "second") == read_losses(tmp_path / "disk")[3:]
    checkpoints = remote.find_checkpoints(store)
    assert [checkpoint.name for checkpoint in checkpoints] == ["step-00000006", "step-00000004"] and checkpoints[
        0
    ].sequence > checkpoints[1].sequence


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_run_equals_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3; processes read ahead."""
    corpus = write_corpus(tmp_path)
    assert train_ranks(1, make_flags(corpus, tmp_path / "disk", RUN_FLAGS))[0] == [0]
    with s3(monkeypatch) as filesystem:
        for suffix in (".bin", ".idx", ".meta.json"):
            filesystem.put_file(f"{corpus}{suffix}", f"bucket/data/texts{suffix}")
        common_flags = f"{RUN_FLAGS} --save-remote s3://bucket/run --data-cache-path {tmp_path}/cache --num-workers 1"
        data: Any = "s3://bucket/data/texts"
        first_flags = f"{common_flags} --exit-interval 3 --export-hf-interval 2 --async-save"
        assert train_ranks(1, make_flags(data, tmp_path / "first", first_flags))[0] == [75]
        shutil.rmtree(tmp_path / "first")
        codes, _ = train_ranks(1, make_flags(data, tmp_path / "second", f"{common_flags} --load s3://bucket/run"))
        assert codes == [0] and read_losses(tmp_path / "second") == read_losses(tmp_path / "disk")[3:]
        assert [checkpoint.step for checkpoint in remote.find_checkpoints("s3://bucket/run")] == [6, 4, 3, 2]
        assert filesystem.exists("bucket/run/hf/step-00000002/config.json")
