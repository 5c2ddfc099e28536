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
from tests.helpers.runs import make_flags, train_ranks

NUM_STEPS = 3
SHORT_RUN_FLAGS = f"--num-layers 4 --train-iters {NUM_STEPS} --eval-iters 0"
INTERLEAVED_FLAGS = "--pipe-parallel-size 2 --pipeline-chunks 2"


@pytest.fixture(scope="module")
def traced_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with chunks and a trace, which nobody named a folder for."""
    folder = tmp_path_factory.mktemp("traced")
    argv = make_flags(corpus, folder / "run", f"{SHORT_RUN_FLAGS} {INTERLEAVED_FLAGS} --pipeline-trace")
    assert train_ranks(2, argv)[0] == [0, 0]
    return folder


@pytest.mark.slow  # traces, bubbles and pictures: tests/tds
def test_pipeline_trace_draws_plot_and_logs_bubble(traced_run: Path) -> None:
    records = [entry for entry in read_metrics(traced_run / "run" / "metrics.jsonl") if entry["kind"] == "train"]
    assert len(records) == NUM_STEPS and all(0 < record["bubble"] < 1 for record in records)
    assert len(list((traced_run / "run" / "trace").glob("trace-rank*.json"))) == 2
    config = json.loads((traced_run / "run" / "config.json").read_text())
    assert config["parallel"]["pipeline_trace"] == str(traced_run / "run" / "trace")
    assert (traced_run / "run" / pipeline_picture.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_pipeline_plot_failure_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline_picture, "TOOL", tmp_path / "draw.py")
    for code, reason in (
        ("raise SystemExit('first\\nno step is whole')", "no step is whole"),
        ("import time; time.sleep(9)", "Command .* timed out after 1.0 seconds"),
    ):
        pipeline_picture.TOOL.write_text(code)
        assert pipeline_picture.draw_schedule("traces", tmp_path, 1.0) is None
        expected_warning = f"warning: the pipeline trace in traces could not be drawn: {reason}\n"
        assert re.fullmatch(expected_warning, capsys.readouterr().err)


def test_tds_skips_plot_that_run_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_picture, "TOOL", tmp_path / "draw.py")
    monkeypatch.setattr(plot, "_drawn_elsewhere", set())
    pipeline_picture.TOOL.write_text("print('bubble     12.0 %')")
    summary = pipeline_picture.draw_schedule(str(tmp_path), tmp_path, 10.0)
    assert summary is not None and "bubble 12.0 %" in summary
    assert plot._drawn_elsewhere == {tmp_path.resolve()}


def reshard_run(corpus: Path, source: Path, folder: Path, layout: str, world_size: int) -> Path:
    """Load ``source`` in another layout and save it again, without a step."""
    argv = make_flags(corpus, folder, f"{SHORT_RUN_FLAGS} {layout} --load {source}")
    assert train_ranks(world_size, argv)[0] == [0] * world_size
    return folder


def assert_equal_tensors(first_run: Path, second_run: Path) -> None:
    """Weights and optimizer states are equal, bit for bit."""
    first_checkpoint, second_checkpoint = (open_latest(run / CHECKPOINTS, SINGLE) for run in (first_run, second_run))
    names = {name for name in first_checkpoint.names() if not name.startswith("rng/")}
    assert names == {name for name in second_checkpoint.names() if not name.startswith("rng/")} and len(names) > 100
    for name in names:
        assert first_checkpoint.read(name, Shard(first_checkpoint.shape(name))).equal(
            second_checkpoint.read(name, Shard(second_checkpoint.shape(name)))
        ), name


def test_chunks_reshard_to_one_process_and_back_bitwise(corpus: Path, traced_run: Path, tmp_path: Path) -> None:
    single_process_run = reshard_run(corpus, traced_run / "run", tmp_path / "alone", "", 1)
    assert_equal_tensors(traced_run / "run", single_process_run)
    assert_equal_tensors(
        single_process_run, reshard_run(corpus, single_process_run, tmp_path / "back", INTERLEAVED_FLAGS, 2)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--pipe-parallel-size 2", 2),
        ("--pipe-parallel-size 2 --pipeline-schedule zb-h1 --partition-method uniform", 2),
        ("--pipe-parallel-size 4", 4),
        (f"{INTERLEAVED_FLAGS} --model-parallel-size 2", 4),
        (INTERLEAVED_FLAGS, 4),
    ],
)
def test_chunks_reshard_to_any_layout_and_back_bitwise(
    layout: str, world_size: int, corpus: Path, traced_run: Path, tmp_path: Path
) -> None:
    resharded = reshard_run(corpus, traced_run / "run", tmp_path / "there", layout, world_size)
    assert_equal_tensors(traced_run / "run", resharded)
    assert_equal_tensors(resharded, reshard_run(corpus, resharded, tmp_path / "back", INTERLEAVED_FLAGS, 2))


def test_model_without_required_chunks_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-chunks .* got 2 and 1\. Build it with tds.PipelineModule"):
        check_chunks(torch.nn.Linear(1, 1), 2)
    check_chunks(torch.nn.Linear(1, 1), 1)
