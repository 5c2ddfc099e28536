from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron import log
from megatron.data import IndexedDataset, file_io
from megatron.data.file_io import READERS, FileBinReader
from megatron.data.sample_index import SampleIndex
from megatron.errors import DataError
from tests.helpers.token_data import write_documents


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=50), st.data())
def test_both_readers_return_file_bytes(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    (tmp_path / "a").write_bytes(content)
    start = data.draw(st.integers(0, len(content)))
    num_bytes = data.draw(st.integers(0, len(content) - start))
    for reader_class in READERS.values():
        read_bytes = reader_class(tmp_path / "a").read(start, num_bytes)
        assert read_bytes.tobytes() == content[start : start + num_bytes]
        read_bytes += 1  # memory of its own, not the file's


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    original_preadv = os.preadv

    def read_partially(descriptor: int, buffers: Any, offset: int) -> int:
        return original_preadv(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", read_partially)
    assert FileBinReader(tmp_path / "a").read(3, 90).tolist() == list(range(3, 93))


@pytest.mark.parametrize("num_failures", [1, 3, 4])
def test_failed_reads_are_retried_on_reopened_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    reader, original_preadv, num_left, pauses = FileBinReader(tmp_path / "a"), os.preadv, [num_failures], []

    def fail(*args: Any) -> int:
        if num_left[0]:
            num_left[0] -= 1
            raise OSError(116, "Stale file handle")
        return original_preadv(*args)

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(file_io.time, "sleep", pauses.append)
    monkeypatch.setattr(log, "warning", lambda text: None)
    if num_failures > 3:
        with pytest.raises(DataError, match="byte 10 cannot be read after 4 attempts: .*Stale file handle"):
            reader.read(10, 5)
    else:
        assert reader.read(10, 5).tolist() == [10, 11, 12, 13, 14]
    assert pauses == list(file_io.RETRY_DELAYS_S[:num_failures])


def test_bin_truncated_during_job_is_named_with_sample(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [40, 60])
    file = IndexedDataset(tmp_path / "a", reader="pread")
    windows = SampleIndex(file, documents=(1, 2), length=59, overlap=1, seed=1, length_flag="--seq-length 59")
    os.truncate(tmp_path / "a.bin", 150)
    with pytest.raises(DataError, match=r"sample 0 cannot be read: document 1, .*a.bin ends at byte 150"):
        windows[0]


def test_forked_processes_read_same_tokens_as_parent(tmp_path: Path) -> None:
    """They share the descriptor; with a position in it they would read each other's tokens."""
    write_documents(tmp_path / "a", [50] * 40)
    for reader in READERS:
        file = IndexedDataset(tmp_path / "a", reader=reader)
        file.read(3)
        children, positions = [], _file_positions(tmp_path / "a.bin")
        for _ in range(3):
            pid = os.fork()
            if not pid:
                os._exit(0 if _reads_correct_tokens(file) else 1)
            children.append(pid)
        assert _reads_correct_tokens(file)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
        assert _file_positions(tmp_path / "a.bin") == positions, "a read moved the position that they share"


def _file_positions(path: Path) -> list[int]:
    """Return the position of each descriptor of this process that has ``path`` open."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    return [
        os.lseek(descriptor, 0, os.SEEK_CUR)
        for descriptor in descriptors
        if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(path)
    ]


def _reads_correct_tokens(file: IndexedDataset) -> bool:
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        for document in range(40):
            if not np.array_equal(file.read(document), np.arange(50 * document + 1, 50 * document + 51)):
                return False
    return True


def test_windows_are_identical_with_either_reader(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [7, 30, 1, 25, 0, 18, 40])
    indexes = [
        SampleIndex(
            IndexedDataset(tmp_path / "a", reader=reader),
            documents=(0, 6),
            length=6,
            overlap=1,
            seed=1,
            length_flag="x 6",
        )
        for reader in READERS
    ]
    for index in range(3 * indexes[0].per_epoch):
        assert np.array_equal(indexes[0][index], indexes[1][index])


def test_unknown_reader_is_rejected(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [7])
    with pytest.raises(ValueError, match="reader must be one of mmap, pread, got 'lazy'"):
        IndexedDataset(tmp_path / "a", reader="lazy")
