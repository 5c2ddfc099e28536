"""Runs with multi-token prediction: logs, resuming in another layout, adding and dropping the layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.llama import pretrain_llama
from megatron.checkpoint.one_process import open_folder, read_weights
from tests.helpers.runs import make_flags, train_ranks, write_corpus

FP64 = "--fp64 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --num-layers 4"
MTP = f"{FP64} --mtp-num-layers 2"
LAYOUTS = {
    1: "",
    2: "--pipe-parallel-size 2 --pipeline-schedule zb-v --gas 4 --batch-size 1",
    4: "--model-parallel-size 2 --sequence-parallel --pipe-parallel-size 2",
}
"""Number of ranks -> the layout; the global batch is the same."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def train(num_ranks: int, corpus: Path, folder: Path, flags: str, exit_code: int = 0) -> None:
    argv = make_flags(corpus, folder, f"{flags} {LAYOUTS[num_ranks]}", pretrain_llama)
    assert train_ranks(num_ranks, argv, script=pretrain_llama)[0] == [exit_code] * num_ranks


def read_steps(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record.get("kind") == "train"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(2, 1), pytest.param(1, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_checkpoint_resumes_in_another_layout(saved: int, loaded: int, corpus: Path, tmp_path: Path) -> None:
    train(1, corpus, tmp_path / "plain", f"{MTP} --train-iters 4")
    train(saved, corpus, tmp_path / "run", f"{MTP} --train-iters 4 --exit-interval 2", exit_code=75)
    train(loaded, corpus, tmp_path / "run", f"{MTP} --train-iters 4 --resume")
    plain, resumed = read_steps(tmp_path / "plain"), read_steps(tmp_path / "run")
    assert [record["step"] for record in resumed] == [1, 2, 3, 4]
    for name in ("loss", "mtp_1_loss", "mtp_2_loss", "grad_norm"):
        assert [r[name] for r in resumed] == pytest.approx([r[name] for r in plain], abs=1e-12, rel=0), name
    assert plain[0]["mtp_1_loss"] != plain[0]["mtp_2_loss"] != plain[0]["loss"]


@pytest.mark.slow
def test_finetune_adds_and_drops_layers(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """New layers start from the initial weights of the seed, the others from the checkpoint."""
    short = "--train-iters 1 --lr 1e-30 --min-lr 0"
    train(1, corpus, tmp_path / "plain", f"{FP64} --train-iters 2")
    train(2, corpus, tmp_path / "added", f"{MTP} {short} --load {tmp_path / 'plain'} --finetune")
    assert "start from initial weights" in "".join(capfd.readouterr())
    train(1, corpus, tmp_path / "dropped", f"{FP64} {short} --load {tmp_path / 'added'} --finetune")
    plain, added, dropped = (read_weights(open_folder(tmp_path / name)) for name in ("plain", "added", "dropped"))
    assert plain.keys() == dropped.keys() == {name for name in added if not name.startswith("mtp.")}
    for name, weight in plain.items():
        torch.testing.assert_close(added[name], weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(dropped[name], weight, rtol=0, atol=1e-12)
    train(1, corpus, tmp_path / "scratch", f"{MTP} {short}")
    scratch = read_weights(open_folder(tmp_path / "scratch"))
    for name in added:
        if name.startswith("mtp."):
            torch.testing.assert_close(added[name], scratch[name], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_other_number_of_layers_needs_finetune(corpus: Path, tmp_path: Path) -> None:
    train(1, corpus, tmp_path / "plain", f"{FP64} --train-iters 1")
    with pytest.raises(AssertionError, match="mtp_num_layers.* add --finetune"):
        train(1, corpus, tmp_path / "run", f"{MTP} --train-iters 2 --load {tmp_path / 'plain'}")
