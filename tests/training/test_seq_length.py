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
from tests.helpers.runs import flags, start_script, train_ranks
from tests.training.test_resume import assert_same_checkpoint, losses

GROWS = "--seq-length-schedule 0:8;256:16;640:32"  # a step is 4 samples of 32 tokens: 8, 8, 16, 16, 16, 32 ...
SHORT = f"--train-iters 7 {GROWS} --hidden-dropout 0.1 --reset-attention-mask --reset-position-ids --eval-interval 2"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_stops_in_mid_schedule_goes_on_with_its_bits(ranks: int, corpus: Path, tmp_path: Path) -> None:
    """Stopped between two switches; what goes on reads ahead by a process, which changes no bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    layout = "--pipe-parallel-size 2" if ranks > 1 else ""
    assert train_ranks(ranks, flags(corpus, whole, f"{SHORT} {layout}"))[0] == [0] * ranks
    assert train_ranks(ranks, flags(corpus, cut, f"{SHORT} {layout} --exit-interval 4"))[0] == [75] * ranks
    saved = open_latest(cut / CHECKPOINTS, SINGLE).metadata["progress"]
    assert saved == {"step": 4, "updates": 4, "samples_consumed": 16, "samples_skipped": 0, "tokens_consumed": 16 * 32}
    again = flags(corpus, cut, f"{SHORT} {layout} --num-workers 1 --load {cut}")
    assert train_ranks(ranks, again)[0] == [0] * ranks
    assert losses(cut) == losses(whole)
    assert_same_checkpoint(whole, cut)
    for folder in (whole, cut):
        steps = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
        assert [record["seq_length"] for record in steps] == [8, 8, 16, 16, 16, 32, 32]
        assert [record["tokens"] for record in steps] == [128 * step for step in range(1, 8)]
    evaluated = [
        [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "valid"]
        for folder in (whole, cut)
    ]
    assert len(evaluated[0]) == 3 and evaluated[0] == evaluated[1]


def test_another_length_goes_on_at_the_same_token_where_it_is_allowed(corpus: Path, tmp_path: Path) -> None:
    """12 samples of 32 tokens are 24 of 16; the schedule of now holds, and is warned of."""
    first, log = tmp_path / "first", tmp_path / "log"
    assert train_ranks(1, flags(corpus, first, "--train-iters 3 --eval-iters 0"))[0] == [0]
    other = flags(corpus, first, "--train-iters 4 --eval-iters 0 --seq-length 16 --seq-length-schedule 0:8;384:16")
    folder = tmp_path / "run"
    shutil.copytree(first, folder)
    assert start_script(1, [*other, "--load", str(folder)], log) == [3]
    assert "--allow-data-change" in log.read_text()
    assert start_script(1, [*other, "--save", str(folder), "--load", str(folder), "--allow-data-change"], log) == [0]
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
