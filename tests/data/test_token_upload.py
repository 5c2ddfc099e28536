"""Token files that go to an object store: the bytes of the disk, and nothing half-written that counts as whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.data import token_upload
from megatron.errors import DataError
from tests.helpers.fake_store import empty_store, intercept, needs_moto, s3
from tests.helpers.preprocess_job import GOOD, SUFFIXES, Corpus, lines
from tools import merge_data, preprocess_data

CONTENT = lines(*GOOD[:30])
TARGET = "memory://b/c/out"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    return empty_store(monkeypatch)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def held(store: MemoryFileSystem) -> list[str]:
    return sorted(name.removeprefix("/b/c/") for name in store.store)


def uploaded(store: MemoryFileSystem) -> tuple[bytes, ...]:
    return tuple(store.cat_file(f"/b/c/out{suffix}") for suffix in SUFFIXES)


def test_the_store_gets_the_bytes_of_the_disk_and_the_index_last(
    corpus: Corpus, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.run(CONTENT)
    expected, order = corpus.output(), []
    intercept(monkeypatch, "put_file", lambda source, name, **_: order.append((name, held(store))))
    store.pipe("/b/c/out.idx", b"of an earlier set")
    corpus.run(CONTENT, upload_to=TARGET)
    assert uploaded(store) == expected and corpus.names() == []
    assert order == [
        ("/b/c/out.bin", []),
        ("/b/c/out.meta.json", ["out.bin"]),
        ("/b/c/out.idx", ["out.bin", "out.meta.json"]),
    ]


@pytest.mark.parametrize("how", ["an error", "a short body", "another byte"])
def test_an_upload_that_fails_is_sent_again_and_what_fails_for_good_is_no_index(
    corpus: Corpus, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd, how: str
) -> None:
    corpus.run(CONTENT)
    expected, sent, answer = corpus.output(), [], MemoryFileSystem.put_file
    fails = {"index": 1}

    def put_file(self: MemoryFileSystem, source: str, name: str) -> None:
        sent.append(name)
        if how == "an error" and fails["index"] and name.endswith(".idx"):
            raise OSError("500 Internal Server Error")
        answer(self, source, name)
        if fails["index"] and name.endswith(".idx"):
            content = self.cat_file(name)
            self.pipe_file(name, content[:-1] if how == "a short body" else content[:-1] + b"!")

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(
        DataError, match=r"out.idx: uploading .* failed 3 times .*The local token files .*out.*--resume"
    ):
        corpus.run(CONTENT, upload_to=TARGET)
    assert "retrying in 0.0 s" in capfd.readouterr().err and sent.count("/b/c/out.idx") == 3
    assert held(store) == ["out.bin", "out.meta.json"]
    fails["index"] = 0
    corpus.run(upload_to=TARGET, resume=True)
    assert uploaded(store) == expected and corpus.names() == []


@pytest.mark.parametrize(
    "error, text",
    [
        (PermissionError("Forbidden"), "refuses access .*Check the cred"),
        (FileNotFoundError("no bucket"), "does not exist"),
    ],
)
def test_a_store_that_takes_nothing_is_found_before_the_work(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    intercept(monkeypatch, "pipe_file", refuse)
    with pytest.raises(DataError, match=f"--output-prefix must name a writable location in an object store: .*{text}"):
        corpus.run(CONTENT, upload_to=TARGET)
    assert corpus.names() == []


def test_the_tools_take_names_of_a_store(corpus: Corpus, store: MemoryFileSystem, capfd) -> None:
    args = preprocess_data.parse_args(["--input", "c.jsonl", "--output-prefix", TARGET, "--work-dir", "w"])
    job = preprocess_data.job_of(args)
    assert job.upload_to == TARGET and job.output_prefix == token_upload.local_prefix(TARGET, Path("w"))
    assert token_upload.local_prefix(TARGET, Path("w")) != token_upload.local_prefix("memory://b/d/out", Path("w"))
    with pytest.raises(SystemExit):
        preprocess_data.parse_args(["--verify", "--output-prefix", TARGET])
    corpus.run(CONTENT)
    flags = ["--input", str(corpus.prefix), "--output-prefix", TARGET, "--work-dir", str(corpus.folder / "w")]
    assert merge_data.main(flags) == 0 and uploaded(store) == corpus.output()
    assert merge_data.main(["--input", TARGET, "--output-prefix", "x"]) == 2
    assert f"--input must be on this machine, got {TARGET}" in capfd.readouterr().err


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_gets_the_bytes_of_the_disk(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3."""
    corpus.run(CONTENT)
    expected = corpus.output()
    with s3(monkeypatch) as files:
        corpus.run(CONTENT, upload_to="s3://bucket/c/out")
        assert tuple(files.cat_file(f"bucket/c/out{suffix}") for suffix in SUFFIXES) == expected
        with pytest.raises(DataError, match="s3://none/out.probe does not exist"):
            corpus.run(CONTENT, upload_to="s3://none/out")
