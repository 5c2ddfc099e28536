"""Runs whose tokens, checkpoints and exports lie in an object store are those of the disk, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import remote
from megatron.training.run_folder import saved_in
from tests.helpers.fake_store import needs_moto, s3
from tests.helpers.runs import flags, train_ranks, write_corpus

STEPS = "--train-iters 6 --save-interval 2 --seq-length 16 --eval-iters 0"


def losses(run: Path) -> list[tuple[int, str]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], float(row["loss"]).hex()) for row in map(json.loads, lines) if "loss" in row]


def test_a_run_goes_on_from_a_store_alone(tmp_path: Path) -> None:
    """The second start has neither token files nor checkpoints on its disk; a run of something else is refused."""
    store, corpus = f"file://{tmp_path}/bucket/run", write_corpus(tmp_path)
    given = f"--train-iters 2 --eval-iters 0 --seq-length 16 --save-remote {store} --data-cache-path {tmp_path}/cache"
    data: Any = f"file://{corpus}"
    assert train_ranks(1, flags(data, tmp_path / "first", f"{given} --exit-interval 1"))[0] == [75]
    shutil.rmtree(tmp_path / "first")
    assert train_ranks(1, flags(data, tmp_path / "second", f"{given} --load {store}"))[0] == [0]
    assert [step for step, _ in losses(tmp_path / "second")] == [2]
    assert [one.step for one in remote.find(store)] == [2, 1]
    assert sorted(path.name for path in saved_in(tmp_path / "second")) == ["step-00000001", "step-00000002"]
    with pytest.raises(AssertionError, match="--save-remote must be empty or hold this run, got .* with step-00000002"):
        train_ranks(1, flags(data, tmp_path / "third", given))


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
