"""Whole runs with a curriculum: resumed in the middle, with limits and learning rates in tokens, and their audit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork

from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.mpu.groups import SINGLE
from megatron.training.audit import Audit
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import launch_script, make_flags, train_ranks
from tests.training.test_resume import assert_equal_checkpoints, read_losses

CURRICULUM = "fixed_linear min_difficulty=8 max_difficulty=32 total_curriculum_step=6 difficulty_step=4"
LENGTHS = [12, 16, 20, 24, 28, 32, 32]  # a step is 4 samples of 32 tokens
TOKENS = [4 * sum(LENGTHS[: step + 1]) for step in range(7)]
RATES = "--lr 1e-3 --lr-decay-style cosine --lr-decay-tokens 500 --lr-warmup-tokens 100 --min-lr 1e-5"
RUN_FLAGS = (
    f"--train-tokens {TOKENS[-1] - 3} {RATES} --seq-length-curriculum {CURRICULUM} --hidden-dropout 0.1 "
    "--reset-attention-mask --reset-position-ids --eval-interval 2"
)


def expected_rate(tokens: int) -> float:
    """Return Megatron's learning rate after ``tokens`` tokens."""
    if tokens <= 100:
        return 1e-3 * tokens / 100
    progress = min((tokens - 100) / 400, 1.0)
    return 1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * progress)) / 2


def train_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_stopped_during_curriculum_resumes_bitwise(num_ranks: int, corpus: Path, tmp_path: Path) -> None:
    """The resumed run reads ahead in a process; the run ends with the step that reaches --train-tokens."""
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "cut"
    layout = "--pipe-parallel-size 2" if num_ranks > 1 else ""
    flags = f"{RUN_FLAGS} {layout}"
    assert train_ranks(num_ranks, make_flags(corpus, uninterrupted, flags))[0] == [0] * num_ranks
    stopped_argv = make_flags(corpus, resumed, f"{flags} --exit-interval 3")
    assert train_ranks(num_ranks, stopped_argv)[0] == [75] * num_ranks
    saved = open_latest(resumed / CHECKPOINTS, SINGLE).metadata["progress"]
    assert saved == {
        "step": 3, "updates": 3, "samples_consumed": 12, "samples_skipped": 0, "tokens_consumed": 12 * 32,
        "tokens_dropped": 12 * 32 - TOKENS[2],
    }  # fmt: skip
    resume_argv = make_flags(corpus, resumed, f"{flags} --num-workers 1 --load {resumed}")
    assert train_ranks(num_ranks, resume_argv)[0] == [0] * num_ranks
    assert read_losses(resumed) == read_losses(uninterrupted)
    assert_equal_checkpoints(uninterrupted, resumed)
    for folder in (uninterrupted, resumed):
        records = train_records(folder)
        assert [record["seq_length"] for record in records] == LENGTHS
        assert [record["tokens"] for record in records] == TOKENS
        assert [record["learning_rate"] for record in records] == pytest.approx(
            [expected_rate(tokens) for tokens in TOKENS], rel=1e-12
        )


def test_audit_lists_tokens_after_truncation(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = f"--train-iters 6 --eval-iters 0 --seq-length-curriculum {CURRICULUM}"
    assert train_ranks(1, make_flags(corpus, folder, flags))[0] == [0]
    audit = Audit(folder)
    for step in (1, 2, 6):
        lengths = [sum(reading.length for reading in slices) for _, slices in audit.samples_of_step(step)]
        assert lengths == [LENGTHS[step - 1] + 1] * 4
    readings = [reading for _, slices in audit.samples_of_step(1) for reading in slices]
    found = list(audit.readings_of(0, readings[0].document))
    assert readings[0] in found and all(reading.position <= LENGTHS[reading.step - 1] for reading in found)


def test_changed_curriculum_is_reported(corpus: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    flags = "--eval-iters 0 --train-iters"
    assert train_ranks(1, make_flags(corpus, folder, f"{flags} 2 --seq-length-curriculum {CURRICULUM}"))[0] == [0]
    assert launch_script(1, make_flags(corpus, folder, f"{flags} 3 --load {folder}"), log) == [0]
    assert f"seq_length_curriculum: saved {CURRICULUM}, now None" in " ".join(log.read_text().split())
    saved = open_latest(folder / CHECKPOINTS, SINGLE).metadata["progress"]
    assert saved["tokens_dropped"] == 2 * 4 * 32 - TOKENS[1] and saved["samples_consumed"] == 12
