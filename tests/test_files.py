"""File operations that survive a kill at any moment: tried by failing ahead of each one."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron import files


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def operations(monkeypatch):
    """The operations that were announced; ``operations.stop_at = k`` ends ahead of the k-th."""

    class Log(list):
        stop_at = None

    log = Log()

    def hook(operation, path):
        if log.stop_at == len(log):
            raise Killed
        log.append((operation, path.name))

    monkeypatch.setattr(files, "before_operation", hook)
    return log


def test_interrupted_replace_leaves_old_or_new_file(tmp_path, operations):
    path = tmp_path / "latest"
    files.replace_bytes(path, b"old")
    names = [name for name, _ in operations]
    assert names == ["write", "fsync", "rename", "sync_folder"]
    for k in range(len(names)):
        path.write_bytes(b"old")
        operations.clear()
        operations.stop_at = k
        with pytest.raises(Killed):
            files.replace_bytes(path, b"new")
        assert path.read_bytes() == (b"new" if k > names.index("rename") else b"old")
        assert [child.name for child in tmp_path.iterdir()] == ["latest"], "nothing half-written stays beside it"


def test_rename_follows_fsync_and_precedes_folder_sync(tmp_path, operations):
    files.write_bytes(tmp_path / "part", b"x")
    files.rename(tmp_path / "part", tmp_path / "whole")
    assert operations == [("write", "part"), ("fsync", "part"), ("rename", "whole"), ("sync_folder", tmp_path.name)]


def test_write_chunks_returns_size_and_crc(tmp_path, operations):
    path = tmp_path / "shard"
    chunks = [b"abc", memoryview(b"defgh"), b""]
    assert files.write_chunks(path, chunks) == (8, zlib.crc32(b"abcdefgh"))
    assert path.read_bytes() == b"abcdefgh"
    assert [name for name, _ in operations] == ["create", "write", "write", "write", "fsync"]
    for chunk_bytes in (1, 3, 8, 100):
        assert files.size_and_crc(path, chunk_bytes) == (8, zlib.crc32(b"abcdefgh"))


def test_interrupted_remove_tree_can_be_repeated(tmp_path, operations):
    def build():
        files.make_folder(tmp_path / "step" / "inner")
        for name in ("a", "inner/b"):
            (tmp_path / "step" / name).write_bytes(b"x")

    build()
    operations.clear()
    files.remove_tree(tmp_path / "step")
    assert not (tmp_path / "step").exists()
    for k in range(len(operations)):
        operations.stop_at = None
        build()
        operations.clear()
        operations.stop_at = k
        with pytest.raises(Killed):
            files.remove_tree(tmp_path / "step")
        assert (tmp_path / "step").exists()
        operations.stop_at = None
        files.remove_tree(tmp_path / "step")


def test_remove_tree_does_not_follow_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"x")
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "link").symlink_to(tmp_path / "kept")
    files.remove_tree(tmp_path / "step")
    assert (tmp_path / "kept" / "file").exists() and not (tmp_path / "step").exists()


def test_default_operation_hook_does_nothing(tmp_path):
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    files.write_bytes(tmp_path / "a" / "b" / "file", b"x")
    files.remove_file(tmp_path / "a" / "b" / "file")
    assert files.free_bytes(tmp_path) > 0
    assert files.before_operation("write", tmp_path) is None


@given(st.lists(st.binary(max_size=300), max_size=5))
@settings(max_examples=60, deadline=None)
def test_crc32_combine_equals_crc_of_joined_chunks(chunks):
    crc = 0
    for chunk in chunks:
        crc = files.crc32_combine(crc, zlib.crc32(chunk), len(chunk))
    assert crc == zlib.crc32(b"".join(chunks))


def test_crc32_combine_supports_long_chunk():
    head, tail = b"head", bytes(1 << 20)
    assert files.crc32_combine(zlib.crc32(head), zlib.crc32(tail), len(tail)) == zlib.crc32(head + tail)


def test_crc32_combine_supports_megabyte_chunks():
    block = bytes(range(256)) * 4096
    crc = expected = zlib.crc32(block)
    for num_doublings in range(4):
        crc = files.crc32_combine(crc, crc, len(block) << num_doublings)
    for _ in range(15):
        expected = zlib.crc32(block, expected)
    assert crc == expected


def test_open_file_limit_is_raised_up_to_hard_limit(monkeypatch):
    limits = [1024, 4096]
    monkeypatch.setattr(files.resource, "getrlimit", lambda resource: tuple(limits))
    monkeypatch.setattr(
        files.resource, "setrlimit", lambda resource, new_limits: limits.__setitem__(slice(None), new_limits)
    )
    assert files.allow_open_files(500) == 1024 and limits == [1024, 4096]
    assert files.allow_open_files(2000) == 2000 and limits == [2000, 4096]
    assert files.allow_open_files(40_000) == 4096 and limits == [4096, 4096]
    limits[1] = files.resource.RLIM_INFINITY
    assert files.allow_open_files(40_000) == 40_000 and limits[0] == 40_000
    limits[0] = files.resource.RLIM_INFINITY
    assert files.allow_open_files(50_000) == 50_000 and limits[0] == files.resource.RLIM_INFINITY
