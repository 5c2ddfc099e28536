from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.data import dataset_metadata, preprocess
from megatron.errors import DataError
from tests.helpers.preprocess_job import END_OF_TEXT, GOOD_TEXTS, Corpus, json_lines, make_small_tokenizer
from tests.helpers.token_data import write_documents, write_megatron_files


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus(tmp_path)
    corpus.preprocess(json_lines(*GOOD_TEXTS))
    return corpus


def test_verify_samples_same_documents_for_same_seed(corpus: Corpus) -> None:
    report = preprocess.verify(str(corpus.prefix), make_small_tokenizer(), num_samples=5, seed=3)
    assert (report.num_documents, report.has_sidecar, len(report.samples)) == (60, True, 5)
    texts = corpus.read_texts()
    assert [opening for _, _, opening in report.samples] == [
        repr(texts[document_idx]) for document_idx, _, _ in report.samples
    ]
    assert report == preprocess.verify(str(corpus.prefix), make_small_tokenizer(), num_samples=5, seed=3)
    assert (
        report.samples != preprocess.verify(str(corpus.prefix), make_small_tokenizer(), num_samples=5, seed=4).samples
    )
    ids = preprocess.verify(str(corpus.prefix), None, num_samples=60).samples[0][2]
    assert ids == " ".join(map(str, make_small_tokenizer().encode(GOOD_TEXTS[0]) + [make_small_tokenizer().eod_id]))
    assert END_OF_TEXT in texts[0]


@pytest.mark.parametrize("byte_idx", [0, 100, -1])
def test_flipped_bit_is_detected(corpus: Corpus, byte_idx: int) -> None:
    for suffix in (".bin", ".idx"):
        path = corpus.prefix.with_suffix(suffix)
        original = path.read_bytes()
        data = bytearray(original)
        data[byte_idx] ^= 2
        path.write_bytes(data)
        with pytest.raises(DataError):
            preprocess.verify(str(corpus.prefix), None)
        path.write_bytes(original)


def test_another_tokenizer_and_out_of_range_ids_are_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3, 400])
    with pytest.raises(DataError, match="built with a different tokenizer"):
        preprocess.verify(str(tmp_path / "a"), make_small_tokenizer())
    (tmp_path / "a.meta.json").unlink()
    with pytest.raises(DataError, match="ids must be in 0 ... 299, got 0 ... 403"):
        preprocess.verify(str(tmp_path / "a"), make_small_tokenizer())


def test_flipped_bit_in_sidecar_is_detected_and_old_sidecar_is_read(corpus: Corpus) -> None:
    path = corpus.folder / "out.meta.json"
    original = path.read_bytes()
    fields = json.loads(original)
    for byte_idx in range(0, len(original), 3):
        path.write_bytes(original[:byte_idx] + bytes([original[byte_idx] ^ 1]) + original[byte_idx + 1 :])
        try:
            assert json.loads(path.read_bytes()) == fields, byte_idx
        except (ValueError, AssertionError):
            with pytest.raises(DataError, match="out.meta.json"):
                preprocess.verify(str(corpus.prefix), None)
    del fields["crc32"]
    path.write_text(json.dumps(fields))
    assert preprocess.verify(str(corpus.prefix), make_small_tokenizer()).num_documents == 60
    path.write_text(json.dumps(fields | {"vocab_size": 301}))
    with pytest.raises(DataError, match="vocabulary size of the tokenizer, 300, got 301"):
        preprocess.verify(str(corpus.prefix), make_small_tokenizer())


def test_missing_files_are_named_with_their_flag(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--output-prefix .*/a must name files to verify"):
        preprocess.verify(str(tmp_path / "a"), None)


def test_document_without_end_token_is_detected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [3, 4, 5], eod_id=7)
    assert preprocess.verify(str(tmp_path / "a"), None).num_tokens == 12
    metadata = dataset_metadata.read(tmp_path / "a.meta.json")
    assert metadata is not None
    (tmp_path / "a.meta.json").write_bytes(replace(metadata, eod_id=8).to_json())
    with pytest.raises(DataError, match="each document must end with the id 8, but document 0 ends with 7"):
        preprocess.verify(str(tmp_path / "a"), None)


def test_megatron_files_are_verified_without_checksums(tmp_path: Path) -> None:
    write_megatron_files(tmp_path / "a", [2, 0, 3], [0, 1, 3])
    report = preprocess.verify(str(tmp_path / "a"), None)
    assert (report.num_tokens, report.has_sidecar) == (5, False)
