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
from tests.helpers.runs import TOKENIZER, flags, start_script, train_ranks

SHORT = "--train-iters 4 --gas 4 --rampup-batch-size 4 4 8 --eval-interval 4 --eval-iters 1 --split 600,200,200"


@pytest.fixture(scope="module")
def halves(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two corpora: every other document each."""
    tokenizer, texts = build(tokenizer_path=TOKENIZER), IndexedDataset(corpus)
    prefixes = [tmp_path_factory.mktemp("halves") / name for name in ("even", "odd")]
    for number, prefix in enumerate(prefixes):
        facts = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.identity, "eod_id": tokenizer.eod_id}
        with IndexedDatasetBuilder(prefix, **facts) as writer:
            for document in range(number, texts.num_documents, 2):
                writer.add(np.array(texts.read(document)))
    return prefixes


def argv_of(weights: tuple[float, float], halves: list[Path], folder: Path, extra: str) -> list[str]:
    argv = flags(Path("x"), folder, f"{SHORT} {extra}")
    place = argv.index("--data-path") + 1
    words = [word for pair in zip(map(str, weights), map(str, halves), strict=True) for word in pair]
    return [*argv[:place], *words, *argv[place + 1 :]]


def test_a_run_on_a_mixture_tells_of_each_corpus_and_goes_on_with_other_weights(
    halves: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    first = argv_of((0.75, 0.25), halves, folder, "--num-workers 1 --packing best-fit --exit-interval 3")
    assert train_ranks(1, first)[0] == [75]
    saved = open_latest(folder / CHECKPOINTS, SINGLE).metadata
    assert saved["progress"]["samples_consumed"] == 4 + 4 + 8
    assert saved["data_order"]["cursors"] == {"even": 12, "odd": 4}
    log = tmp_path / "log"
    again = argv_of((0.25, 0.75), halves, folder, f"--batch-size 1 --packing best-fit --load {folder}")
    assert start_script(2, again, log) == [0, 0]
    output = log.read_text()
    assert "new weights from sample 16 on: 0.25 even from its sample 12, 0.75 odd from its sample 4" in output
    state = open_latest(folder / CHECKPOINTS, SINGLE).metadata
    assert state["data_order"]["cursors"] == {"even": 12 + 2, "odd": 4 + 6}
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["samples"] for record in steps] == [4, 8, 16, 24]
    assert all(0 <= record["data_wait"] <= 1 and set(record["epochs"]) == {"even", "odd"} for record in steps)
    for kind in ("valid", "test"):
        evaluated = next(record for record in records if record["kind"] == kind)
        mean = 0.25 * evaluated["losses"]["even"] + 0.75 * evaluated["losses"]["odd"]
        assert evaluated["losses"]["even"] != evaluated["losses"]["odd"]
        assert evaluated["loss"] == pytest.approx(mean, rel=1e-12)
        assert f"{'validation' if kind == 'valid' else kind} loss {evaluated['loss']:.4f}" in output
    assert "| data wait " in output and "| epochs even 0." in output and "| even 6." in output and ", odd 6." in output
    assert "when the 24 samples of the run" in output and "batch ramp-up" in output


@pytest.mark.slow
def test_other_data_end_every_rank_with_3_and_are_taken_where_that_is_allowed(
    halves: list[Path], corpus: Path, tmp_path: Path
) -> None:
    """Row D22."""
    folder, log = tmp_path / "run", tmp_path / "log"
    assert start_script(1, argv_of((1, 1), halves, folder, "--exit-interval 2"), log) == [75]
    other = argv_of((1, 1), [halves[0], corpus], folder, f"--load {folder}")
    assert start_script(2, [*other, "--batch-size", "1"], log) == [3, 3]
    assert log.read_text().count("--allow-data-change") == 1, "once, not by each rank"
    assert start_script(1, [*other, "--allow-data-change"], log) == [0]
    assert "data changed: " in log.read_text()
    assert open_latest(folder / CHECKPOINTS, SINGLE).metadata["data_order"]["cursors"]["even"] > 2


@pytest.mark.slow
def test_a_run_without_a_step_saves_what_its_checkpoint_says_of_the_data(halves: list[Path], tmp_path: Path) -> None:
    folder, copy, log = tmp_path / "run", tmp_path / "copy", tmp_path / "log"
    assert start_script(1, argv_of((1, 1), halves, folder, "--exit-interval 2"), log) == [75]
    again = argv_of((1, 1), halves, copy, f"--load {folder} --train-iters 0")
    assert start_script(1, again, log) == [0], log.read_text()
    was, now = (open_latest(each / CHECKPOINTS, SINGLE).metadata for each in (folder, copy))
    assert was["data_order"] and all(was[key] == now[key] for key in ("data_order", "data_fingerprint", "progress"))
