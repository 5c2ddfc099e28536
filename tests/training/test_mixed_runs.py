"""Whole runs on a mixture: what they say, write and save, and how they go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.data import IndexedDataset, IndexedDatasetBuilder
from megatron.mpu.groups import SINGLE
from megatron.tokenizer import build
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import TOKENIZER, launch_script, make_flags, train_ranks

SHORT_RUN_FLAGS = (
    "--train-iters 4 --gas 4 --rampup-batch-size 4 4 8 --eval-interval 4 --eval-iters 1 --split 600,200,200"
)


@pytest.fixture(scope="module")
def split_corpora(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two corpora: every other document each."""
    tokenizer, source = build(tokenizer_path=TOKENIZER), IndexedDataset(corpus)
    prefixes = [tmp_path_factory.mktemp("halves") / name for name in ("even", "odd")]
    for corpus_idx, prefix in enumerate(prefixes):
        builder_args = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.identity, "eod_id": tokenizer.eod_id}
        with IndexedDatasetBuilder(prefix, **builder_args) as writer:
            for document in range(corpus_idx, source.num_documents, 2):
                writer.add(np.array(source.read(document)))
    return prefixes


def make_argv(weights: tuple[float, float], split_corpora: list[Path], folder: Path, extra_args: str) -> list[str]:
    argv = make_flags(Path("x"), folder, f"{SHORT_RUN_FLAGS} {extra_args}")
    data_path_idx = argv.index("--data-path") + 1
    blend_args = [arg for pair in zip(map(str, weights), map(str, split_corpora), strict=True) for arg in pair]
    return [*argv[:data_path_idx], *blend_args, *argv[data_path_idx + 1 :]]


def test_blended_run_logs_each_corpus_and_resumes_with_new_weights(split_corpora: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first_argv = make_argv((0.75, 0.25), split_corpora, folder, "--num-workers 1 --packing best-fit --exit-interval 3")
    assert train_ranks(1, first_argv)[0] == [75]
    metadata = open_latest(folder / CHECKPOINTS, SINGLE).metadata
    assert metadata["progress"]["samples_consumed"] == 4 + 4 + 8
    assert metadata["data_order"]["cursors"] == {"even": 12, "odd": 4}
    log = tmp_path / "log"
    resume_argv = make_argv((0.25, 0.75), split_corpora, folder, f"--batch-size 1 --packing best-fit --load {folder}")
    assert launch_script(2, resume_argv, log) == [0, 0]
    output = log.read_text()
    assert "new weights from sample 16 on: 0.25 even from its sample 12, 0.75 odd from its sample 4" in output
    final_metadata = open_latest(folder / CHECKPOINTS, SINGLE).metadata
    assert final_metadata["data_order"]["cursors"] == {"even": 12 + 2, "odd": 4 + 6}
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["samples"] for record in steps] == [4, 8, 16, 24]
    assert all(0 <= record["data_wait"] <= 1 and set(record["epochs"]) == {"even", "odd"} for record in steps)
    for split in ("valid", "test"):
        evaluated = next(record for record in records if record["kind"] == split)
        expected_loss = 0.25 * evaluated["losses"]["even"] + 0.75 * evaluated["losses"]["odd"]
        assert evaluated["losses"]["even"] != evaluated["losses"]["odd"]
        assert evaluated["loss"] == pytest.approx(expected_loss, rel=1e-12)
        assert f"{'validation' if split == 'valid' else split} loss {evaluated['loss']:.4f}" in output
    assert "| data wait " in output and "| epochs even 0." in output and "| even 6." in output and ", odd 6." in output
    assert "in the 24 samples of the run" in output and "batch ramp-up" in output


@pytest.mark.slow
def test_data_change_exits_with_code_3_unless_allowed(split_corpora: list[Path], corpus: Path, tmp_path: Path) -> None:
    """Row D22."""
    folder, log = tmp_path / "run", tmp_path / "log"
    assert launch_script(1, make_argv((1, 1), split_corpora, folder, "--exit-interval 2"), log) == [75]
    changed_argv = make_argv((1, 1), [split_corpora[0], corpus], folder, f"--load {folder}")
    assert launch_script(2, [*changed_argv, "--batch-size", "1"], log) == [3, 3]
    assert log.read_text().count("--allow-data-change") == 1, "once, not by each rank"
    assert launch_script(1, [*changed_argv, "--allow-data-change"], log) == [0]
    assert "data changed: " in log.read_text()
    assert open_latest(folder / CHECKPOINTS, SINGLE).metadata["data_order"]["cursors"]["even"] > 2


@pytest.mark.slow
def test_run_without_steps_saves_data_order_of_loaded_checkpoint(split_corpora: list[Path], tmp_path: Path) -> None:
    folder, copy_folder, log = tmp_path / "run", tmp_path / "copy", tmp_path / "log"
    assert launch_script(1, make_argv((1, 1), split_corpora, folder, "--exit-interval 2"), log) == [75]
    resume_argv = make_argv((1, 1), split_corpora, copy_folder, f"--load {folder} --train-iters 0")
    assert launch_script(1, resume_argv, log) == [0], log.read_text()
    original, copied = (open_latest(run_folder / CHECKPOINTS, SINGLE).metadata for run_folder in (folder, copy_folder))
    assert original["data_order"] and all(
        original[key] == copied[key] for key in ("data_order", "data_fingerprint", "progress")
    )
