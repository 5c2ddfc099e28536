"""Runs on random tokens, with ids that stand for nothing, whose lengths are samples: what scripts for speed ask for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import train_ranks

COMMON_FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 1 --lr 1e-2 --mock-data --device cpu "
    "--tokenizer-type NullTokenizer --vocab-size 64 --log-interval 1 --eval-iters 1 --eval-interval 3 --fp32"
)


def train_records(folder: Path, extra_args: str, script: ModuleType = pretrain_gpt2) -> list[dict[str, float]]:
    argv = [*COMMON_FLAGS.split(), *extra_args.split(), "--save", str(folder)]
    assert train_ranks(1, argv, script=script)[0] == [0]
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


def test_batch_size_rampup_schedules_learning_rate_by_samples(tmp_path: Path) -> None:
    schedule_flags = "--train-samples 27 --lr-warmup-samples 5 --lr-decay-samples 25 --lr-decay-style linear"
    records = train_records(
        tmp_path, f"{schedule_flags} --seq-length 8 --global-batch-size 6 --rampup-batch-size 2 2 6"
    )
    consumed = [2, 4, 8, 14, 20, 26]
    assert [record["samples"] for record in records] == consumed
    expected = [
        1e-2 * (num_samples / 5 if num_samples <= 5 else max(25 - num_samples, 0) / 20) for num_samples in consumed
    ]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected, rel=1e-12)
    assert all(3.5 < record["loss"] < 5 for record in records), "ln(64) = 4.16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "length_flags"),
    [(pretrain_bert, "--seq-length 16"), (pretrain_t5, "--enc-seq-length 32 --dec-seq-length 16")],
    ids=["bert", "t5"],
)
def test_other_families_train_on_random_samples(script: ModuleType, length_flags: str, tmp_path: Path) -> None:
    assert len(train_records(tmp_path, f"--train-iters 2 {length_flags}", script)) == 2
