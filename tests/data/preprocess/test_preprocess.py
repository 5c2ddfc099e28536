from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megatron import files, tokenizer
from megatron.data import IndexedDataset, preprocess
from megatron.data.preprocess import encode
from megatron.errors import DataError
from megatron.tokenizer import chinese_words, train
from tests.helpers.preprocess_job import END_OF_TEXT, GOOD_TEXTS, Corpus, json_lines, make_small_tokenizer
from tests.tokenizer.conftest import NON_CHINESE_TEXTS, SPLIT_WORDS, mixed_lines


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def test_documents_round_trip_with_end_token(corpus: Corpus) -> None:
    summary = corpus.preprocess(json_lines(*GOOD_TEXTS, "", END_OF_TEXT) + b"\n \n")
    assert corpus.read_texts() == [text + END_OF_TEXT for text in [*GOOD_TEXTS, END_OF_TEXT]]
    assert (summary.num_documents, summary.num_empty, summary.num_bad, summary.bad_path) == (61, 3, 0, None)
    assert summary.num_tokens == IndexedDataset(corpus.prefix).num_tokens and corpus.list_leftovers() == []
    corpus.preprocess(append_eod=False)
    assert corpus.read_texts() == [*GOOD_TEXTS, END_OF_TEXT]


def test_output_is_independent_of_workers_units_and_chunks(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.write(json_lines(*GOOD_TEXTS, ""))
    outputs = set()
    for num_workers, unit_bytes, chunk_bytes in [(1, 1 << 20, 1 << 18), (2, 500, 1), (16, 300, 100)]:
        monkeypatch.setattr(encode, "CHUNK_BYTES", chunk_bytes)
        summary = corpus.preprocess(num_workers=num_workers, unit_bytes=unit_bytes)
        assert summary.num_units == -(-len(json_lines(*GOOD_TEXTS, "")) // unit_bytes)
        outputs.add(corpus.read_output())
    assert len(outputs) == 1


@pytest.fixture(scope="module")
def cpm_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of CPM-1's kind, with words that are left in characters among its pieces."""
    path = tmp_path_factory.mktemp("cpm") / "chinese_vocab.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*SPLIT_WORDS, *NON_CHINESE_TEXTS, "document second line"] * 5),
            model_writer=file,
            vocab_size=200,
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
        )
    return path


@pytest.mark.parametrize(
    "num_lines, chunk_bytes, settings",
    [
        (900, 2000, [(1, 1 << 24), (2, 4000), (3, 1500), (1, 1500)]),
        pytest.param(
            200_000, 1 << 18, [(w, u) for w in (1, 2, 3) for u in (1 << 24, 1 << 20, 70_000)], marks=pytest.mark.slow
        ),
    ],
)
def test_word_segmented_output_is_independent_of_workers_and_units(
    corpus: Corpus,
    cpm_vocabulary: Path,
    num_lines: int,
    chunk_bytes: int,
    settings: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a process remembers of words must not show in the ids, whatever it read before."""
    monkeypatch.setattr(encode, "CHUNK_BYTES", chunk_bytes)
    content = json_lines(*filter(str.strip, mixed_lines(num_lines, 7, GOOD_TEXTS)))
    outputs = set()
    for num_workers, unit_bytes in settings:
        chinese_words._known_runs.clear()
        corpus.preprocess(
            content,
            make_tokenizer=lambda: tokenizer.build("CPM1", tokenizer_path=cpm_vocabulary),
            append_eod=False,
            num_workers=num_workers,
            unit_bytes=unit_bytes,
        )
        outputs.add(corpus.read_output())
    assert len(outputs) == 1


def test_texts_keep_their_ids_when_batched_with_giant_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encode, "MAX_TEXT_CHARS", 100)
    library = tokenizers.Tokenizer.from_str(make_small_tokenizer().description)  # type: ignore[attr-defined]
    library.normalizer = tokenizers.normalizers.Strip()
    library.add_tokens(["<pad>"])
    library.save(str(tmp_path / "t.json"))
    encoder = encode.Encoder(tokenizer.build(tokenizer_path=tmp_path / "t.json"), ["text"], append_eod=False)
    texts = ["a<pad>\n", "b<pad>  ", "c ", " d"]
    ids_of_single_texts = [encoder._encode_texts([text])[0].tolist() for text in texts]
    tokens, lengths = encoder._encode_texts([*texts, "giant " * 50])
    assert [ids.tolist() for ids in np.split(tokens, np.cumsum(lengths))[:4]] == ids_of_single_texts


def test_inputs_of_several_formats_keep_their_order(corpus: Corpus) -> None:
    inputs = [
        corpus.write(json_lines("one", "two"), "b.jsonl"),
        corpus.write(b"a whole\n\nfile\r\n", "a.txt"),
        corpus.write(gzip.compress(json_lines("three"), mtime=0), "z.jsonl.gz"),
    ]
    summary = corpus.preprocess(inputs=inputs, num_workers=2)
    assert corpus.read_texts() == [text + END_OF_TEXT for text in ("one", "two", "a whole\n\nfile\n", "three")]
    assert summary.num_units == 3
    corpus.preprocess(inputs=[corpus.write(b"one\nmore\n\n \n two\n", "b.txt")], format="text-block")
    assert corpus.read_texts() == ["one\nmore\n" + END_OF_TEXT, " two\n" + END_OF_TEXT]


def test_bad_records_are_reported_with_lines_and_skipped(corpus: Corpus) -> None:
    content = json_lines("one", "two") + b'{"text": 2}\n' + json_lines("three") + b'{"text": "cut'
    summary = corpus.preprocess(content, max_bad_lines=2, unit_bytes=10, num_workers=2)
    assert corpus.read_texts() == ["one" + END_OF_TEXT, "two" + END_OF_TEXT, "three" + END_OF_TEXT]
    records = [json.loads(line) for line in Path(summary.bad_path or "").read_text().splitlines()]
    assert [(fields["line"], fields["byte_offset"]) for fields in records] == [(3, 32), (5, 62)]
    assert records[0]["file"].endswith("c.jsonl") and records[0]["opening"] == '{"text": 2}'
    assert "must be a string" in records[0]["reason"] and "not JSON" in records[1]["reason"]
    corpus.preprocess(json_lines("one"))
    assert corpus.list_leftovers() == [], "what an earlier job said of its bad lines goes when none is bad"


@pytest.mark.parametrize(
    "bad_line, reason",
    [
        (b'{"txt": "a"}', "has no key 'text' .--json-key., only 'txt'"),
        (b'{"text": null}', "must be a string, got null"),
        (b'{"text": "a\\u0000"}', "contains a NUL"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_too_many_bad_lines_raise_and_write_nothing(corpus: Corpus, bad_line: bytes, reason: str) -> None:
    content = json_lines("one", "two") + bad_line + b"\n" + json_lines("three")
    with pytest.raises(DataError, match=rf"at most 0 .*got 1 so far:\n  .*c.jsonl:3 \(byte 32\): .*{reason}") as error:
        corpus.preprocess(content)
    assert "out.bad.jsonl" in str(error.value) and "out.bad.jsonl" in corpus.list_leftovers()
    assert not corpus.prefix.with_suffix(".bin").exists()
    with pytest.raises(DataError, match="at most 1 bad line may .* got 2"):
        corpus.preprocess(content + bad_line, max_bad_lines=1)


def test_bad_line_fraction_counts_all_lines(corpus: Corpus) -> None:
    small, large = json_lines("a") * 9 + b"x\n", json_lines("a") * 1000
    corpus.preprocess(small, max_bad_fraction=0.1)
    with pytest.raises(DataError, match=r"at most 0.09 of all lines .*max-bad-fraction.*, got 1 of 10"):
        corpus.preprocess(small, max_bad_fraction=0.09)
    with pytest.raises(DataError, match="at most 0 bad lines"):
        corpus.preprocess(small, max_bad_fraction=0.5, max_bad_lines=0)
    assert corpus.preprocess(b"x\n" * 8 + large, max_bad_fraction=0.01).num_bad == 8
    with pytest.raises(DataError, match="0.001 of all lines .* got 8 of 1008"):
        corpus.preprocess(large + b"x\n" * 8, max_bad_fraction=0.001)
    assert corpus.preprocess(b"x\n" * 1100 + large * 2, max_bad_fraction=0.4, unit_bytes=2200).num_bad == 1100


def test_exceeded_bad_line_fraction_ends_job_early(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(operation: str, path: Path) -> None:
        assert not path.name.startswith("unit-000003"), "the rest is not read"

    monkeypatch.setattr(files, "before_operation", fail)
    with pytest.raises(DataError, match="0.1 of all lines .* got [0-9]+ of [0-9]+ so far"):
        corpus.preprocess(b"x\n" * 1000, max_bad_fraction=0.1, unit_bytes=500)
    with pytest.raises(DataError, match="--max-bad-fraction.* got 2 of 3"):
        corpus.preprocess(b"".join((json_lines("a"), b"x\n" * 2)), max_bad_fraction=0.5, unit_bytes=16)


def test_max_document_chars_rejects_longer_documents(corpus: Corpus) -> None:
    corpus.preprocess(json_lines("a" * 50, "b"))
    summary = corpus.preprocess(max_document_chars=49, max_bad_lines=1)
    assert corpus.read_texts() == ["b" + END_OF_TEXT] and summary.num_bad == 1


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", json_lines("", "")])
def test_empty_corpus_is_rejected(corpus: Corpus, content: bytes) -> None:
    with pytest.raises(DataError, match="no documents in .*c.jsonl"):
        corpus.preprocess(content)
    assert corpus.list_leftovers() == []


@pytest.mark.parametrize("limits", [{"max_bad_lines": 5}, {"max_bad_fraction": 1.0}])
def test_corpus_of_only_bad_lines_is_rejected_despite_limits(corpus: Corpus, limits: dict[str, float]) -> None:
    """Row D03 with D01: the message names the first bad lines and the file that lists all."""
    with pytest.raises(DataError) as raised:
        corpus.preprocess(b"x\n\n" + b'{"txt": 1}\n', **limits)
    first, *lines, last = str(raised.value).splitlines()
    assert first.startswith("no documents in ") and first.endswith("(1 empty, 2 bad):")
    assert [re.search(r"c.jsonl:(\d) \(byte (\d)\): ", line).groups() for line in lines] == [("1", "0"), ("3", "3")]  # type: ignore[union-attr]
    assert last.startswith("The complete list is in ") and "out.bad.jsonl. Correct them." in last
    assert corpus.list_leftovers() == ["out.bad.jsonl"]


def test_giant_line_is_chunked_and_round_trips(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_TEXT_CHARS", 50)
    text = "word " * 30 + "line\n" * 30 + "x" * 200
    assert "".join(encode.split_text(text)) == text and max(map(len, encode.split_text(text))) <= 50
    corpus.preprocess(json_lines("short", text, "last"))
    assert corpus.read_texts() == ["short" + END_OF_TEXT, text + END_OF_TEXT, "last" + END_OF_TEXT]


def test_chunked_document_has_ids_of_unchunked_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {line_idx}\n" + "\n" * (line_idx % 5) + "next\n" for line_idx in range(40))
    (tmp_path / "t.json").write_bytes(train.train_bpe([text], 300))
    bpe_tokenizer = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert {len(bpe_tokenizer.encode(blank)) for blank in ("\n\n", "\n\n\n")} == {1}, (
        "a cut behind any of them would tell"
    )
    encoder = encode.Encoder(bpe_tokenizer, ("text",), append_eod=False)
    for size in range(30, 80):
        monkeypatch.setattr(encode, "MAX_TEXT_CHARS", size)
        assert len(list(encode.split_text(text))) > 5
        encoded = encoder.encode([preprocess.Record("c", 1, 0, text.encode())], "text-file")
        assert encoded.tokens.tolist() == bpe_tokenizer.encode(text)


def test_chunking_inserts_no_space_into_long_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = pytest.importorskip("tokenizers")
    letters = [(letter, -2.0) for letter in "▁abc\n"]
    library_tokenizer = hf.Tokenizer(hf.models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *letters], 0, False))
    library_tokenizer.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always")
    library_tokenizer.decoder = hf.decoders.Metaspace(prepend_scheme="always")
    library_tokenizer.add_special_tokens(["</s>"])
    library_tokenizer.save(str(tmp_path / "t.json"))
    built_tokenizer = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    encoder, text = encode.Encoder(built_tokenizer, ("text",), append_eod=False), "abc" * 20 + "\n" + "cab" * 9
    expected_ids = encoder.encode([preprocess.Record("c", 1, 0, text.encode())], "text-file").tokens.tolist()
    monkeypatch.setattr(encode, "MAX_TEXT_CHARS", 25)
    chunked_ids = encoder.encode([preprocess.Record("c", 1, 0, text.encode())], "text-file").tokens.tolist()
    assert chunked_ids == expected_ids and built_tokenizer.decode(chunked_ids) == text


def test_gigatoken_gets_sample_from_entire_corpus(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled_texts: list[str] = []

    def with_gigatoken(tokenizer: object, sample: list[str], *, is_required: bool) -> object:
        assert is_required, "it was asked for by name"
        sampled_texts.extend(sample)
        return tokenizer

    monkeypatch.setattr("megatron.data.preprocess.job.with_gigatoken", with_gigatoken)
    monkeypatch.setattr("megatron.data.preprocess.job._MIN_CHARS", 3)
    corpus.preprocess(json_lines(*GOOD_TEXTS), unit_bytes=100, use_gigatoken=True)
    assert set(sampled_texts) == {"doc"} and len(sampled_texts) == 16 and len(corpus.read_texts()) == 60
