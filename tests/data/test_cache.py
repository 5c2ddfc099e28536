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


def content(number: int) -> list[np.ndarray]:
    return [np.arange(number, dtype=np.int32), np.full(100 - number, number, np.int32)]


def whole(number: int) -> list[int]:
    return np.concatenate(content(number)).tolist()


def refuse(number: int) -> Iterable[np.ndarray]:
    raise AssertionError(f"{number} is there")


def names(cache: IndexCache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir())


def test_what_one_built_others_map_without_building(tmp_path: Path) -> None:
    built = IndexCache(tmp_path).arrays("a", 5, content)
    again = IndexCache(tmp_path).arrays("a", 5, refuse)
    assert [array.tolist() for array in built] == [array.tolist() for array in again] == [whole(k) for k in range(5)]
    assert again[3].dtype == np.int32 and not again[3].flags.writeable
    assert len(names(IndexCache(tmp_path))) == 5 and not any(
        name.startswith(".") for name in names(IndexCache(tmp_path))
    )
    assert IndexCache(tmp_path).array("b", lambda: np.zeros(0, np.int64)).dtype == np.int64
    assert len(IndexCache(tmp_path).array("b", lambda: np.ones(3))) == 0


def test_four_processes_build_the_same_at_once_and_nobody_waits(tmp_path: Path) -> None:
    """Row D18: random pauses, so that each file is begun, finished and found in many orders."""
    for turn in range(5):
        children = []
        for child in range(4):
            pid = os.fork()
            if not pid:
                os._exit(_child(tmp_path, turn, child))
            children.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert len(names(IndexCache(tmp_path))) == 5 * 6


def _child(folder: Path, turn: int, child: int) -> int:
    draw = random.Random(turn * 4 + child)

    def build(number: int) -> Iterable[np.ndarray]:
        for part in content(number):
            time.sleep(draw.random() * 2e-3)
            yield part

    found = IndexCache(folder).arrays(f"turn{turn}", 6, build)
    return 0 if [array.tolist() for array in found] == [whole(k) for k in range(6)] else 1


def test_a_claim_puts_a_file_off_and_its_owner_may_be_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, built = IndexCache(tmp_path), []
    cache.array("x", lambda: np.zeros(1))
    boot = data_cache._boot_id()
    for number in range(3):
        (cache.folder / f".a-{boot}.{number}.mdc.claim").touch()

    def build(number: int) -> list[np.ndarray]:
        built.append(number)
        return content(number)

    assert [array.tolist() for array in cache.arrays("a", 6, build)] == [whole(k) for k in range(6)]
    assert sorted(built[:3]) == [3, 4, 5] and sorted(built[3:]) == [0, 1, 2]
    assert not [name for name in names(cache) if name.endswith("claim")]


def test_of_two_that_build_at_once_the_later_takes_the_file_of_the_earlier(tmp_path: Path) -> None:
    """Else each would map a file of its own, and the host would hold it as often as there are ranks."""
    inodes = []

    def build(number: int) -> Iterable[np.ndarray]:
        yield from content(number)
        IndexCache(tmp_path).arrays("a", 1, content)
        inodes.extend(path.stat().st_ino for path in IndexCache(tmp_path).folder.glob("a-*"))

    assert IndexCache(tmp_path).arrays("a", 1, build)[0].tolist() == whole(0)
    assert [path.stat().st_ino for path in IndexCache(tmp_path).folder.iterdir()] == inodes


class Killed(BaseException):
    pass


