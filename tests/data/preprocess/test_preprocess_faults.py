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
from tests.helpers.preprocess_job import GOOD, Corpus, lines
from tests.helpers.token_data import write

CONTENT = lines(*GOOD[:20])
UNIT_BYTES = len(CONTENT) // 3 + 1
LAST = 2 * UNIT_BYTES


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    found = Corpus(tmp_path)
    found.write(CONTENT)
    yield found
    assert not multiprocessing.active_children(), "no process is left behind"


@pytest.mark.parametrize("how", ["was killed by SIGKILL", "ended with code 7"])
def test_a_dead_worker_ends_the_job_with_its_unit_named(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def die_or_wait(encoder: object, chunk: list[preprocess.Record], format: str) -> None:
        if chunk[-1].data == lines(GOOD[19]).strip():
            os.kill(os.getpid(), signal.SIGKILL) if "SIGKILL" in how else os._exit(7)
        signal.pause()

    monkeypatch.setattr(encode.Encoder, "encode", die_or_wait)
    with pytest.raises(RuntimeError, match=rf"a worker process {how}.* while it encoded .*c.jsonl bytes {LAST}:"):
        corpus.run(num_workers=3, unit_bytes=UNIT_BYTES)
    assert corpus.names() == []


def test_bad_lines_end_the_job_before_all_is_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_at_the_end(operation: str, path: Path) -> None:
        if path.name.startswith("unit-000002"):
            signal.alarm(10)
            signal.pause()

    monkeypatch.setattr(files, "before_operation", wait_at_the_end)
    with pytest.raises(DataError, match=r"got 1 so far:\n  .*c.jsonl:1 \(byte 0\): not JSON"):
        corpus.run(b"x\n" + CONTENT, num_workers=1, unit_bytes=UNIT_BYTES)


@pytest.mark.parametrize(
    "error, kind, text",
    [
        (DataError("c.jsonl.gz is damaged"), DataError, "c.jsonl.gz is damaged"),
        (KeyError("x"), RuntimeError, "failed while it encoded .*c.jsonl bytes 0:.*KeyError: 'x'"),
        (MemoryError(), RuntimeError, "failed while it encoded .*MemoryError"),
    ],
    ids=["data", "defect", "memory"],
)
def test_what_a_worker_raises_reaches_the_user(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(encode.Encoder, "encode", fail)
    with pytest.raises(kind, match=text):
        corpus.run()
    assert corpus.names() == []


def test_the_second_job_on_a_prefix_is_refused(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "PATIENCE_S", 0.0)
    with job.locked(corpus.folder / "out.parts"):
        with pytest.raises(DataError, match=rf"one job at a time may write .*/out; process {os.getpid()} does"):
            corpus.run()
        with pytest.raises(DataError, match="one job at a time"):
            corpus.run(resume=True)
    assert corpus.names() == []
    corpus.run()


def test_a_disk_without_room_for_the_number_of_the_process_is_locked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        signal.alarm(20) if not tried else pytest.fail("tried again")
        tried.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    tried: list[int] = []
    monkeypatch.setattr(os, "pwrite", full)
    with job.locked(tmp_path / "out.parts"):
        assert tried
    signal.alarm(0)


@pytest.mark.parametrize("name", ["k/", "k/.", ""])
def test_a_prefix_without_a_name_is_refused(corpus: Corpus, name: str) -> None:
    with pytest.raises(DataError, match="--output-prefix must end with a name"):
        corpus.run(output_prefix=name and f"{corpus.folder}/{name}")
    assert corpus.names() == []


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fills_at_any_operation_leaves_the_old_pair_or_the_new_one(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    full, seen = corpus.folder / "full", corpus.folder / "seen"
    outcomes = []
    for kth in range(0, 1000, step):
        write(corpus.prefix, [3, 4])
        seen.write_bytes(b"")

        def fill(operation: str, path: Path, kth: int = kth) -> None:
            with open(seen, "ab") as file:  # counts for the job and its worker alike
                file.write(b".")
            if seen.stat().st_size > kth and operation in ("create", "write", "copy", "fsync"):
                full.touch()
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files, "before_operation", fill)
        try:
            corpus.run(unit_bytes=UNIT_BYTES)
            is_full = False
        except DataError as error:
            assert "No space left on device" in str(error)
            assert any(text in str(error) for text in ("out cannot be written", "Free disk space; "))
            is_full = True
        monkeypatch.undo()
        outcomes.append(IndexedDataset(corpus.prefix).num_tokens == 7)
        assert is_full or not outcomes[-1]
        corpus.run(resume=True, unit_bytes=UNIT_BYTES)
        assert corpus.names() == [name for name in ("full", "seen") if (corpus.folder / name).exists()]
        if not full.exists():
            break
        full.unlink()
    assert outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {True, False}


def test_a_limit_on_the_size_of_files_is_named_and_not_the_room_on_the_disk(corpus: Corpus) -> None:
    content = lines(*GOOD) * 3
    corpus.run(content)
    size = corpus.prefix.with_suffix(".bin").stat().st_size
    corpus.prefix.with_suffix(".bin").unlink()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))  # parts fit, what is made of them does not
        try:
            corpus.run(unit_bytes=UNIT_BYTES)
        except DataError as error:
            limit = f"larger than the limit of `ulimit -f`, {size - 1:,} bytes. Raise the limit"
            is_named = limit in str(error) and "File too large" in str(error) and " are free" not in str(error)
            os._exit(2 if is_named else 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert not corpus.prefix.with_suffix(".bin").exists()
    summary = corpus.run(resume=True)
    assert summary.num_resumed == summary.num_units and corpus.names() == []


def test_too_little_room_is_refused_before_anything_is_encoded(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: len(CONTENT) // 4)
    with pytest.raises(
        DataError, match=r"GB of input need at least 0.0 MB in .*out.parts, but 0.0 MB are free. Free disk space"
    ):
        corpus.run()
    assert corpus.names() == []


def test_too_little_room_for_the_output_is_refused_and_the_parts_are_kept(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(files, "free_bytes", lambda folder: asked.append(folder) or (1 << 40 if len(asked) < 2 else 9))
    with pytest.raises(DataError, match="of the finished parts needs .* 1 of 1 units are finished and saved"):
        corpus.run()
    monkeypatch.undo()
    assert corpus.run(resume=True).num_resumed == 1


def test_what_a_full_disk_lacks_is_estimated_from_what_was_encoded(tmp_path: Path) -> None:
    counts = Counts(num_bytes=1_000_000, num_documents=1000, num_tokens=250_000)
    text = plan.in_words(OSError(errno.ENOSPC, "full"), tmp_path, counts, total_bytes=4_000_000, itemsize=2)
    # whole: 4 x (500 kB of tokens, 24 bytes a document), twice; without the 504 kB that are there
    assert "about 3.7 MB are needed" in text
