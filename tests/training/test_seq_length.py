"""Whole runs whose sequence length grows: stopped and gone on in mid-schedule, started anew at another length."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork

from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.mpu.groups import SINGLE
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import launch_script, make_flags, train_ranks
from tests.training.test_resume import assert_equal_checkpoints, read_losses

SCHEDULE_FLAGS = "--seq-length-schedule 0:8;256:16;640:32"  # a step is 4 samples of 32 tokens: 8, 8, 16, 16, 16, 32 ...
SHORT_RUN_FLAGS = (
    f"--train-iters 7 {SCHEDULE_FLAGS} --hidden-dropout 0.1 --reset-attention-mask --reset-position-ids "
    "--eval-interval 2"
)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_stopped_during_seq_length_schedule_resumes_bitwise(num_ranks: int, corpus: Path, tmp_path: Path) -> None:
    """Stopped between two switches; what goes on reads ahead by a process, which changes no bit."""
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "cut"
    layout = "--pipe-parallel-size 2" if num_ranks > 1 else ""
    assert (
        train_ranks(num_ranks, make_flags(corpus, uninterrupted, f"{SHORT_RUN_FLAGS} {layout}"))[0] == [0] * num_ranks
    )
    assert (
        train_ranks(num_ranks, make_flags(corpus, resumed, f"{SHORT_RUN_FLAGS} {layout} --exit-interval 4"))[0]
        == [75] * num_ranks
    )
    saved = open_latest(resumed / CHECKPOINTS, SINGLE).metadata["progress"]
    assert saved == {"step": 4, "updates": 4, "samples_consumed": 16, "samples_skipped": 0, "tokens_consumed": 16 * 32}
    resume_argv = make_flags(corpus, resumed, f"{SHORT_RUN_FLAGS} {layout} --num-workers 1 --load {resumed}")
    assert train_ranks(num_ranks, resume_argv)[0] == [0] * num_ranks
    assert read_losses(resumed) == read_losses(uninterrupted)
    assert_equal_checkpoints(uninterrupted, resumed)
    for folder in (uninterrupted, resumed):
        train_records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
        assert [record["seq_length"] for record in train_records] == [8, 8, 16, 16, 16, 32, 32]
        assert [record["tokens"] for record in train_records] == [128 * step for step in range(1, 8)]
    valid_losses = [
        [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "valid"]
        for folder in (uninterrupted, resumed)
    ]
    assert len(valid_losses[0]) == 3 and valid_losses[0] == valid_losses[1]


def test_other_seq_length_continues_at_equal_token_if_allowed(corpus: Path, tmp_path: Path) -> None:
    """12 samples of 32 tokens are 24 of 16; the schedule of now holds, and is warned of."""
    first_run, log = tmp_path / "first", tmp_path / "log"
    assert train_ranks(1, make_flags(corpus, first_run, "--train-iters 3 --eval-iters 0"))[0] == [0]
    changed_argv = make_flags(
        corpus, first_run, "--train-iters 4 --eval-iters 0 --seq-length 16 --seq-length-schedule 0:8;384:16"
    )
    folder = tmp_path / "run"
    shutil.copytree(first_run, folder)
    assert launch_script(1, [*changed_argv, "--load", str(folder)], log) == [3]
    assert "--allow-data-change" in log.read_text()
    assert launch_script(
        1, [*changed_argv, "--save", str(folder), "--load", str(folder), "--allow-data-change"], log
    ) == [0]
    text = log.read_text()
    assert "samples have 16 tokens, and 32 in the checkpoint: continuing at sample 24, the first" in text
    assert "seq_length_schedule: saved None, now 0:8;384:16" in text
    saved = open_latest(folder / CHECKPOINTS, SINGLE).metadata
    assert saved["progress"] == {
        "step": 4,
        "updates": 4,
        "samples_consumed": 28,
        "samples_skipped": 0,
        "tokens_consumed": 28 * 16,
    }
    assert list(saved["data_order"]["cursors"].values()) == [28]