def test_a_kill_before_any_operation_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row A08."""
    for kill_at in range(100):
        seen = 0

        def before(operation: str, path: Path, kill_at: int = kill_at) -> None:
            nonlocal seen
            if seen == kill_at:
                raise Killed
            seen += 1

        monkeypatch.setattr(files, "before_operation", before)
        folder = tmp_path / str(kill_at)
        try:
            IndexCache(folder).arrays("a", 2, content, outlives_boot=True)
        except Killed:
            monkeypatch.setattr(files, "before_operation", files._nothing)
            found = IndexCache(folder).arrays("a", 2, content, outlives_boot=True)
            assert [array.tolist() for array in found] == [whole(0), whole(1)]
        else:
            break
    assert kill_at == 2 * 5  # create, two writes, fsync, rename


OLDER = b"mdc1<i4 " + (400).to_bytes(8, "little") + np.arange(100, dtype="<i4").tobytes()
"""A file as it was before it had a checksum: whole, and with another content than the one wanted."""


@pytest.mark.parametrize(
    "damage", [b"", b"mdc2", bytes(16), bytes(32), b"mdc2<i4 \xff\0\0\0\0\0\0\0" + bytes(40), OLDER]
)
def test_a_file_that_is_not_whole_is_built_again(tmp_path: Path, damage: bytes) -> None:
    IndexCache(tmp_path).arrays("a", 1, content)
    next(IndexCache(tmp_path).folder.iterdir()).write_bytes(damage)
    assert IndexCache(tmp_path).arrays("a", 1, content)[0].tolist() == whole(0)
    assert IndexCache(tmp_path).arrays("a", 1, refuse)[0].tolist() == whole(0)


def is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "_STARTED_NS", time.time_ns())


def the_file(folder: Path) -> Path:
    return next(path for path in IndexCache(folder).folder.iterdir() if path.suffix == ".mdc")


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_is_found_and_the_file_built_again(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the disk between two jobs: no time of modification tells of it."""
    lines = said(monkeypatch)
    IndexCache(tmp_path).arrays("a", 1, content)
    path, num_rebuilt = the_file(tmp_path), 0
    header, size = data_cache._HEADER_BYTES * 8, path.stat().st_size * 8
    places = sorted({*range(0, header, min(step, 3)), *range(header, size, step), size - 1})
    for place in places:
        times, data = path.stat(), bytearray(path.read_bytes())
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        is_another_job(monkeypatch)
        built: list[int] = []
        found = IndexCache(tmp_path).arrays("a", 1, lambda k, built=built: built.append(k) or content(k))[0]
        assert found.tolist() == whole(0) and found.dtype == np.int32, place
        num_rebuilt += len(built)
        assert IndexCache(tmp_path).arrays("a", 1, refuse)[0].tolist() == whole(0)
    time_of_comparison = range(data_cache._COMPARED_AT * 8, header)
    assert num_rebuilt == sum(place not in time_of_comparison for place in places), (
        "all but that time, which is no content"
    )
    assert len(lines) == 1 and "damaged" in lines[0] and "rebuilding it" in lines[0] and str(path) in lines[0]


def test_what_was_written_to_within_a_job_is_compared_again(tmp_path: Path) -> None:
    IndexCache(tmp_path).arrays("a", 1, content)
    with open(the_file(tmp_path), "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\xff")
    assert IndexCache(tmp_path).arrays("a", 1, content)[0].tolist() == whole(0)


def test_each_file_is_compared_once_by_all_processes_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    fits = data_cache._fits
    monkeypatch.setattr(data_cache, "_fits", lambda data: compared.append(len(data)) or fits(data))
    IndexCache(tmp_path).arrays("a", 4, content)
    IndexCache(tmp_path).arrays("a", 4, refuse)
    assert compared == [], "a process of this job built them"
    for _ in range(2):
        is_another_job(monkeypatch)
        for _ in range(3):
            IndexCache(tmp_path).arrays("a", 4, refuse)
        assert len(compared) == 4
        compared.clear()
    assert not [name for name in names(IndexCache(tmp_path)) if name.startswith(".")]


