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

COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 1 --lr 1e-2 --mock-data --device cpu "
    "--tokenizer-type NullTokenizer --vocab-size 64 --log-interval 1 --eval-iters 1 --eval-interval 3 --fp32"
)


def train(folder: Path, extra: str, script: ModuleType = pretrain_gpt2) -> list[dict[str, float]]:
    argv = [*COMMON.split(), *extra.split(), "--save", str(folder)]
    assert train_ranks(1, argv, script=script)[0] == [0]
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


def test_a_batch_that_grows_over_samples_has_the_rates_of_its_samples(tmp_path: Path) -> None:
    lengths = "--train-samples 27 --lr-warmup-samples 5 --lr-decay-samples 25 --lr-decay-style linear"
    records = train(tmp_path, f"{lengths} --seq-length 8 --global-batch-size 6 --rampup-batch-size 2 2 6")
    consumed = [2, 4, 8, 14, 20, 26]
    assert [record["samples"] for record in records] == consumed
    wanted = [1e-2 * (after / 5 if after <= 5 else max(25 - after, 0) / 20) for after in consumed]
    assert [record["learning_rate"] for record in records] == pytest.approx(wanted, rel=1e-12)
    assert all(3.5 < record["loss"] < 5 for record in records), "ln(64) = 4.16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "lengths"),
    [(pretrain_bert, "--seq-length 16"), (pretrain_t5, "--enc-seq-length 32 --dec-seq-length 16")],
    ids=["bert", "t5"],
)
def test_other_families_have_random_samples_of_their_own(script: ModuleType, lengths: str, tmp_path: Path) -> None:
    assert len(train(tmp_path, f"--train-iters 2 {lengths}", script)) == 2
