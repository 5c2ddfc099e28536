from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron import files, log
from megatron.data import cache as data_cache
from megatron.data.cache import IndexCache


def make_arrays(file_idx: int) -> list[np.ndarray]:
    return [np.arange(file_idx, dtype=np.int32), np.full(100 - file_idx, file_idx, np.int32)]


def expected_content(file_idx: int) -> list[int]:
    return np.concatenate(make_arrays(file_idx)).tolist()


def fail_to_build(file_idx: int) -> Iterable[np.ndarray]:
    raise AssertionError(f"{file_idx} is there")


def file_names(cache: IndexCache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir())


def test_cached_arrays_are_mapped_without_rebuild(tmp_path: Path) -> None:
    built = IndexCache(tmp_path).arrays("a", 5, make_arrays)
    mapped = IndexCache(tmp_path).arrays("a", 5, fail_to_build)
    assert (
        [array.tolist() for array in built]
        == [array.tolist() for array in mapped]
        == [expected_content(file_idx) for file_idx in range(5)]
    )
    assert mapped[3].dtype == np.int32 and not mapped[3].flags.writeable
    assert len(file_names(IndexCache(tmp_path))) == 5 and not any(
        name.startswith(".") for name in file_names(IndexCache(tmp_path))
    )
    assert IndexCache(tmp_path).array("b", lambda: np.zeros(0, np.int64)).dtype == np.int64
    assert len(IndexCache(tmp_path).array("b", lambda: np.ones(3))) == 0


def test_four_processes_build_concurrently_without_waiting(tmp_path: Path) -> None:
    """Row D18: random pauses, so that each file is begun, finished and found in many orders."""
    for round_idx in range(5):
        children = []
        for child_idx in range(4):
            pid = os.fork()
            if not pid:
                os._exit(_build_in_child(tmp_path, round_idx, child_idx))
            children.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert len(file_names(IndexCache(tmp_path))) == 5 * 6


def _build_in_child(folder: Path, round_idx: int, child_idx: int) -> int:
    rng = random.Random(round_idx * 4 + child_idx)

    def build(file_idx: int) -> Iterable[np.ndarray]:
        for chunk in make_arrays(file_idx):
            time.sleep(rng.random() * 2e-3)
            yield chunk

    arrays = IndexCache(folder).arrays(f"turn{round_idx}", 6, build)
    return 0 if [array.tolist() for array in arrays] == [expected_content(file_idx) for file_idx in range(6)] else 1


def test_claimed_file_is_deferred_and_built_if_owner_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, built = IndexCache(tmp_path), []
    cache.array("x", lambda: np.zeros(1))
    boot_id = data_cache._boot_id()
    for file_idx in range(3):
        (cache.folder / f".a-{boot_id}.{file_idx}.mdc.claim").touch()

    def build(file_idx: int) -> list[np.ndarray]:
        built.append(file_idx)
        return make_arrays(file_idx)

    assert [array.tolist() for array in cache.arrays("a", 6, build)] == [
        expected_content(file_idx) for file_idx in range(6)
    ]
    assert sorted(built[:3]) == [3, 4, 5] and sorted(built[3:]) == [0, 1, 2]
    assert not [name for name in file_names(cache) if name.endswith("claim")]


def test_later_concurrent_builder_maps_earlier_file(tmp_path: Path) -> None:
    """Else each would map a file of its own, and the host would hold it as often as there are ranks."""
    inodes = []

    def build(file_idx: int) -> Iterable[np.ndarray]:
        yield from make_arrays(file_idx)
        IndexCache(tmp_path).arrays("a", 1, make_arrays)
        inodes.extend(path.stat().st_ino for path in IndexCache(tmp_path).folder.glob("a-*"))

    assert IndexCache(tmp_path).arrays("a", 1, build)[0].tolist() == expected_content(0)
    assert [path.stat().st_ino for path in IndexCache(tmp_path).folder.iterdir()] == inodes


class Killed(BaseException):
    pass


