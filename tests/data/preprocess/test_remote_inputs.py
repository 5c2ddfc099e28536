"""Inputs in an object store, by names of fsspec: the tokens of the same files on the disk, however it answers."""

from __future__ import annotations

import gzip
import importlib.util
import io
import random
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron import object_store
from megatron.data.preprocess import find_inputs
from megatron.errors import DataError
from tests.helpers.fake_store import make_empty_store, needs_moto, s3
from tests.helpers.preprocess_job import GOOD_TEXTS, Corpus, json_lines
from tools import preprocess_data

CONTENT = json_lines(*GOOD_TEXTS[:30])


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    """An empty store in memory, ranges of 700 bytes, no pauses."""
    return make_empty_store(monkeypatch)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def run_on_disk(corpus: Corpus, **overrides: Any) -> tuple[bytes, ...]:
    corpus.preprocess(**overrides)
    return corpus.read_output()


def parquet_bytes(texts: list[str]) -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(arrow.table({"text": texts}), file, row_group_size=3)
    return file.getvalue()


@pytest.mark.parametrize("block_bytes", [1, 7, 1000])
def test_reads_at_any_position_equal_file_bytes(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(object_store, "BLOCK_BYTES", block_bytes)
    content = random.Random(0).randbytes(300)
    store.pipe("/b/c", content)
    rng = random.Random(block_bytes)
    with object_store.open_file("memory://b/c") as file, io.BytesIO(content) as expected:
        assert file.read() == content and file.seek(-3, io.SEEK_END) == 297
        for _ in range(60):
            position, num_bytes = rng.randrange(310), rng.randrange(40)
            assert file.seek(position) == expected.seek(position)
            assert file.read(num_bytes) == expected.read(num_bytes) and file.tell() == expected.tell()


def test_object_store_folder_equals_folder_on_disk(corpus: Corpus, store: MemoryFileSystem) -> None:
    files = {
        "a.jsonl": CONTENT,
        "z=1/b.jsonl.gz": gzip.compress(json_lines("packed", "twice")),
        "z=1/c.parquet": parquet_bytes([f"row {row}" for row in range(7)]),
        "d.txt": "窗前\r\n有一盏灯".encode(),
        "_SUCCESS": b"",
        ".a.jsonl.crc": b"crc",
    }
    for name, content in files.items():
        path = corpus.folder / "c" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        store.pipe(f"/bucket/c/{name}", content)
    expected = run_on_disk(corpus, inputs=[corpus.folder / "c"])
    for name in ("memory://bucket/c", "memory:///bucket/c/", f"file://{corpus.folder}/c"):
        corpus.preprocess(inputs=[name], unit_bytes=900, num_workers=2)
        assert corpus.read_output() == expected
    assert [name.removeprefix("memory://") for name in map(str, find_inputs(["memory://bucket/c"]))] == [
        f"/bucket/c/{name}" for name in ("a.jsonl", "d.txt", "z=1/b.jsonl.gz", "z=1/c.parquet")
    ]


def test_bad_lines_are_reported_with_their_line_number(corpus: Corpus, store: MemoryFileSystem) -> None:
    store.pipe("/b/c.jsonl", CONTENT + b"x\n")
    with pytest.raises(DataError, match=r"c.jsonl:31 \(byte \d+\): not JSON"):
        corpus.preprocess(inputs=["memory://b/c.jsonl"], unit_bytes=500)
    corpus.preprocess(inputs=["memory://b/c.jsonl"], unit_bytes=500, resume=True, max_bad_lines=1)
    assert len(corpus.read_texts()) == 30


def test_rewritten_object_is_different_input(corpus: Corpus, store: MemoryFileSystem) -> None:
    store.pipe("/b/c.jsonl", CONTENT + b"x\n")
    with pytest.raises(DataError, match="--resume continues"):
        corpus.preprocess(inputs=["memory://b/c.jsonl"], unit_bytes=500)
    store.pipe("/b/c.jsonl", CONTENT)
    with pytest.raises(DataError, match=rf"c.jsonl had {len(CONTENT) + 2} bytes, now {len(CONTENT)}"):
        corpus.preprocess(inputs=["memory://b/c.jsonl"], unit_bytes=500, resume=True)


@pytest.mark.parametrize("failure", ["an error", "a short body"])
def test_failed_store_reads_are_retried_and_logged(
    corpus: Corpus, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd, failure: str
) -> None:
    """Every second answer is an error 500, or lacks its last byte."""
    store.pipe("/b/c.jsonl", CONTENT)
    corpus.write(CONTENT)
    expected = run_on_disk(corpus)
    original_cat_file, requests = MemoryFileSystem.cat_file, []

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        requests.append(start)
        if len(requests) % 2:
            if failure == "an error":
                raise OSError("500 Internal Server Error")
            return original_cat_file(self, path, start, end)[:-1]
        return original_cat_file(self, path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    corpus.preprocess(inputs=["memory://b/c.jsonl"])
    stderr = capfd.readouterr().err
    reason = "500 Internal" if failure == "an error" else "received 699 of 700 bytes"
    assert corpus.read_output() == expected and f"reading bytes 0:700 failed (OSError: {reason}" in stderr
    assert "retrying in 0.0 s" in stderr


@pytest.mark.parametrize(
    "error, text, num_requests",
    [
        (OSError("503 Slow Down"), r"reading bytes 0:\d+ failed 3 times \(OSError: 503 Slow Down\)", 3),
        (PermissionError("Forbidden"), r"the store denies access \(PermissionError: Forbidden\). Check the cred", 1),
        (FileNotFoundError("x"), "memory://b/c.jsonl does not exist; check the name", 1),
    ],
)
def test_permanent_store_errors_end_job_and_leave_nothing(
    corpus: Corpus,
    store: MemoryFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    text: str,
    num_requests: int,
) -> None:
    store.pipe("/b/c.jsonl", CONTENT)
    requests: list[int] = []

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        requests.append(start)
        raise error

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(DataError, match=text):
        corpus.preprocess(inputs=["memory://b/c.jsonl"])
    assert requests.count(0) == num_requests and corpus.list_leftovers() == []


def test_invalid_remote_inputs_are_rejected(corpus: Corpus, store: MemoryFileSystem, monkeypatch) -> None:
    store.pipe("/b/spark/_temporary/0/x", b"")
    store.pipe("/b/spark/part-0.jsonl", CONTENT)
    store.pipe("/b/logs/executor.json", b"{}")
    store.pipe("/b/logs/completions/00000", b"")
    store.pipe("/b/empty/_SUCCESS", b"")
    for name, text in (
        ("memory://b/none", "memory://b/none does not exist; check the name"),
        ("memory://b/spark", "memory://b/spark must be finished; _temporary shows"),
        ("memory://b/logs", "b/logs is the log folder of datatrove"),
        ("memory://b/empty", "is a folder without files"),
        ("nosuch://b/c", "nosuch://b/c cannot be read: Protocol not known: nosuch"),
    ):
        with pytest.raises(DataError, match=text):
            find_inputs([name])
    if not importlib.util.find_spec("s3fs"):
        with pytest.raises(DataError, match=r"s3://b/c needs a package: .*For s3://, run: pip install -e '.\[s3\]'"):
            find_inputs(["s3://b/c"])
    args = preprocess_data.parse_args(["--input", "memory://b/c", "d", "--output-prefix", "o"])
    assert args.input == ["memory://b/c", Path("d")]


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_inputs_equal_files_on_disk(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3."""
    with s3(monkeypatch) as files:
        monkeypatch.setattr(object_store, "BLOCK_BYTES", 5000)
        contents = {
            "a.jsonl": json_lines(*GOOD_TEXTS * 20),
            "b.jsonl.gz": gzip.compress(json_lines(*GOOD_TEXTS)),
            "_SUCCESS": b"",
        }
        for name, content in contents.items():
            files.pipe(f"bucket/c/{name}", content)
            (corpus.folder / "c").mkdir(exist_ok=True)
            (corpus.folder / "c" / name).write_bytes(content)
        expected = run_on_disk(corpus, inputs=[corpus.folder / "c"])
        corpus.preprocess(inputs=["s3://bucket/c"], num_workers=2, unit_bytes=20_000)
        assert corpus.read_output() == expected
        with pytest.raises(DataError, match="s3://bucket/none does not exist"):
            find_inputs(["s3://bucket/none"])
