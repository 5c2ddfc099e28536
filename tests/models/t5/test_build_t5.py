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
from tests.data.test_build import only
from tests.helpers.token_data import write, write_megatron
from tests.models.t5.span_set import VOCAB_SIZE, counting, write_set

TOKENS = T5Tokens.appended(200, 12, 0)


def build(prefix: Path | None, **changed: Any) -> tuple:
    values = {
        "enc_seq_length": 10,
        "dec_seq_length": 0,
        "denoisers": parse_denoisers("R", 0.15, 3),
        "tokens": TOKENS,
        "seed": 1,
        "tokenizer_identity": "t",
    }
    paths = {"data_path": str(prefix) if prefix else None, "split": "8,1,1"}
    paths |= {name: changed.pop(name) for name in list(changed) if name in BlendPaths.__annotations__}
    return build_t5_train_valid_test(BlendPaths(**paths), **{**values, **changed})  # type: ignore[arg-type]


def test_three_data_sets_without_a_document_in_common(tmp_path: Path) -> None:
    write(tmp_path / "a", [11] * 10)
    parts = [only(samples) for samples in build(tmp_path / "a")]
    assert all(isinstance(part, T5Dataset) for part in parts)
    assert [part.documents for part in parts] == [(0, 8), (8, 9), (9, 10)]
    tokens = [
        {int(t) for i in range(s.samples_per_epoch) for k in ("inputs", "targets") for t in s[i][k] if 0 < t < 200}
        for s in parts
    ]
    assert not (tokens[0] & tokens[1] or tokens[1] & tokens[2] or tokens[0] & tokens[2])
    assert build(tmp_path / "a", split="1", needed=(True, False, False))[1:] == (None, None)


def test_the_flags_reach_the_samples(tmp_path: Path) -> None:
    write(tmp_path / "a", [11] * 10)
    train = only(build(tmp_path / "a", dec_seq_length=9, reset_attention_mask=True, seed=5)[0])
    assert (train.dec_seq_length, train.reset_attention_mask, train.seed) == (9, True, 5)
    assert (train.enc_seq_length, train.raw_length, train.tokens) == (10, 10, TOKENS)


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"data_path": None}, "--data-path must name token files"),
        ({"split": "10,0,0"}, r"the valid split .* 10 tokens, got 0 of 10 .* \(--split 10,0,0, --enc-seq-length 10"),
        ({"enc_seq_length": 12}, "the valid split must have at least one sample of 12 tokens, got 1 of 10"),
        ({"enc_seq_length": 200}, r"has 110 tokens in total, but one sample of --enc-seq-length 200 needs 221"),
        ({"tokens": T5Tokens.appended(57, 12, 0)}, "0 ... 56 .* got 57 in document 5 at token 1, byte 112 of"),
        ({"tokenizer_identity": "u"}, "built with a different tokenizer"),
        ({"dec_seq_length": 3}, "--dec-seq-length must be at least 4, .* --enc-seq-length 10, got 3"),
        ({"tokens": T5Tokens.appended(200, 0, 0)}, "1 for --enc-seq-length 10; too few sentinels: .* gives 0"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    write(tmp_path / "a", [11] * 10)
    with pytest.raises(DataError, match=text):
        build(tmp_path / "a", **changed)


def test_files_without_a_sidecar_or_documents_are_looked_through(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [11] * 10, [0])
    assert only(build(tmp_path / "a")[0]).documents == (0, 8), "each sequence is a document"
    with pytest.raises(DataError, match="got 109 in document 9 at token 10"):
        build(tmp_path / "a", tokens=T5Tokens.appended(109, 12, 0))


def test_a_set_in_three_files_may_be_one_of_several_corpora(tmp_path: Path) -> None:
    write_set(tmp_path / "set", counting([(5, 2, 6, 1, 4, 3), (9, 4), (30, 2, 20, 5)]))
    write(tmp_path / "a", [11] * 10)
    values = {
        "data_path": f"1 {tmp_path}/set 2 {tmp_path}/a",
        "split": "1",
        "needed": (True, False, False),
        "tokens": T5Tokens.appended(VOCAB_SIZE, 12, 0),
    }
    train, _, _ = build(None, **values, dec_seq_length=8, mixture_schedule="36: 1 0")
    assert isinstance(train.parts["set"], SpanFilesDataset) and isinstance(train.parts["a"], T5Dataset)
    assert {train[index]["targets"].shape for index in range(9)} == {(8,)}
    assert train.order.cursors(2) == {"set": 1, "a": 1} and train.order.cursors(9) == {"set": 8, "a": 1}, "18 a sample"
    with pytest.raises(DataError, match="must have the same length in all corpora, got 0 for .*set and 4 for .*a"):
        build(None, **values)


def test_a_split_by_hash_cuts_texts_from_its_own_documents(tmp_path: Path) -> None:
    file = write(tmp_path / "a", [11] * 60)
    parts = build(tmp_path / "a", tokens=T5Tokens.appended(1000, 12, 0), split_by="hash")
    samples = [only(part) for part in parts]
    documents = [part.documents.tolist() for part in samples]
    assert sorted(sum(documents, [])) == list(range(60)) and documents[0] != list(range(len(documents[0])))
    assert len({part.fingerprint for part in samples}) == 3
    seen = {int(t) for i in range(99) for k in ("inputs", "targets") for t in samples[0][i][k] if 0 < t < 1000}
    owners = {int(np.searchsorted(np.cumsum(file.sizes), token - 1, "right")) for token in seen}
    assert owners <= set(documents[0])
