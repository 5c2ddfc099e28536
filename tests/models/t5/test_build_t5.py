from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import BlendPaths
from megatron.errors import DataError
from megatron.models.t5.data import T5Dataset, T5Tokens
from megatron.models.t5.span_files import SpanFilesDataset, build_t5_train_valid_test
from megatron.models.t5.spans import parse_denoisers
from tests.data.test_build import single_corpus
from tests.helpers.token_data import write_documents, write_megatron_files
from tests.models.t5.span_set import VOCAB_SIZE, make_counting_documents, write_set

TOKENS = T5Tokens.appended(200, 12, 0)


def build_splits(prefix: Path | None, **overrides: Any) -> tuple:
    values = {
        "enc_seq_length": 10,
        "dec_seq_length": 0,
        "denoisers": parse_denoisers("R", 0.15, 3),
        "tokens": TOKENS,
        "seed": 1,
        "tokenizer_identity": "t",
    }
    paths = {"data_path": str(prefix) if prefix else None, "split": "8,1,1"}
    paths |= {name: overrides.pop(name) for name in list(overrides) if name in BlendPaths.__annotations__}
    return build_t5_train_valid_test(BlendPaths(**paths), **{**values, **overrides})  # type: ignore[arg-type]


def test_splits_have_no_common_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [11] * 10)
    splits = [single_corpus(samples) for samples in build_splits(tmp_path / "a")]
    assert all(isinstance(split, T5Dataset) for split in splits)
    assert [split.documents for split in splits] == [(0, 8), (8, 9), (9, 10)]
    tokens = [
        {int(t) for i in range(s.samples_per_epoch) for k in ("inputs", "targets") for t in s[i][k] if 0 < t < 200}
        for s in splits
    ]
    assert not (tokens[0] & tokens[1] or tokens[1] & tokens[2] or tokens[0] & tokens[2])
    assert build_splits(tmp_path / "a", split="1", needed=(True, False, False))[1:] == (None, None)


def test_flags_reach_dataset(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [11] * 10)
    train = single_corpus(build_splits(tmp_path / "a", dec_seq_length=9, reset_attention_mask=True, seed=5)[0])
    assert (train.dec_seq_length, train.reset_attention_mask, train.seed) == (9, True, 5)
    assert (train.enc_seq_length, train.raw_length, train.tokens) == (10, 10, TOKENS)


@pytest.mark.parametrize(
    "overrides, text",
    [
        ({"data_path": None}, "--data-path must name token files"),
        ({"split": "10,0,0"}, r"the valid split .* 10 tokens, got 0 of 10 .* \(--split 10,0,0, --enc-seq-length 10"),
        ({"enc_seq_length": 12}, "the valid split must have at least one sample of 12 tokens, got 1 of 10"),
        ({"enc_seq_length": 200}, r"has 110 tokens in total, but one sample of --enc-seq-length 200 needs 221"),
        ({"tokens": T5Tokens.appended(57, 12, 0)}, "0 ... 56 .* got 57 in document 5 at token 1, byte 112 of"),
        ({"tokenizer_identity": "u"}, "built with a different tokenizer"),
        ({"dec_seq_length": 3}, "--dec-seq-length must be at least 4, .* --enc-seq-length 10, got 3"),
        ({"tokens": T5Tokens.appended(200, 0, 0)}, "--enc-seq-length 10 needs 1 sentinel.* provides 0"),
    ],
)
def test_rejects_unusable_data_and_settings(tmp_path: Path, overrides: dict[str, Any], text: str) -> None:
    write_documents(tmp_path / "a", [11] * 10)
    with pytest.raises(DataError, match=text):
        build_splits(tmp_path / "a", **overrides)


def test_reads_files_without_sidecar_or_documents(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "a", [11] * 10, [0])
    assert single_corpus(build_splits(tmp_path / "a")[0]).documents == (0, 8), "each sequence is a document"
    with pytest.raises(DataError, match="got 109 in document 9 at token 10"):
        build_splits(tmp_path / "a", tokens=T5Tokens.appended(109, 12, 0))


def test_span_set_can_be_one_of_several_corpora(tmp_path: Path) -> None:
    write_set(tmp_path / "set", make_counting_documents([(5, 2, 6, 1, 4, 3), (9, 4), (30, 2, 20, 5)]))
    write_documents(tmp_path / "a", [11] * 10)
    values = {
        "data_path": f"1 {tmp_path}/set 2 {tmp_path}/a",
        "split": "1",
        "needed": (True, False, False),
        "tokens": T5Tokens.appended(VOCAB_SIZE, 12, 0),
    }
    train, _, _ = build_splits(None, **values, dec_seq_length=8, mixture_schedule="36: 1 0")
    assert isinstance(train.parts["set"], SpanFilesDataset) and isinstance(train.parts["a"], T5Dataset)
    assert {train[index]["targets"].shape for index in range(9)} == {(8,)}
    assert train.order.cursors(2) == {"set": 1, "a": 1} and train.order.cursors(9) == {"set": 8, "a": 1}, "18 a sample"
    with pytest.raises(DataError, match="must have the same length in all corpora, got 0 for .*set and 4 for .*a"):
        build_splits(None, **values)


def test_hash_split_samples_only_its_documents(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a", [11] * 60)
    splits = build_splits(tmp_path / "a", tokens=T5Tokens.appended(1000, 12, 0), split_by="hash")
    samples = [single_corpus(split) for split in splits]
    documents = [split.documents.tolist() for split in samples]
    assert sorted(sum(documents, [])) == list(range(60)) and documents[0] != list(range(len(documents[0])))
    assert len({split.fingerprint for split in samples}) == 3
    tokens = {int(t) for i in range(99) for k in ("inputs", "targets") for t in samples[0][i][k] if 0 < t < 1000}
    document_idxs = {int(np.searchsorted(np.cumsum(file.document_lengths), token - 1, "right")) for token in tokens}
    assert document_idxs <= set(documents[0])
