"""Runs with several chunks on each stage: what they leave behind, and that no chunk is left in a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.errors import ConfigError
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.training.callbacks import pipeline_picture
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.setup import check_chunks
from tds import plot
from tests.helpers.runs import flags, train_ranks

STEPS = 3
SHORT = f"--num-layers 4 --train-iters {STEPS} --eval-iters 0"
INTERLEAVED = "--pipe-parallel-size 2 --pipeline-chunks 2"


@pytest.fixture(scope="module")
def traced(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with chunks and a trace, which nobody named a folder for."""
    folder = tmp_path_factory.mktemp("traced")
    argv = flags(corpus, folder / "run", f"{SHORT} {INTERLEAVED} --pipeline-trace")
    assert train_ranks(2, argv)[0] == [0, 0]
    return folder


@pytest.mark.slow  # traces, bubbles and pictures: tests/tds
def test_a_run_with_a_trace_leaves_its_picture_and_writes_the_bubble_of_each_interval(traced: Path) -> None:
    records = [one for one in read_metrics(traced / "run" / "metrics.jsonl") if one["kind"] == "train"]
    assert len(records) == STEPS and all(0 < record["bubble"] < 1 for record in records)
    assert len(list((traced / "run" / "trace").glob("trace-rank*.json"))) == 2
    config = json.loads((traced / "run" / "config.json").read_text())
    assert config["parallel"]["pipeline_trace"] == str(traced / "run" / "trace")
    assert (traced / "run" / pipeline_picture.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline_picture, "TOOL", tmp_path / "draw.py")
    for code, reason in (
        ("raise SystemExit('first\\nno step is whole')", "no step is whole"),
        ("import time; time.sleep(9)", "Command .* timed out after 1.0 seconds"),
    ):
        pipeline_picture.TOOL.write_text(code)
        assert pipeline_picture.draw("traces", tmp_path, 1.0) is None
        wanted = f"warning: the pipeline trace in traces could not be drawn: {reason}\n"
        assert re.fullmatch(wanted, capsys.readouterr().err)


def test_tds_draws_no_second_picture_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_picture, "TOOL", tmp_path / "draw.py")
    monkeypatch.setattr(plot, "_drawn_elsewhere", set())
    pipeline_picture.TOOL.write_text("print('bubble     12.0 %')")
    summary = pipeline_picture.draw(str(tmp_path), tmp_path, 10.0)
    assert summary is not None and "bubble 12.0 %" in summary
    assert plot._drawn_elsewhere == {tmp_path.resolve()}


def moved(corpus: Path, source: Path, folder: Path, layout: str, world_size: int) -> Path:
    """Load ``source`` in another layout and save it again, without a step."""
    argv = flags(corpus, folder, f"{SHORT} {layout} --load {source}")
    assert train_ranks(world_size, argv)[0] == [0] * world_size
    return folder


def assert_same_tensors(one: Path, other: Path) -> None:
    """Weights and optimizer states are equal, bit for bit."""
    a, b = (open_latest(run / CHECKPOINTS, SINGLE) for run in (one, other))
    kept = {name for name in a.names() if not name.startswith("rng/")}
    assert kept == {name for name in b.names() if not name.startswith("rng/")} and len(kept) > 100
    for name in kept:
        assert a.read(name, Shard(a.shape(name))).equal(b.read(name, Shard(b.shape(name)))), name


def test_chunks_go_through_one_process_and_back_bit_for_bit(corpus: Path, traced: Path, tmp_path: Path) -> None:
    alone = moved(corpus, traced / "run", tmp_path / "alone", "", 1)
    assert_same_tensors(traced / "run", alone)
    assert_same_tensors(alone, moved(corpus, alone, tmp_path / "back", INTERLEAVED, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--pipe-parallel-size 2", 2),
        ("--pipe-parallel-size 2 --pipeline-schedule zb-h1 --partition-method uniform", 2),
        ("--pipe-parallel-size 4", 4),
        (f"{INTERLEAVED} --model-parallel-size 2", 4),
        (INTERLEAVED, 4),
    ],
)
def test_chunks_go_through_any_layout_and_back_bit_for_bit(
    layout: str, world_size: int, corpus: Path, traced: Path, tmp_path: Path
) -> None:
    there = moved(corpus, traced / "run", tmp_path / "there", layout, world_size)
    assert_same_tensors(traced / "run", there)
    assert_same_tensors(there, moved(corpus, there, tmp_path / "back", INTERLEAVED, 2))


def test_a_model_without_the_chunks_of_the_flags_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-chunks .* got 2 and 1\. Build it with tds.PipelineModule"):
        check_chunks(torch.nn.Linear(1, 1), 2)
    check_chunks(torch.nn.Linear(1, 1), 1)
