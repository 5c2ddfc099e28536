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
from tests.helpers.preprocess_job import END, GOOD, Corpus, lines, small_tokenizer
from tests.tokenizer.conftest import LEFT_IN_CHARACTERS, NOT_CHINESE, mixed_lines


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def test_documents_come_back_each_with_its_end(corpus: Corpus) -> None:
    summary = corpus.run(lines(*GOOD, "", END) + b"\n \n")
    assert corpus.texts() == [text + END for text in [*GOOD, END]]
    assert (summary.num_documents, summary.num_empty, summary.num_bad, summary.bad_path) == (61, 3, 0, None)
    assert summary.num_tokens == IndexedDataset(corpus.prefix).num_tokens and corpus.names() == []
    corpus.run(append_eod=False)
    assert corpus.texts() == [*GOOD, END]


def test_bytes_depend_neither_on_the_processes_nor_on_the_units_nor_on_the_chunks(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.write(lines(*GOOD, ""))
    outputs = set()
    for workers, unit_bytes, chunk_bytes in [(1, 1 << 20, 1 << 18), (2, 500, 1), (16, 300, 100)]:
        monkeypatch.setattr(encode, "CHUNK_BYTES", chunk_bytes)
        summary = corpus.run(num_workers=workers, unit_bytes=unit_bytes)
        assert summary.num_units == -(-len(lines(*GOOD, "")) // unit_bytes)
        outputs.add(corpus.output())
    assert len(outputs) == 1


@pytest.fixture(scope="module")
def cpm_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of CPM-1's kind, with words that are left in characters among its pieces."""
    path = tmp_path_factory.mktemp("cpm") / "chinese_vocab.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*LEFT_IN_CHARACTERS, *NOT_CHINESE, "document second line"] * 5),
            model_writer=file,
            vocab_size=200,
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
        )
    return path


@pytest.mark.parametrize(
    "count, chunk_bytes, settings",
    [
        (900, 2000, [(1, 1 << 24), (2, 4000), (3, 1500), (1, 1500)]),
        pytest.param(
            200_000, 1 << 18, [(w, u) for w in (1, 2, 3) for u in (1 << 24, 1 << 20, 70_000)], marks=pytest.mark.slow
        ),
    ],
)
def test_bytes_of_mixed_text_cut_by_words_do_not_depend_on_the_processes_nor_on_the_units(
    corpus: Corpus,
    cpm_vocabulary: Path,
    count: int,
    chunk_bytes: int,
    settings: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a process remembers of words must not show in the ids, whatever it read before."""
    monkeypatch.setattr(encode, "CHUNK_BYTES", chunk_bytes)
    content = lines(*filter(str.strip, mixed_lines(count, 7, GOOD)))
    outputs = set()
    for workers, unit_bytes in settings:
        chinese_words._known_runs.clear()
        corpus.run(
            content,
            make_tokenizer=lambda: tokenizer.build("CPM1", tokenizer_path=cpm_vocabulary),
            append_eod=False,
            num_workers=workers,
            unit_bytes=unit_bytes,
        )
        outputs.add(corpus.output())
    assert len(outputs) == 1


def test_a_text_has_the_same_ids_beside_a_giant_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encode, "MAX_PIECE", 100)
    library = tokenizers.Tokenizer.from_str(small_tokenizer().description)  # type: ignore[attr-defined]
    library.normalizer = tokenizers.normalizers.Strip()
    library.add_tokens(["<pad>"])
    library.save(str(tmp_path / "t.json"))
    encoder = encode.Encoder(tokenizer.build(tokenizer_path=tmp_path / "t.json"), ["text"], append_eod=False)
    texts = ["a<pad>\n", "b<pad>  ", "c ", " d"]
    alone = [encoder._encode_texts([text])[0].tolist() for text in texts]
    tokens, sizes = encoder._encode_texts([*texts, "giant " * 50])
    assert [part.tolist() for part in np.split(tokens, np.cumsum(sizes))[:4]] == alone


def test_inputs_of_several_formats_keep_their_order(corpus: Corpus) -> None:
    inputs = [
        corpus.write(lines("one", "two"), "b.jsonl"),
        corpus.write(b"a whole\n\nfile\r\n", "a.txt"),
        corpus.write(gzip.compress(lines("three"), mtime=0), "z.jsonl.gz"),
    ]
    summary = corpus.run(inputs=inputs, num_workers=2)
    assert corpus.texts() == [text + END for text in ("one", "two", "a whole\n\nfile\n", "three")]
    assert summary.num_units == 3
    corpus.run(inputs=[corpus.write(b"one\nmore\n\n \n two\n", "b.txt")], format="text-block")
    assert corpus.texts() == ["one\nmore\n" + END, " two\n" + END]


def test_bad_records_are_told_with_their_lines_and_left_out(corpus: Corpus) -> None:
    content = lines("one", "two") + b'{"text": 2}\n' + lines("three") + b'{"text": "cut'
    summary = corpus.run(content, max_bad_lines=2, unit_bytes=10, num_workers=2)
    assert corpus.texts() == ["one" + END, "two" + END, "three" + END]
    records = [json.loads(line) for line in Path(summary.bad_path or "").read_text().splitlines()]
    assert [(fields["line"], fields["byte_offset"]) for fields in records] == [(3, 32), (5, 62)]
    assert records[0]["file"].endswith("c.jsonl") and records[0]["opening"] == '{"text": 2}'
    assert "must be a string" in records[0]["reason"] and "not JSON" in records[1]["reason"]
    corpus.run(lines("one"))
    assert corpus.names() == [], "what an earlier job said of its bad lines goes when none is bad"


@pytest.mark.parametrize(
    "bad, reason",
    [
        (b'{"txt": "a"}', "has no key 'text' .--json-key., only 'txt'"),
        (b'{"text": null}', "must be a string, got null"),
        (b'{"text": "a\\u0000"}', "contains a NUL"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_too_many_bad_lines_are_named_and_nothing_is_written(corpus: Corpus, bad: bytes, reason: str) -> None:
    content = lines("one", "two") + bad + b"\n" + lines("three")
    with pytest.raises(DataError, match=rf"at most 0 .*got 1 so far:\n  .*c.jsonl:3 \(byte 32\): .*{reason}") as error:
        corpus.run(content)
    assert "out.bad.jsonl" in str(error.value) and "out.bad.jsonl" in corpus.names()
    assert not corpus.prefix.with_suffix(".bin").exists()
    with pytest.raises(DataError, match="at most 1 bad line may .* got 2"):
        corpus.run(content + bad, max_bad_lines=1)


def test_a_share_of_bad_lines_is_one_of_all_lines(corpus: Corpus) -> None:
    some, many = lines("a") * 9 + b"x\n", lines("a") * 1000
    corpus.run(some, max_bad_fraction=0.1)
    with pytest.raises(DataError, match=r"at most 0.09 of all lines .*max-bad-fraction.*, got 1 of 10"):
        corpus.run(some, max_bad_fraction=0.09)
    with pytest.raises(DataError, match="at most 0 bad lines"):
        corpus.run(some, max_bad_fraction=0.5, max_bad_lines=0)
    assert corpus.run(b"x\n" * 8 + many, max_bad_fraction=0.01).num_bad == 8
    with pytest.raises(DataError, match="0.001 of all lines .* got 8 of 1008"):
        corpus.run(many + b"x\n" * 8, max_bad_fraction=0.001)
    assert corpus.run(b"x\n" * 1100 + many * 2, max_bad_fraction=0.4, unit_bytes=2200).num_bad == 1100


def test_a_share_that_cannot_be_kept_any_more_ends_the_job_early(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(operation: str, path: Path) -> None:
        assert not path.name.startswith("unit-000003"), "the rest is not read"

    monkeypatch.setattr(files, "before_operation", fail)
    with pytest.raises(DataError, match="0.1 of all lines .* got [0-9]+ of [0-9]+ so far"):
        corpus.run(b"x\n" * 1000, max_bad_fraction=0.1, unit_bytes=500)
    with pytest.raises(DataError, match="--max-bad-fraction.* got 2 of 3"):
        corpus.run(b"".join((lines("a"), b"x\n" * 2)), max_bad_fraction=0.5, unit_bytes=16)


def test_a_document_is_too_long_only_where_a_limit_is_given(corpus: Corpus) -> None:
    corpus.run(lines("a" * 50, "b"))
    summary = corpus.run(max_document_chars=49, max_bad_lines=1)
    assert corpus.texts() == ["b" + END] and summary.num_bad == 1


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", lines("", "")])
def test_an_empty_corpus_is_refused(corpus: Corpus, content: bytes) -> None:
    with pytest.raises(DataError, match="no documents in .*c.jsonl"):
        corpus.run(content)
    assert corpus.names() == []


@pytest.mark.parametrize("allowed", [{"max_bad_lines": 5}, {"max_bad_fraction": 1.0}])
def test_a_corpus_of_bad_lines_only_is_refused_however_many_may_be_bad(
    corpus: Corpus, allowed: dict[str, float]
) -> None:
    """Row D03 with D01: the message names the first bad lines and the file that lists all."""
    with pytest.raises(DataError) as caught:
        corpus.run(b"x\n\n" + b'{"txt": 1}\n', **allowed)
    first, *lines, last = str(caught.value).splitlines()
    assert first.startswith("no documents in ") and first.endswith("(1 empty, 2 bad):")
    assert [re.search(r"c.jsonl:(\d) \(byte (\d)\): ", line).groups() for line in lines] == [("1", "0"), ("3", "3")]  # type: ignore[union-attr]
    assert last.startswith("The complete list is in ") and "out.bad.jsonl. Correct them." in last
    assert corpus.names() == ["out.bad.jsonl"]


def test_a_giant_line_is_cut_into_pieces_that_give_it_back(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_PIECE", 50)
    text = "word " * 30 + "line\n" * 30 + "x" * 200
    assert "".join(encode.pieces(text)) == text and max(map(len, encode.pieces(text))) <= 50
    corpus.run(lines("short", text, "last"))
    assert corpus.texts() == ["short" + END, text + END, "last" + END]


def test_a_long_document_has_the_ids_that_it_has_uncut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number}\n" + "\n" * (number % 5) + "next\n" for number in range(40))
    (tmp_path / "t.json").write_bytes(train.train_bpe([text], 300))
    built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert {len(built.encode(blank)) for blank in ("\n\n", "\n\n\n")} == {1}, "a cut behind any of them would tell"
    encoder = encode.Encoder(built, ("text",), append_eod=False)
    for size in range(30, 80):
        monkeypatch.setattr(encode, "MAX_PIECE", size)
        assert len(list(encode.pieces(text))) > 5
        encoded = encoder.encode([preprocess.Record("c", 1, 0, text.encode())], "text-file")
        assert encoded.tokens.tolist() == built.encode(text)


def test_a_cut_puts_no_space_into_a_long_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = pytest.importorskip("tokenizers")
    letters = [(letter, -2.0) for letter in "▁abc\n"]
    made = hf.Tokenizer(hf.models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *letters], 0, False))
    made.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = hf.decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "t.json"))
    built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    encoder, text = encode.Encoder(built, ("text",), append_eod=False), "abc" * 20 + "\n" + "cab" * 9
    whole = encoder.encode([preprocess.Record("c", 1, 0, text.encode())], "text-file").tokens.tolist()
    monkeypatch.setattr(encode, "MAX_PIECE", 25)
    cut = encoder.encode([preprocess.Record("c", 1, 0, text.encode())], "text-file").tokens.tolist()
    assert cut == whole and built.decode(cut) == text


def test_gigatoken_looks_at_a_sample_from_all_over_the_corpus(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def with_gigatoken(tokenizer: object, sample: list[str], *, is_required: bool) -> object:
        assert is_required, "it was asked for by name"
        seen.extend(sample)
        return tokenizer

    monkeypatch.setattr("megatron.data.preprocess.job.with_gigatoken", with_gigatoken)
    monkeypatch.setattr("megatron.data.preprocess.job._LEAST_CHARS", 3)
    corpus.run(lines(*GOOD), unit_bytes=100, use_gigatoken=True)
    assert set(seen) == {"doc"} and len(seen) == 16 and len(corpus.texts()) == 60
