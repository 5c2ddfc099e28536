"""Token files that go to an object store: the bytes of the disk, and nothing half-written that counts as whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.data import token_upload
from megatron.errors import DataError
from tests.helpers.fake_store import intercept, make_empty_store, needs_moto, s3
from tests.helpers.preprocess_job import GOOD_TEXTS, SUFFIXES, Corpus, json_lines
from tools import merge_data, preprocess_data

CONTENT = json_lines(*GOOD_TEXTS[:30])
TARGET = "memory://b/c/out"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    return make_empty_store(monkeypatch)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def stored_names(store: MemoryFileSystem) -> list[str]:
    return sorted(name.removeprefix("/b/c/") for name in store.store)


def uploaded_files(store: MemoryFileSystem) -> tuple[bytes, ...]:
    return tuple(store.cat_file(f"/b/c/out{suffix}") for suffix in SUFFIXES)


def test_store_receives_local_bytes_with_index_last(
    corpus: Corpus, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.preprocess(CONTENT)
    expected, uploads = corpus.read_output(), []
    intercept(monkeypatch, "put_file", lambda source, name, **_: uploads.append((name, stored_names(store))))
    store.pipe("/b/c/out.idx", b"of an earlier set")
    corpus.preprocess(CONTENT, upload_to=TARGET)
    assert uploaded_files(store) == expected and corpus.list_leftovers() == []
    assert uploads == [
        ("/b/c/out.bin", []),
        ("/b/c/out.meta.json", ["out.bin"]),
        ("/b/c/out.idx", ["out.bin", "out.meta.json"]),
    ]


@pytest.mark.parametrize("failure", ["an error", "a short body", "another byte"])
def test_failed_upload_is_retried_and_leaves_no_index(
    corpus: Corpus, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd, failure: str
) -> None:
    corpus.preprocess(CONTENT)
    expected, uploads, original_put_file = corpus.read_output(), [], MemoryFileSystem.put_file
    failing = {"index": 1}

    def put_file(self: MemoryFileSystem, source: str, name: str) -> None:
        uploads.append(name)
        if failure == "an error" and failing["index"] and name.endswith(".idx"):
            raise OSError("500 Internal Server Error")
        original_put_file(self, source, name)
        if failing["index"] and name.endswith(".idx"):
            content = self.cat_file(name)
            self.pipe_file(name, content[:-1] if failure == "a short body" else content[:-1] + b"!")

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(
        DataError, match=r"out.idx: uploading .* failed 3 times .*The local token files .*out.*--resume"
    ):
        corpus.preprocess(CONTENT, upload_to=TARGET)
    assert "retrying in 0.0 s" in capfd.readouterr().err and uploads.count("/b/c/out.idx") == 3
    assert stored_names(store) == ["out.bin", "out.meta.json"]
    failing["index"] = 0
    corpus.preprocess(upload_to=TARGET, resume=True)
    assert uploaded_files(store) == expected and corpus.list_leftovers() == []


@pytest.mark.parametrize(
    "error, text",
    [
        (PermissionError("Forbidden"), "denies access .*Check the cred"),
        (FileNotFoundError("no bucket"), "does not exist"),
    ],
)
def test_unwritable_store_is_rejected_before_job_starts(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    intercept(monkeypatch, "pipe_file", refuse)
    with pytest.raises(DataError, match=f"--output-prefix must name a writable location in an object store: .*{text}"):
        corpus.preprocess(CONTENT, upload_to=TARGET)
    assert corpus.list_leftovers() == []


def test_command_line_tools_accept_object_store_names(corpus: Corpus, store: MemoryFileSystem, capfd) -> None:
    args = preprocess_data.parse_args(["--input", "c.jsonl", "--output-prefix", TARGET, "--work-dir", "w"])
    job = preprocess_data.make_job(args)
    assert job.upload_to == TARGET and job.output_prefix == token_upload.local_prefix(TARGET, Path("w"))
    assert token_upload.local_prefix(TARGET, Path("w")) != token_upload.local_prefix("memory://b/d/out", Path("w"))
    with pytest.raises(SystemExit):
        preprocess_data.parse_args(["--verify", "--output-prefix", TARGET])
    corpus.preprocess(CONTENT)
    flags = ["--input", str(corpus.prefix), "--output-prefix", TARGET, "--work-dir", str(corpus.folder / "w")]
    assert merge_data.main(flags) == 0 and uploaded_files(store) == corpus.read_output()
    assert merge_data.main(["--input", TARGET, "--output-prefix", "x"]) == 2
    assert f"--input must be on this machine, got {TARGET}" in capfd.readouterr().err


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_upload_equals_local_bytes(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3."""
    corpus.preprocess(CONTENT)
    expected = corpus.read_output()
    with s3(monkeypatch) as files:
        corpus.preprocess(CONTENT, upload_to="s3://bucket/c/out")
        assert tuple(files.cat_file(f"bucket/c/out{suffix}") for suffix in SUFFIXES) == expected
        with pytest.raises(DataError, match="s3://none/out.probe does not exist"):
            corpus.preprocess(CONTENT, upload_to="s3://none/out")