def test_kill_before_any_operation_leaves_no_incomplete_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row A08."""
    for kill_at in range(100):
        num_operations = 0

        def maybe_kill(operation: str, path: Path, kill_at: int = kill_at) -> None:
            nonlocal num_operations
            if num_operations == kill_at:
                raise Killed
            num_operations += 1

        monkeypatch.setattr(files, "before_operation", maybe_kill)
        folder = tmp_path / str(kill_at)
        try:
            IndexCache(folder).arrays("a", 2, make_arrays, is_durable=True)
        except Killed:
            monkeypatch.setattr(files, "before_operation", files._no_op)
            arrays = IndexCache(folder).arrays("a", 2, make_arrays, is_durable=True)
            assert [array.tolist() for array in arrays] == [expected_content(0), expected_content(1)]
        else:
            break
    assert kill_at == 2 * 5  # create, two writes, fsync, rename


FILE_WITHOUT_CHECKSUM = b"mdc1<i4 " + (400).to_bytes(8, "little") + np.arange(100, dtype="<i4").tobytes()
"""A file as it was before it had a checksum: whole, and with another content than the one wanted."""


@pytest.mark.parametrize(
    "damage", [b"", b"mdc2", bytes(16), bytes(32), b"mdc2<i4 \xff\0\0\0\0\0\0\0" + bytes(40), FILE_WITHOUT_CHECKSUM]
)
def test_incomplete_file_is_rebuilt(tmp_path: Path, damage: bytes) -> None:
    IndexCache(tmp_path).arrays("a", 1, make_arrays)
    next(IndexCache(tmp_path).folder.iterdir()).write_bytes(damage)
    assert IndexCache(tmp_path).arrays("a", 1, make_arrays)[0].tolist() == expected_content(0)
    assert IndexCache(tmp_path).arrays("a", 1, fail_to_build)[0].tolist() == expected_content(0)


def simulate_new_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "_PROCESS_START_NS", time.time_ns())


def cached_file(folder: Path) -> Path:
    return next(path for path in IndexCache(folder).folder.iterdir() if path.suffix == ".mdc")


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bit_is_detected_and_file_rebuilt(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk between two jobs: no time of modification tells of it."""
    lines = captured_warnings(monkeypatch)
    IndexCache(tmp_path).arrays("a", 1, make_arrays)
    path, num_rebuilt = cached_file(tmp_path), 0
    header, size = data_cache._HEADER_BYTES * 8, path.stat().st_size * 8
    bit_indices = sorted({*range(0, header, min(step, 3)), *range(header, size, step), size - 1})
    for bit_idx in bit_indices:
        stat, data = path.stat(), bytearray(path.read_bytes())
        data[bit_idx // 8] ^= 1 << bit_idx % 8
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        simulate_new_job(monkeypatch)
        built: list[int] = []
        array = IndexCache(tmp_path).arrays(
            "a", 1, lambda file_idx, built=built: built.append(file_idx) or make_arrays(file_idx)
        )[0]
        assert array.tolist() == expected_content(0) and array.dtype == np.int32, bit_idx
        num_rebuilt += len(built)
        assert IndexCache(tmp_path).arrays("a", 1, fail_to_build)[0].tolist() == expected_content(0)
    time_of_comparison = range(data_cache._VERIFIED_OFFSET * 8, header)
    assert num_rebuilt == sum(bit_idx not in time_of_comparison for bit_idx in bit_indices), (
        "all but that time, which is no content"
    )
    assert len(lines) == 1 and "damaged" in lines[0] and "rebuilding it" in lines[0] and str(path) in lines[0]


def test_file_modified_within_job_is_verified_again(tmp_path: Path) -> None:
    IndexCache(tmp_path).arrays("a", 1, make_arrays)
    with open(cached_file(tmp_path), "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\xff")
    assert IndexCache(tmp_path).arrays("a", 1, make_arrays)[0].tolist() == expected_content(0)


def test_each_file_is_verified_once_per_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified_sizes: list[int] = []
    verify = data_cache._has_valid_checksum
    monkeypatch.setattr(
        data_cache, "_has_valid_checksum", lambda data: verified_sizes.append(len(data)) or verify(data)
    )
    IndexCache(tmp_path).arrays("a", 4, make_arrays)
    IndexCache(tmp_path).arrays("a", 4, fail_to_build)
    assert verified_sizes == [], "a process of this job built them"
    for _ in range(2):
        simulate_new_job(monkeypatch)
        for _ in range(3):
            IndexCache(tmp_path).arrays("a", 4, fail_to_build)
        assert len(verified_sizes) == 4
        verified_sizes.clear()
    assert not [name for name in file_names(IndexCache(tmp_path)) if name.startswith(".")]


def test_process_start_time_is_independent_of_import_time() -> None:
    """Else a rank that is slow to import compares what the others have compared already."""
    forked_ns = time.time_ns()
    pid = os.fork()
    if not pid:
        time.sleep(0.1)
        start_ns = data_cache._process_start_ns()
        os._exit(0 if forked_ns - 30_000_000 < start_ns < time.time_ns() - 90_000_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_file_being_verified_by_another_process_is_deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, verified = IndexCache(tmp_path), []
    cache.arrays("a", 3, make_arrays)
    simulate_new_job(monkeypatch)
    boot_id, verify = data_cache._boot_id(), data_cache._has_valid_checksum
    monkeypatch.setattr(data_cache, "_has_valid_checksum", lambda data: verified.append(int(data[-4])) or verify(data))
    monkeypatch.setattr(data_cache.os, "getpid", lambda: 0)  # which begins with the first
    (cache.folder / f".a-{boot_id}.0.mdc.claim").touch()
    arrays = cache.arrays("a", 3, fail_to_build)
    assert [array.tolist() for array in arrays] == [expected_content(file_idx) for file_idx in range(3)]
    assert verified == [1, 2, 0]


def test_file_without_verification_mark_is_verified_by_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IndexCache(tmp_path).arrays("a", 1, make_arrays)
    simulate_new_job(monkeypatch)
    verified: list[int] = []
    verify = data_cache._has_valid_checksum
    monkeypatch.setattr(data_cache, "_has_valid_checksum", lambda data: verified.append(1) or verify(data))

    def deny_utime(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "not the owner")

    monkeypatch.setattr(data_cache.os, "utime", deny_utime)
    for _ in range(2):
        assert IndexCache(tmp_path).arrays("a", 1, fail_to_build)[0].tolist() == expected_content(0)
    assert len(verified) == 2


def captured_warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    log.warn_once.cache_clear()
    monkeypatch.setattr(log, "warning", lines.append)
    return lines


def test_uncreatable_cache_folder_falls_back_to_memory_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row D19; root may write anywhere, so a file stands where the folder should be."""
    (tmp_path / "file").touch()
    lines, cache = captured_warnings(monkeypatch), IndexCache(tmp_path / "file")
    for _ in range(2):
        assert [array.tolist() for array in cache.arrays("a", 3, make_arrays)] == [
            expected_content(file_idx) for file_idx in range(3)
        ]
    assert len(lines) == 1 and "--data-cache-path" in lines[0] and str(tmp_path / "file") in lines[0]


def test_full_disk_keeps_existing_files_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, cache, num_written = captured_warnings(monkeypatch), IndexCache(tmp_path), 0

    def maybe_fill_disk(operation: str, path: Path) -> None:
        nonlocal num_written
        num_written += operation == "write"
        if num_written > 5:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "before_operation", maybe_fill_disk)
    assert [array.tolist() for array in cache.arrays("a", 4, make_arrays)] == [
        expected_content(file_idx) for file_idx in range(4)
    ]
    assert len(lines) == 1 and "No space left" in lines[0] and len(file_names(cache)) == 2
    assert IndexCache(tmp_path).arrays("a", 4, make_arrays)[1].tolist() == expected_content(1)


def test_newest_epochs_are_retained(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    for epoch, age in ((1, 30), (0, 20), (10, 10), (7, 0)):
        cache.arrays(f"order-k-epoch-{epoch}", 2, make_arrays)
        for path in cache.folder.glob(f"order-k-epoch-{epoch}-*"):
            os.utime(path, (time.time() - age, time.time() - age))
    cache.arrays("order-l-epoch-0", 1, make_arrays)
    cache.keep_newest("order-k-epoch-", 2)
    remaining = {name.split("-")[1] + name.split("-")[3] for name in file_names(cache)}
    assert remaining == {"k10", "k7", "l0"} and len(file_names(cache)) == 5


def test_long_unused_files_are_deleted_and_foreign_files_stay(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays("a", 2, make_arrays)
    (cache.folder / "notes.txt").touch()
    (cache.folder / ".b.0.mdc.77.tmp").touch()
    for path in cache.folder.iterdir():
        os.utime(path, (0, 0))
    IndexCache(tmp_path).arrays("c", 1, make_arrays)
    assert len(file_names(cache)) == 2 and "notes.txt" in file_names(cache)


def test_default_folder_is_private_to_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    lines, cache = captured_warnings(monkeypatch), IndexCache()
    cache.arrays("a", 1, make_arrays)
    folder = next(tmp_path.iterdir())
    assert folder.name.endswith(str(os.getuid())) and stat.S_IMODE(folder.stat().st_mode) == 0o700 and not lines
    folder.chmod(0o777)
    built: list[int] = []
    assert IndexCache().arrays("a", 1, lambda file_idx: built.append(file_idx) or make_arrays(file_idx))[
        0
    ].tolist() == expected_content(0)
    assert built == [0] and len(lines) == 1 and "other users can write" in lines[0]


def test_files_of_earlier_boot_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not flushed, so after a crash of the machine they may be holes."""
    IndexCache(tmp_path).arrays("a", 1, make_arrays)
    IndexCache(tmp_path).arrays("b", 1, make_arrays, is_durable=True)
    monkeypatch.setattr(data_cache, "_boot_id", lambda: "another")
    IndexCache(tmp_path).arrays("b", 1, fail_to_build, is_durable=True)
    with pytest.raises(AssertionError, match="0 is there"):
        IndexCache(tmp_path).arrays("a", 1, fail_to_build)
