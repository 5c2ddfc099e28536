"""Workers that die or fail, full disks, two jobs at once: the job ends at once, says why, leaves nothing half-made."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron import files
from megatron.data import IndexedDataset, preprocess
from megatron.data.preprocess import encode, job, plan
from megatron.data.preprocess.job_types import Counts
from megatron.errors import DataError
from tests.helpers.preprocess_job import GOOD_TEXTS, Corpus, json_lines
from tests.helpers.token_data import write_documents

CONTENT = json_lines(*GOOD_TEXTS[:20])
UNIT_BYTES = len(CONTENT) // 3 + 1
LAST_UNIT_START = 2 * UNIT_BYTES


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    corpus = Corpus(tmp_path)
    corpus.write(CONTENT)
    yield corpus
    assert not multiprocessing.active_children(), "no process is left behind"


@pytest.mark.parametrize("failure", ["was killed by SIGKILL", "ended with code 7"])
def test_dead_worker_ends_job_and_names_unit(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    def die_or_wait(encoder: object, chunk: list[preprocess.Record], format: str) -> None:
        if chunk[-1].data == json_lines(GOOD_TEXTS[19]).strip():
            os.kill(os.getpid(), signal.SIGKILL) if "SIGKILL" in failure else os._exit(7)
        signal.pause()

    monkeypatch.setattr(encode.Encoder, "encode", die_or_wait)
    with pytest.raises(
        RuntimeError, match=rf"a worker process {failure}.* while it encoded .*c.jsonl bytes {LAST_UNIT_START}:"
    ):
        corpus.preprocess(num_workers=3, unit_bytes=UNIT_BYTES)
    assert corpus.list_leftovers() == []


def test_bad_lines_end_job_before_all_input_is_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_at_the_end(operation: str, path: Path) -> None:
        if path.name.startswith("unit-000002"):
            signal.alarm(10)
            signal.pause()

    monkeypatch.setattr(files, "before_operation", wait_at_the_end)
    with pytest.raises(DataError, match=r"got 1 so far:\n  .*c.jsonl:1 \(byte 0\): not JSON"):
        corpus.preprocess(b"x\n" + CONTENT, num_workers=1, unit_bytes=UNIT_BYTES)


@pytest.mark.parametrize(
    "error, error_type, text",
    [
        (DataError("c.jsonl.gz is damaged"), DataError, "c.jsonl.gz is damaged"),
        (KeyError("x"), RuntimeError, "failed while it encoded .*c.jsonl bytes 0:.*KeyError: 'x'"),
        (MemoryError(), RuntimeError, "failed while it encoded .*MemoryError"),
    ],
    ids=["data", "defect", "memory"],
)
def test_worker_errors_reach_user(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, error: Exception, error_type: type[Exception], text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(encode.Encoder, "encode", fail)
    with pytest.raises(error_type, match=text):
        corpus.preprocess()
    assert corpus.list_leftovers() == []


def test_second_job_with_same_prefix_is_rejected(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LOCK_TIMEOUT_S", 0.0)
    with job.lock_folder(corpus.folder / "out.parts"):
        with pytest.raises(
            DataError, match=rf"one job at a time may write .*/out; process {os.getpid()} is writing it"
        ):
            corpus.preprocess()
        with pytest.raises(DataError, match="one job at a time"):
            corpus.preprocess(resume=True)
    assert corpus.list_leftovers() == []
    corpus.preprocess()


def test_lock_works_without_disk_space_for_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(*_: object) -> None:
        signal.alarm(20) if not attempts else pytest.fail("tried again")
        attempts.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    attempts: list[int] = []
    monkeypatch.setattr(os, "pwrite", raise_disk_full)
    with job.lock_folder(tmp_path / "out.parts"):
        assert attempts
    signal.alarm(0)


@pytest.mark.parametrize("name", ["k/", "k/.", ""])
def test_prefix_without_name_is_rejected(corpus: Corpus, name: str) -> None:
    with pytest.raises(DataError, match="--output-prefix must end with a name"):
        corpus.preprocess(output_prefix=name and f"{corpus.folder}/{name}")
    assert corpus.list_leftovers() == []


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_disk_full_at_any_operation_leaves_old_or_new_output(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    full_marker, counter_file = corpus.folder / "full", corpus.folder / "seen"
    outcomes = []
    for fail_at in range(0, 1000, step):
        write_documents(corpus.prefix, [3, 4])
        counter_file.write_bytes(b"")

        def maybe_fill_disk(operation: str, path: Path, fail_at: int = fail_at) -> None:
            with open(counter_file, "ab") as file:  # counts for the job and its worker alike
                file.write(b".")
            if counter_file.stat().st_size > fail_at and operation in ("create", "write", "copy", "fsync"):
                full_marker.touch()
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files, "before_operation", maybe_fill_disk)
        try:
            corpus.preprocess(unit_bytes=UNIT_BYTES)
            is_full = False
        except DataError as error:
            assert "No space left on device" in str(error)
            assert any(text in str(error) for text in ("out cannot be written", "Free disk space; "))
            is_full = True
        monkeypatch.undo()
        outcomes.append(IndexedDataset(corpus.prefix).num_tokens == 7)
        assert is_full or not outcomes[-1]
        corpus.preprocess(resume=True, unit_bytes=UNIT_BYTES)
        assert corpus.list_leftovers() == [name for name in ("full", "seen") if (corpus.folder / name).exists()]
        if not full_marker.exists():
            break
        full_marker.unlink()
    assert outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {True, False}


def test_file_size_limit_is_named_instead_of_free_space(corpus: Corpus) -> None:
    content = json_lines(*GOOD_TEXTS) * 3
    corpus.preprocess(content)
    size = corpus.prefix.with_suffix(".bin").stat().st_size
    corpus.prefix.with_suffix(".bin").unlink()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))  # parts fit, what is made of them does not
        try:
            corpus.preprocess(unit_bytes=UNIT_BYTES)
        except DataError as error:
            limit = f"larger than the limit of `ulimit -f`, {size - 1:,} bytes. Raise the limit"
            is_named = limit in str(error) and "File too large" in str(error) and " are free" not in str(error)
            os._exit(2 if is_named else 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert not corpus.prefix.with_suffix(".bin").exists()
    summary = corpus.preprocess(resume=True)
    assert summary.num_resumed == summary.num_units and corpus.list_leftovers() == []


def test_insufficient_space_is_rejected_before_encoding(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: len(CONTENT) // 4)
    with pytest.raises(
        DataError, match=r"GB of input need at least 0.0 MB in .*out.parts, but 0.0 MB are free. Free disk space"
    ):
        corpus.preprocess()
    assert corpus.list_leftovers() == []


def test_insufficient_space_for_output_keeps_finished_units(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    checked_folders: list[Path] = []
    monkeypatch.setattr(
        files,
        "free_bytes",
        lambda folder: checked_folders.append(folder) or (1 << 40 if len(checked_folders) < 2 else 9),
    )
    with pytest.raises(DataError, match="of the finished parts needs .* 1 of 1 units are finished and saved"):
        corpus.preprocess()
    monkeypatch.undo()
    assert corpus.preprocess(resume=True).num_resumed == 1


def test_missing_disk_space_is_estimated_from_encoded_data(tmp_path: Path) -> None:
    counts = Counts(num_bytes=1_000_000, num_documents=1000, num_tokens=250_000)
    text = plan.disk_full_message(OSError(errno.ENOSPC, "full"), tmp_path, counts, total_bytes=4_000_000, itemsize=2)
    # whole: 4 x (500 kB of tokens, 24 bytes a document), twice; without the 504 kB that are there
    assert "about 3.7 MB are needed" in text
