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
from tests.helpers.token_data import write


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=50), st.data())
def test_both_readers_give_the_bytes_of_the_file(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    (tmp_path / "a").write_bytes(content)
    start = data.draw(st.integers(0, len(content)))
    count = data.draw(st.integers(0, len(content) - start))
    for open_it in READERS.values():
        found = open_it(tmp_path / "a").read(start, count)
        assert found.tobytes() == content[start : start + count]
        found += 1  # memory of its own, not the file's


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    whole = os.preadv

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        return whole(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert FileBinReader(tmp_path / "a").read(3, 90).tolist() == list(range(3, 93))


@pytest.mark.parametrize("failures", [1, 3, 4])
def test_errors_are_tried_again_on_the_file_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    reader, whole, left, pauses = FileBinReader(tmp_path / "a"), os.preadv, [failures], []

    def fail(*args: Any) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(116, "Stale file handle")
        return whole(*args)

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(file_io.time, "sleep", pauses.append)
    monkeypatch.setattr(log, "warning", lambda text: None)
    if failures > 3:
        with pytest.raises(DataError, match="byte 10 cannot be read after 4 attempts: .*Stale file handle"):
            reader.read(10, 5)
    else:
        assert reader.read(10, 5).tolist() == [10, 11, 12, 13, 14]
    assert pauses == list(file_io.PAUSES_S[:failures])


def test_a_bin_cut_short_under_a_running_job_is_named_with_the_sample(tmp_path: Path) -> None:
    write(tmp_path / "a", [40, 60])
    file = IndexedDataset(tmp_path / "a", reader="pread")
    windows = SampleIndex(file, documents=(1, 2), length=59, overlap=1, seed=1, asked_by="--seq-length 59")
    os.truncate(tmp_path / "a.bin", 150)
    with pytest.raises(DataError, match=r"sample 0 cannot be read: document 1, .*a.bin ends at byte 150"):
        windows[0]


def test_forked_processes_read_what_their_parent_reads(tmp_path: Path) -> None:
    """They share the descriptor; with a position in it they would read each other's tokens."""
    write(tmp_path / "a", [50] * 40)
    for reader in READERS:
        file = IndexedDataset(tmp_path / "a", reader=reader)
        file.read(3)
        children, positions = [], _positions_in(tmp_path / "a.bin")
        for _ in range(3):
            pid = os.fork()
            if not pid:
                os._exit(0 if _reads_well(file) else 1)
            children.append(pid)
        assert _reads_well(file)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
        assert _positions_in(tmp_path / "a.bin") == positions, "a read moved the position that they share"


def _positions_in(path: Path) -> list[int]:
    """Return the position of each descriptor of this process that has ``path`` open."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [os.lseek(n, 0, os.SEEK_CUR) for n in numbers if os.path.realpath(f"/proc/self/fd/{n}") == str(path)]


def _reads_well(file: IndexedDataset) -> bool:
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        for document in range(40):
            if not np.array_equal(file.read(document), np.arange(50 * document + 1, 50 * document + 51)):
                return False
    return True


def test_windows_are_the_same_with_either_reader(tmp_path: Path) -> None:
    write(tmp_path / "a", [7, 30, 1, 25, 0, 18, 40])
    both = [
        SampleIndex(
            IndexedDataset(tmp_path / "a", reader=reader), documents=(0, 6), length=6, overlap=1, seed=1, asked_by="x 6"
        )
        for reader in READERS
    ]
    for index in range(3 * both[0].per_epoch):
        assert np.array_equal(both[0][index], both[1][index])


def test_an_unknown_reader_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [7])
    with pytest.raises(ValueError, match="reader must be one of mmap, pread, got 'lazy'"):
        IndexedDataset(tmp_path / "a", reader="lazy")
