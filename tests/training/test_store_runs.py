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
from megatron.training.checkpoint_source import saved_in
from megatron.training.run_folder import RunPaths, _chosen, check_store
from tests.helpers.fake_store import empty_store, intercept, needs_moto, s3
from tests.helpers.runs import flags, train_ranks, write_corpus

STEPS = "--train-iters 6 --save-interval 2 --seq-length 16 --eval-iters 0"


def losses(run: Path) -> list[tuple[int, str]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], float(row["loss"]).hex()) for row in map(json.loads, lines) if "loss" in row]


TARGET = "memory://b/run"


def save_step(folder: Path, step: int) -> Path:
    return save(folder / CHECKPOINTS, step, [TensorRecord("weights/a", torch.ones(1), Shard((1,)))], {}, SINGLE)


def upload(folder: Path, path: Path) -> None:
    uploads = Uploads(folder, TARGET, 0, 1, lambda kind, name: None)
    uploads.add(CHECKPOINTS, path)
    uploads.finish(print)
    assert uploads.close() == []


def config(**given: Any) -> Any:
    return SimpleNamespace(checkpoint=CheckpointConfig(**given))


def test_what_a_store_gives_to_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """What is downloaded, and where to; nothing that the run folder has."""
    empty_store(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint found in memory://b/run"):
        _chosen(config(load=TARGET, save="new"), "gpt2")
    assert _chosen(config(load=TARGET, save="new", load_if_exists=True), "gpt2") == RunPaths(
        Path("new"), begins_again=True
    )
    upload(tmp_path / "old", save_step(tmp_path / "old", 10))
    assert _chosen(config(load=TARGET, save="new"), "gpt2") == RunPaths(
        Path("new"), remote=TARGET, downloads=Path("new/loaded")
    )
    own = config(load=TARGET, save="new", save_remote=f"{TARGET}/")
    assert _chosen(own, "gpt2") == RunPaths(Path("new"), remote=TARGET, downloads=Path("new/checkpoints"))
    assert _chosen(config(load=TARGET, save="old", save_remote=TARGET), "gpt2") == RunPaths(Path("old"), Path("old"))
    with monkeypatch.context() as patch:
        intercept(patch, "find", refuse)
        with pytest.raises(CheckpointError, match="refuses access"):
            _chosen(own, "gpt2")


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError("Forbidden")


def test_a_store_with_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(monkeypatch)
    upload(tmp_path / "old", save_step(tmp_path / "old", 10))
    for place, flags_ in (
        (tmp_path / "old", {}),
        (tmp_path / "new", {"load": TARGET}),
        (tmp_path / "new", {"eval_only": True}),
    ):
        check_store(RunPaths(place), CheckpointConfig(save_remote=TARGET, **flags_))
    with pytest.raises(
        ConfigError, match=r"must be empty or contain this run, got memory://b/run with step-00000010 and 0"
    ):
        check_store(RunPaths(tmp_path / "new"), CheckpointConfig(save_remote=TARGET))
    intercept(monkeypatch, "pipe_file", refuse)
    with pytest.raises(ConfigError, match="--save-remote must name a writable location in an object store: .*refuses"):
        check_store(RunPaths(tmp_path / "old"), CheckpointConfig(save_remote=TARGET))


def test_names_that_stand_at_the_wrong_flag_are_told() -> None:
    problems = list(CheckpointConfig(save="s3://b/run", save_remote="runs/a").problems())
    assert "--save must be a local or shared folder that all nodes can access, got s3://b/run" in problems[0]
    assert "--save-remote must be a location in an object store such as s3://bucket/run, got runs/a" in problems[1]


def test_a_run_goes_on_from_a_store_alone(tmp_path: Path) -> None:
    """The second start has neither token files nor checkpoints on its disk."""
    store, corpus = f"file://{tmp_path}/bucket/run", write_corpus(tmp_path)
    given = f"--train-iters 2 --eval-iters 0 --seq-length 16 --save-remote {store} --data-cache-path {tmp_path}/cache"
    data: Any = f"file://{corpus}"
    assert train_ranks(1, flags(data, tmp_path / "first", f"{given} --exit-interval 1"))[0] == [75]
    shutil.rmtree(tmp_path / "first")
    assert train_ranks(1, flags(data, tmp_path / "second", f"{given} --load {store}"))[0] == [0]
    assert [step for step, _ in losses(tmp_path / "second")] == [2]
    assert [one.step for one in remote.find(store)] == [2, 1]
    assert sorted(path.name for path in saved_in(tmp_path / "second")) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
def test_a_run_from_a_store_goes_on_on_another_machine_as_one_on_the_disk(tmp_path: Path) -> None:
    """The second start has neither token files nor checkpoints on its disk."""
    corpus = write_corpus(tmp_path)
    assert train_ranks(2, flags(corpus, tmp_path / "disk", STEPS))[0] == [0, 0]
    store = f"file://{tmp_path}/bucket/run"
    given = f"{STEPS} --save-remote {store} --data-cache-path {tmp_path}/cache --keep-last 2"
    data: Any = f"file://{corpus}"
    first = flags(data, tmp_path / "first", f"{given} --exit-interval 3 --export-hf-interval 2")
    assert train_ranks(2, first)[0] == [75, 75]
    assert [one.name for one in remote.find(store)] == ["step-00000003", "step-00000002"]
    exported = tmp_path / "bucket/run/hf/step-00000002"
    assert (exported / "config.json").exists() and (exported / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "first")
    codes, _ = train_ranks(2, flags(data, tmp_path / "second", f"{given} --load {store}"))
    assert codes == [0, 0] and losses(tmp_path / "second") == losses(tmp_path / "disk")[3:]
    found = remote.find(store)
    assert [one.name for one in found] == ["step-00000006", "step-00000004"] and found[0].sequence > found[1].sequence


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_s3_is_that_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3; processes read ahead."""
    corpus = write_corpus(tmp_path)
    assert train_ranks(1, flags(corpus, tmp_path / "disk", STEPS))[0] == [0]
    with s3(monkeypatch) as files:
        for suffix in (".bin", ".idx", ".meta.json"):
            files.put_file(f"{corpus}{suffix}", f"bucket/data/texts{suffix}")
        given = f"{STEPS} --save-remote s3://bucket/run --data-cache-path {tmp_path}/cache --num-workers 1"
        data: Any = "s3://bucket/data/texts"
        first = f"{given} --exit-interval 3 --export-hf-interval 2 --async-save"
        assert train_ranks(1, flags(data, tmp_path / "first", first))[0] == [75]
        shutil.rmtree(tmp_path / "first")
        codes, _ = train_ranks(1, flags(data, tmp_path / "second", f"{given} --load s3://bucket/run"))
        assert codes == [0] and losses(tmp_path / "second") == losses(tmp_path / "disk")[3:]
        assert [one.step for one in remote.find("s3://bucket/run")] == [6, 4, 3, 2]
        assert files.exists("bucket/run/hf/step-00000002/config.json")
