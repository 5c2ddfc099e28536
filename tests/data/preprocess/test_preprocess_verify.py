from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.data import dataset_metadata, preprocess
from megatron.errors import DataError
from tests.helpers.preprocess_job import END, GOOD, Corpus, lines, small_tokenizer
from tests.helpers.token_data import write, write_megatron


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    found = Corpus(tmp_path)
    found.run(lines(*GOOD))
    return found


def test_a_whole_pair_is_told_with_the_same_documents_for_a_seed(corpus: Corpus) -> None:
    found = preprocess.verify(str(corpus.prefix), small_tokenizer(), num_samples=5, seed=3)
    assert (found.num_documents, found.has_sidecar, len(found.samples)) == (60, True, 5)
    texts = corpus.texts()
    assert [opening for _, _, opening in found.samples] == [repr(texts[number]) for number, _, _ in found.samples]
    assert found == preprocess.verify(str(corpus.prefix), small_tokenizer(), num_samples=5, seed=3)
    assert found.samples != preprocess.verify(str(corpus.prefix), small_tokenizer(), num_samples=5, seed=4).samples
    ids = preprocess.verify(str(corpus.prefix), None, num_samples=60).samples[0][2]
    assert ids == " ".join(map(str, small_tokenizer().encode(GOOD[0]) + [small_tokenizer().eod_id]))
    assert END in texts[0]


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_flipped_bit_is_found(corpus: Corpus, place: int) -> None:
    for suffix in (".bin", ".idx"):
        path = corpus.prefix.with_suffix(suffix)
        whole = path.read_bytes()
        data = bytearray(whole)
        data[place] ^= 2
        path.write_bytes(data)
        with pytest.raises(DataError):
            preprocess.verify(str(corpus.prefix), None)
        path.write_bytes(whole)


def test_another_tokenizer_and_ids_beyond_it_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [3, 400])
    with pytest.raises(DataError, match="built with a different tokenizer"):
        preprocess.verify(str(tmp_path / "a"), small_tokenizer())
    (tmp_path / "a.meta.json").unlink()
    with pytest.raises(DataError, match="ids must be in 0 ... 299, got 0 ... 403"):
        preprocess.verify(str(tmp_path / "a"), small_tokenizer())


def test_a_flipped_bit_of_the_sidecar_is_found_and_an_older_one_without_a_checksum_is_read(corpus: Corpus) -> None:
    path = corpus.folder / "out.meta.json"
    whole = path.read_bytes()
    fields = json.loads(whole)
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert json.loads(path.read_bytes()) == fields, place
        except (ValueError, AssertionError):
            with pytest.raises(DataError, match="out.meta.json"):
                preprocess.verify(str(corpus.prefix), None)
    del fields["crc32"]
    path.write_text(json.dumps(fields))
    assert preprocess.verify(str(corpus.prefix), small_tokenizer()).num_documents == 60
    path.write_text(json.dumps(fields | {"vocab_size": 301}))
    with pytest.raises(DataError, match="vocabulary size of the tokenizer, 300, got 301"):
        preprocess.verify(str(corpus.prefix), small_tokenizer())


def test_files_that_are_not_there_are_named_by_their_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--output-prefix .*/a must name files to verify"):
        preprocess.verify(str(tmp_path / "a"), None)


def test_a_document_that_does_not_end_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a", [3, 4, 5], eod_id=7)
    assert preprocess.verify(str(tmp_path / "a"), None).num_tokens == 12
    metadata = dataset_metadata.read(tmp_path / "a.meta.json")
    assert metadata is not None
    (tmp_path / "a.meta.json").write_bytes(replace(metadata, eod_id=8).to_json())
    with pytest.raises(DataError, match="each document must end with the id 8, but document 0 ends with 7"):
        preprocess.verify(str(tmp_path / "a"), None)


def test_files_of_megatron_are_verified_without_checksums(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [2, 0, 3], [0, 1, 3])
    found = preprocess.verify(str(tmp_path / "a"), None)
    assert (found.num_tokens, found.has_sidecar) == (5, False)
