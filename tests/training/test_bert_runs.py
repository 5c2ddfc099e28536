"""Runs of BERT on the repository's texts: both losses are written down, and a run goes on in another layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.bert import pretrain_bert
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import make_flags, train_ranks


def read_train_records(folder: Path) -> list[dict[str, float]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


def train(num_ranks: int, corpus: Path, folder: Path, extra_args: str, exit_code: int = 0) -> list[dict[str, float]]:
    argv = make_flags(corpus, folder, f"--fp64 --hidden-dropout 0 --attention-dropout 0 {extra_args}", pretrain_bert)
    assert train_ranks(num_ranks, argv, script=pretrain_bert)[0] == [exit_code] * num_ranks
    return read_train_records(folder)


@pytest.fixture(scope="module")
def reference_records(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What one process gives in 6 steps."""
    return train(1, corpus, tmp_path_factory.mktemp("whole"), "--train-iters 6")


def test_logged_loss_is_sum_of_mlm_and_nsp_losses(reference_records: list[dict[str, float]]) -> None:
    assert [record["step"] for record in reference_records] == list(range(1, 7))
    for record in reference_records:
        assert record["loss"] == pytest.approx(record["mlm loss"] + record["nsp loss"], rel=1e-14)
        assert 0.4 < record["nsp loss"] < 1.1 and 6.0 < record["mlm loss"] < 8.0


@pytest.mark.slow
def test_resume_in_another_layout_reproduces_losses(
    reference_records: list[dict[str, float]], corpus: Path, tmp_path: Path
) -> None:
    """Row E15."""
    layout = "--train-iters 6 --model-parallel-size 2 --pipe-parallel-size 2 --exit-interval 3"
    first_records = train(4, corpus, tmp_path / "cut", layout, exit_code=75)
    resumed_records = train(1, corpus, tmp_path / "other", f"--train-iters 6 --load {tmp_path / 'cut'}")
    for name in ("loss", "mlm loss", "nsp loss"):
        losses = [record[name] for record in (*first_records, *resumed_records)]
        assert losses == pytest.approx([record[name] for record in reference_records], abs=1e-12, rel=0)


@pytest.mark.slow
def test_run_without_binary_head_logs_single_loss(corpus: Path, tmp_path: Path) -> None:
    extra_args = "--train-iters 2 --bert-no-binary-head --whole-word-masking --num-workers 1"
    assert all("nsp loss" not in record and record["loss"] > 6 for record in train(1, corpus, tmp_path, extra_args))
