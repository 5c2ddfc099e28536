from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron import log
from megatron.data import BlendPaths, build_train_valid_test, dataset_checks
from megatron.errors import DataError
from tests.helpers.token_data import write_documents, write_megatron_files


def build(prefix: Path, **overrides: Any) -> tuple:
    values = {
        "seq_length": 4,
        "seed": 1,
        "vocab_size": 200,
        "tokenizer_identity": "t",
    }
    paths = {"data_path": str(prefix), "split": "8,1,1"}
    paths |= {name: overrides.pop(name) for name in list(overrides) if name in BlendPaths.__annotations__}
    return build_train_valid_test(BlendPaths(**paths), **{**values, **overrides})  # type: ignore[arg-type]


def single_corpus(samples: Any) -> Any:
    """Return the samples of the one corpus."""
    (corpus_samples,) = samples.parts.values()
    return corpus_samples


def test_splits_have_no_common_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [10] * 10)
    datasets = [single_corpus(samples) for samples in build(tmp_path / "a")]
    tokens = [
        {int(token) for idx in range(dataset.samples_per_epoch) for token in dataset[idx]} for dataset in datasets
    ]
    assert [dataset.documents for dataset in datasets] == [(0, 8), (8, 9), (9, 10)]
    assert not (tokens[0] & tokens[1] or tokens[1] & tokens[2] or tokens[0] & tokens[2])


def test_unneeded_splits_may_be_empty(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [100])
    train, valid, test = build(tmp_path / "a", split="1,0,0", needed=(True, False, False))
    assert single_corpus(train).samples_per_epoch == 24 and valid is None and test is None


@pytest.mark.parametrize(
    "split, name", [("9998,1,1", "valid"), ("10,0,0", "valid"), ("0,5,5", "train"), ("9,1", "test")]
)
def test_empty_needed_split_is_named_with_counts(tmp_path: Path, split: str, name: str) -> None:
    write_documents(tmp_path / "a", [10] * 10)
    with pytest.raises(
        DataError, match=rf"the {name} split .* 5 tokens, got 0 of 10 documents with 0 tokens \(--split {split}"
    ):
        build(tmp_path / "a", split=split)


def test_split_shorter_than_sample_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [10] * 10)
    with pytest.raises(DataError, match="valid split must have at least one sample of 11 tokens, got 1 of 10"):
        build(tmp_path / "a", seq_length=10)


def test_sequence_longer_than_data_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [10] * 10)
    with pytest.raises(DataError, match="has 100 tokens in total.*--seq-length 100 needs 101"):
        build(tmp_path / "a", seq_length=100)


def test_out_of_vocabulary_id_is_reported_with_position(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [10] * 10)
    with pytest.raises(DataError, match="0 ... 56 .* got 57 in document 5 at token 6, byte 112 of"):
        build(tmp_path / "a", vocab_size=57)


def test_files_without_sidecar_are_scanned(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "a", [10] * 10, list(range(11)))
    assert single_corpus(build(tmp_path / "a", vocab_size=100)[0]).samples_per_epoch == 19
    with pytest.raises(DataError, match="got 99 in document 9 at token 9"):
        build(tmp_path / "a", vocab_size=99)


def test_data_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [10] * 10)
    with pytest.raises(DataError, match="built with a different tokenizer") as raised:
        build(tmp_path / "a", tokenizer_identity="u" * 64)
    assert "uuu" not in str(raised.value), "identities are in lines of the level debug only"


def test_flags_needing_eod_reject_files_without_end_tokens(tmp_path: Path) -> None:
    flags = {"flags_needing_eod": ["--eod-mask-loss", "--reset-position-ids"], "eod_id": 0}
    write_documents(tmp_path / "a", [10] * 10)
    write_documents(tmp_path / "b", [10] * 10, eod_id=0)
    write_megatron_files(tmp_path / "c", [10] * 10, list(range(11)))
    assert build(tmp_path / "b", **flags)[0] is not None
    for name in "ac":
        with pytest.raises(DataError, match="--eod-mask-loss --reset-position-ids need documents that end"):
            build(tmp_path / name, **flags)
    with pytest.raises(DataError, match="the tokenizer has none"):
        build(tmp_path / "b", flags_needing_eod=["--eod-mask-loss"], eod_id=None)


def test_large_file_without_sidecar_is_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_megatron_files(tmp_path / "a", [10] * 10, list(range(11)))
    messages: list[str] = []
    monkeypatch.setattr(dataset_checks, "_CACHED_FROM_TOKENS", 100)
    monkeypatch.setattr(log, "info", messages.append)
    cache = {"cache_path": str(tmp_path / "cache")}
    for vocab_size, num_scans in ((100, 1), (100, 1), (101, 2)):
        build(tmp_path / "a", vocab_size=vocab_size, **cache)
        assert len(messages) == num_scans and "checking all 100 token ids once" in messages[0]
    for _ in range(2):
        with pytest.raises(DataError, match="got 99 in document 9 at token 9"):
            build(tmp_path / "a", vocab_size=99, **cache)
    os.utime(tmp_path / "a.bin", (1, 1))
    build(tmp_path / "a", vocab_size=100, **cache)
    assert len(messages) == 4, "a file that was written to is read again"


@pytest.mark.parametrize("flags", [[], ["--eod-mask-loss"]])
def test_mismatched_eod_id_raises_with_both_ids(flags: list[str], tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [10] * 10, eod_id=7)
    assert build(tmp_path / "a", eod_id=7, flags_needing_eod=flags)[0] is not None
    with pytest.raises(DataError, match="a end with the token of id 7, .* has id 8"):
        build(tmp_path / "a", eod_id=8, flags_needing_eod=flags)
