"""Counts are those of the files, and epochs follow from weights and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.data import IndexedDataset
from megatron.data.split import split_by_hash
from tests.helpers.token_data import write_documents
from tools import count_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with ``a``, ten documents of 10 tokens, and ``b``, five of 4."""
    write_documents(tmp_path / "a", [10] * 10)
    write_documents(tmp_path / "b", [4] * 5)
    return tmp_path


def count(folder: Path, capsys: pytest.CaptureFixture[str], command_line: str) -> dict:
    assert count_tokens.main([*command_line.replace("DIR", str(folder)).split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out.replace(str(folder) + "/", ""))


def test_counts_documents_tokens_and_samples_per_split(folder: Path, capsys) -> None:
    report = count(folder, capsys, "DIR/a DIR/b --split 8,1,1 --seq-length 9")
    assert report["total"] == {"documents": 15, "tokens": 120}
    a = report["corpora"]["a"]
    assert (a["documents"], a["tokens"], a["samples"]) == (10, 100, 11)  # 99 of 100 tokens have a label
    assert a["splits"]["train"] == {"documents": 8, "tokens": 80, "samples": 8}
    assert [split["tokens"] for split in a["splits"].values()] == [80, 10, 10]


def test_epochs_follow_weights_and_train_tokens(folder: Path, capsys) -> None:
    report = count(folder, capsys, "--data-path 3 DIR/a 1 DIR/b --split 8,1,1 --train-tokens 4e2")["corpora"]
    assert (report["a"]["train_tokens"], report["b"]["train_tokens"]) == (300, 100)
    assert report["a"]["epochs"] == pytest.approx(300 / 80) and report["b"]["epochs"] == pytest.approx(100 / 16)


def test_hash_splits_equal_training_splits(folder: Path, capsys) -> None:
    expected = split_by_hash(IndexedDataset(folder / "a"), "5,3,2", None)
    splits = count(folder, capsys, "DIR/a --split 5,3,2 --split-by hash")["corpora"]["a"]["splits"]
    assert [split["documents"] for split in splits.values()] == [len(documents) for documents in expected]
    assert sum(split["tokens"] for split in splits.values()) == 100 and splits["train"]["documents"] != 5


def test_epochs_are_counted_in_samples_with_seq_length(folder: Path, capsys) -> None:
    report = count(folder, capsys, "DIR/a DIR/b --train-tokens 240 --seq-length 9")["corpora"]
    assert report["a"]["train_tokens"] == 200 and report["a"]["train_samples"] == 23  # by tokens; 200 / 9 rounded up
    assert report["a"]["epochs"] == pytest.approx(23 / 11)


def test_table_omits_empty_columns(folder: Path, capsys) -> None:
    assert count_tokens.main([f"{folder}/a", f"{folder}/b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["corpus", "documents", "tokens"]
    assert [line.split()[1:] for line in lines[1:]] == [["10", "100"], ["5", "20"], ["15", "120"]]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("", "either PREFIX arguments or --data-path"),
        ("DIR/a DIR/a", "must not repeat"),
        ("DIR/none", "none.idx"),
        ("--data-path 0.5 DIR/a DIR/b", "alternating weights and paths"),
        ("DIR/a --train-tokens 0", "at least 1"),
        ("DIR/a --seq-length 0", "at least 1"),
        ("DIR/a --split-by hash", "no effect without --split"),
        ("DIR/b --seq-length 30 --train-tokens 10", "no complete training sample"),
    ],
)
def test_invalid_arguments_exit_with_code_2(folder: Path, capsys, line: str, expected: str) -> None:
    try:
        code = count_tokens.main(line.replace("DIR", str(folder)).split())
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and expected in capsys.readouterr().err


def test_ctrl_c_prints_one_line(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(count_tokens, "IndexedDataset", interrupt)
    assert count_tokens.main([f"{folder}/a"]) == 130
    assert capsys.readouterr().err.count("\n") == 1
