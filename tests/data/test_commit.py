from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from megatron import files
from megatron.data import IndexedDataset
from megatron.errors import DataError
from tests.helpers.token_data import write_documents


def _exit_before_operation(operation_idx: int) -> None:
    counter = itertools.count()

    def die(operation: str, path: Path) -> None:
        if next(counter) == operation_idx:
            os._exit(9)

    files.before_operation = die


def test_kill_before_any_operation_leaves_old_or_new_pair(tmp_path: Path) -> None:
    outcomes = []
    for operation_idx in range(100):
        prefix = tmp_path / str(operation_idx) / "a"
        write_documents(prefix, [3, 4])
        child = os.fork()
        if not child:
            _exit_before_operation(operation_idx)
            write_documents(prefix, [5])
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes.append(IndexedDataset(prefix).num_tokens)
        write_documents(prefix, [5])
        assert sorted(path.name for path in prefix.parent.iterdir()) == ["a.bin", "a.idx", "a.meta.json"]
        if code == 0:
            break
    assert code == 0 and set(outcomes) == {7, 5} and outcomes == sorted(outcomes, reverse=True)
    assert len(outcomes) > 12


def test_next_reader_finishes_failed_rename_after_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path / "a", [3, 4])

    def fail(operation: str, path: Path) -> None:
        if operation == "rename" and path.name == "a.idx":
            raise OSError("disk gone")

    monkeypatch.setattr(files, "before_operation", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_documents(tmp_path / "a", [5])
    monkeypatch.undo()
    assert IndexedDataset(tmp_path / "a").num_tokens == 5


def test_read_only_disk_raises_missing_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path / "a", [3, 4])
    (tmp_path / "a.commit").write_text('[["x", "a.bin"]]')

    def refuse(operation: str, path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "before_operation", refuse)
    with pytest.raises(DataError, match="an interrupted replacement of .* must be finished, but permission is denied"):
        IndexedDataset(tmp_path / "a")
