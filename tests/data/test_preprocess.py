from __future__ import annotations

import functools
import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron import tokenizer
from megatron.data import TokenFile, preprocess
from megatron.data.preprocess import encode, job, sources
from megatron.errors import DataError
from megatron.tokenizer import train

GOOD = [f"document {number}\nsecond line 第{number}行" for number in range(60)]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "t.json"
    path.write_bytes(train.train_bpe(GOOD, 300))
    return path


@pytest.fixture
def run(vocabulary: Path, tmp_path: Path) -> Any:
    def run(content: bytes, **changed: Any) -> tuple[preprocess.Summary, list[str]]:
        corpus = tmp_path / "c.txt"
        corpus.write_bytes(content)
        values = {"inputs": [corpus], "output_prefix": str(tmp_path / "out"), "format": "jsonl"} | changed
        make = functools.partial(tokenizer.build, tokenizer_path=vocabulary)
        summary = preprocess.run(preprocess.Job(make_tokenizer=make, **values))
        file, built = TokenFile(tmp_path / "out"), make()
        return summary, [built.decode(file.read(d)) for d in range(file.num_documents)]

    return run


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


END = "<|endoftext|>"


def test_documents_come_back_each_with_its_end(run: Any) -> None:
    summary, texts = run(lines(*GOOD, "", END))
    assert texts == [text + END for text in [*GOOD, END]]
    assert (summary.num_documents, summary.num_empty, summary.num_bad) == (61, 1, 0)
    assert run(lines(*GOOD), append_eod=False)[1] == GOOD


def test_bytes_do_not_depend_on_the_number_of_processes(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "CHUNK_BYTES", 100)
    outputs = set()
    for workers in (1, 2, 4):
        run(lines(*GOOD), num_workers=workers)
        outputs.add(tuple((tmp_path / f"out{s}").read_bytes() for s in (".bin", ".idx", ".meta.json")))
    assert len(outputs) == 1


@pytest.mark.parametrize(
    "bad, reason",
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"txt": "a"}', "has no key 'text' .--json-key., only 'txt'"),
        (b'{"text": null}', "must be a string, got null"),
        (b'{"text": [1]}', "must be a string, got a list"),
        (b'["text"]', "must be a JSON object with the key 'text', got a list"),
        (b'{"text": "\xff"}', "not JSON"),
        (b'{"text": "a\\u0000"}', "holds a NUL"),
        (b'{"text": "\\ud800"}', "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(run: Any, tmp_path: Path, bad: bytes, reason: str) -> None:
    content = lines("one", "two") + bad + b"\n" + lines("three")
    with pytest.raises(DataError, match=rf"at most 0 .*\n  .*c.txt:3 \(byte 32\): .*{reason}"):
        run(content)
    assert [path.name for path in tmp_path.iterdir()] == ["c.txt"]
    summary, texts = run(content, max_bad_lines=1)
    assert texts == ["one" + END, "two" + END, "three" + END] and summary.num_bad == 1
    with pytest.raises(DataError, match="at most 1 bad lines .* got 2"):
        run(content + bad, max_bad_lines=1)


def test_byte_order_mark_carriage_returns_and_line_separators_are_accepted(run: Any) -> None:
    content = (
        b"\xef\xbb\xbf" + lines("one\r\ntwo").replace(b"\n", b"\r\n") + b"\r\n \r\n" + '{"text": "a\u2028b"}'.encode()
    )
    assert run(content)[1] == ["one\ntwo" + END, "a\u2028b" + END]


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", lines("", "")])
@pytest.mark.parametrize("format", ["jsonl", "text-file", "text-block"])
def test_an_empty_corpus_is_refused(run: Any, content: bytes, format: str) -> None:
    if format == "jsonl" or not content.strip():
        with pytest.raises(DataError, match="no documents in .*c.txt"):
            run(content, format=format)


def test_plain_text_by_file_and_by_blank_lines(run: Any) -> None:
    content = b"one\nmore\n\n \n two\r\n"
    assert run(content, format="text-file")[1] == ["one\nmore\n\n \n two\n" + END]
    assert run(content, format="text-block")[1] == ["one\nmore\n" + END, " two\n" + END]
    with pytest.raises(DataError, match=r"c.txt:4 \(byte 6\): not UTF-8 text .*: two\\xff|c.txt:4"):
        run(b"one\n\n\ntwo\xff\n", format="text-block")


@pytest.mark.parametrize(
    "content, text",
    [
        (gzip.compress(b"x", mtime=0), "looks like gzip; unpack it: gzip -d"),
        (b"\xfd7zXZ\x00", "looks like xz"),
        (b"PAR1xx", "looks like parquet"),
        ("words".encode("utf-16"), "looks like UTF-16"),
        (bytes(100), "looks like a binary file"),
        ("words".encode("utf-16-le"), "looks like a binary file"),
    ],
)
def test_what_is_no_text_is_named(run: Any, content: bytes, text: str) -> None:
    with pytest.raises(DataError, match=text):
        run(content)


def test_a_giant_line_is_cut_into_pieces_that_give_it_back(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_PIECE", 50)
    text = "word " * 30 + "line\n" * 30 + "x" * 200
    assert "".join(encode.pieces(text)) == text and max(map(len, encode.pieces(text))) <= 50
    assert run(lines("short", text, "last"))[1] == ["short" + END, text + END, "last" + END]


def test_a_dead_process_ends_the_job(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode.Encoder, "encode", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="one of the 2 encoding processes died"):
        run(lines(*GOOD), num_workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["c.txt"]


def test_formats_are_guessed_by_name() -> None:
    assert sources.guess_format([Path("a.jsonl"), Path("b.json")]) == "jsonl"
    assert sources.guess_format([Path("a.txt"), Path("b")]) == "text-file"
    with pytest.raises(DataError, match="give --format"):
        sources.guess_format([Path("a.txt"), Path("b.json")])