def test_the_start_of_a_process_is_known_however_late_this_module_is_imported() -> None:
    """Else a rank that is slow to import compares what the others have compared already."""
    forked_ns = time.time_ns()
    pid = os.fork()
    if not pid:
        time.sleep(0.1)
        found_ns = data_cache._process_start_ns()
        os._exit(0 if forked_ns - 30_000_000 < found_ns < time.time_ns() - 90_000_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_file_that_another_process_compares_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, opened = IndexCache(tmp_path), []
    cache.arrays("a", 3, content)
    is_another_job(monkeypatch)
    boot, fits = data_cache._boot_id(), data_cache._fits
    monkeypatch.setattr(data_cache, "_fits", lambda data: opened.append(int(data[-4])) or fits(data))
    monkeypatch.setattr(data_cache.os, "getpid", lambda: 0)  # which begins with the first
    (cache.folder / f".a-{boot}.0.mdc.claim").touch()
    found = cache.arrays("a", 3, refuse)
    assert [array.tolist() for array in found] == [whole(k) for k in range(3)]
    assert opened == [1, 2, 0]


def test_a_file_that_cannot_be_noted_is_compared_by_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IndexCache(tmp_path).arrays("a", 1, content)
    is_another_job(monkeypatch)
    compared: list[int] = []
    fits = data_cache._fits
    monkeypatch.setattr(data_cache, "_fits", lambda data: compared.append(1) or fits(data))

    def refused(*args: object, **named: object) -> None:
        raise PermissionError(errno.EPERM, "not the owner")

    monkeypatch.setattr(data_cache.os, "utime", refused)
    for _ in range(2):
        assert IndexCache(tmp_path).arrays("a", 1, refuse)[0].tolist() == whole(0)
    assert len(compared) == 2


def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    log.warn_once.cache_clear()
    monkeypatch.setattr(log, "warning", lines.append)
    return lines


def test_a_folder_that_cannot_be_made_means_own_memory_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row D19; root may write anywhere, so a file stands where the folder should be."""
    (tmp_path / "file").touch()
    lines, cache = said(monkeypatch), IndexCache(tmp_path / "file")
    for _ in range(2):
        assert [array.tolist() for array in cache.arrays("a", 3, content)] == [whole(k) for k in range(3)]
    assert len(lines) == 1 and "--data-cache-path" in lines[0] and str(tmp_path / "file") in lines[0]


def test_a_disk_that_fills_up_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, cache, written = said(monkeypatch), IndexCache(tmp_path), 0

    def before(operation: str, path: Path) -> None:
        nonlocal written
        written += operation == "write"
        if written > 5:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "before_operation", before)
    assert [array.tolist() for array in cache.arrays("a", 4, content)] == [whole(k) for k in range(4)]
    assert len(lines) == 1 and "No space left" in lines[0] and len(names(cache)) == 2
    assert IndexCache(tmp_path).arrays("a", 4, content)[1].tolist() == whole(1)


def test_the_newest_sets_are_kept(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    for epoch, age in ((1, 30), (0, 20), (10, 10), (7, 0)):
        cache.arrays(f"order-k-epoch-{epoch}", 2, content)
        for path in cache.folder.glob(f"order-k-epoch-{epoch}-*"):
            os.utime(path, (time.time() - age, time.time() - age))
    cache.arrays("order-l-epoch-0", 1, content)
    cache.keep_newest("order-k-epoch-", 2)
    left = {name.split("-")[1] + name.split("-")[3] for name in names(cache)}
    assert left == {"k10", "k7", "l0"} and len(names(cache)) == 5


def test_what_nobody_opened_for_long_goes_and_other_files_stay(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays("a", 2, content)
    (cache.folder / "notes.txt").touch()
    (cache.folder / ".b.0.mdc.77.tmp").touch()
    for path in cache.folder.iterdir():
        os.utime(path, (0, 0))
    IndexCache(tmp_path).arrays("c", 1, content)
    assert len(names(cache)) == 2 and "notes.txt" in names(cache)


def test_the_default_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    lines, cache = said(monkeypatch), IndexCache()
    cache.arrays("a", 1, content)
    folder = next(tmp_path.iterdir())
    assert folder.name.endswith(str(os.getuid())) and stat.S_IMODE(folder.stat().st_mode) == 0o700 and not lines
    folder.chmod(0o777)
    built: list[int] = []
    assert IndexCache().arrays("a", 1, lambda k: built.append(k) or content(k))[0].tolist() == whole(0)
    assert built == [0] and len(lines) == 1 and "other users can write" in lines[0]


def test_files_of_an_earlier_boot_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not flushed, so after a crash of the machine they may be holes."""
    IndexCache(tmp_path).arrays("a", 1, content)
    IndexCache(tmp_path).arrays("b", 1, content, outlives_boot=True)
    monkeypatch.setattr(data_cache, "_boot_id", lambda: "another")
    IndexCache(tmp_path).arrays("b", 1, refuse, outlives_boot=True)
    with pytest.raises(AssertionError, match="0 is there"):
        IndexCache(tmp_path).arrays("a", 1, refuse)
