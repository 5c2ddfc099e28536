"""Token files of an object store: the samples of the disk, in its order, through a cache of a stated size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron import object_store
from megatron.data import DataLoader, GPTDataset, IndexedDataset, collate, data_loader, range_cache
from megatron.data.blend_paths import BlendPaths
from megatron.data.cache import IndexCache
from megatron.data.documents import Piece
from megatron.data.gpt_builder import build_train_valid_test
from megatron.data.range_cache import RangeCache, RangeReader
from megatron.errors import DataError, SampleError
from tests.helpers.fake_store import empty_store, intercept, needs_moto, s3
from tests.helpers.harness import run_ranks
from tests.helpers.token_data import write

SIZES = [7, 30, 1, 12, 64, 5, 9, 100, 3, 18] * 6
NAME = "memory://b/c"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    """An empty store; blocks of 50 bytes, so that documents cross them."""
    monkeypatch.setattr(range_cache, "BLOCK_BYTES", 50)
    return empty_store(monkeypatch)


@pytest.fixture
def token_file(tmp_path: Path, store: MemoryFileSystem) -> IndexedDataset:
    """The same tokens on the disk; the store has them as memory://b/c."""
    return put(write(tmp_path / "c", SIZES), store.pipe, "/b/c")


def put(file: IndexedDataset, pipe: Callable[[str, bytes], None], name: str) -> IndexedDataset:
    for suffix in (".bin", ".idx", ".meta.json"):
        pipe(name + suffix, Path(file.prefix + suffix).read_bytes())
    return file


def cached(folder: Path, limit_bytes: int = 10**6, name: str = NAME) -> IndexedDataset:
    return IndexedDataset(name, cache=IndexCache(folder, objects_bytes=limit_bytes))


def blocks(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.block") if not path.name.startswith(".")]


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("objects/*/*"))


def samples_of(file: IndexedDataset, num_workers: int = 0, count: int = 40) -> list[np.ndarray]:
    dataset = GPTDataset(file, documents=(0, file.num_documents), seq_length=16, seed=3)
    loader = DataLoader(
        dataset, micro_batch_size=2, num_micro_batches=2, data_rank=0, data_size=1, samples_consumed=4,
        num_workers=num_workers,
    )  # fmt: skip
    batches = iter(loader)
    found = [batch["text"].numpy().copy() for batch in islice(batches, count)]
    if hasattr(batches, "close"):
        batches.close()
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_and_fingerprint_are_those_of_the_disk(
    token_file: IndexedDataset, tmp_path: Path, num_workers: int
) -> None:
    file = cached(tmp_path / "cache")
    assert file.fingerprint == token_file.fingerprint and file.is_remote
    for expected, found in zip(samples_of(token_file), samples_of(file, num_workers), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_any_read_gives_the_tokens_of_the_disk(token_file: IndexedDataset, tmp_path: Path) -> None:
    file = cached(tmp_path / "cache")
    for document, size in enumerate(SIZES):
        np.testing.assert_array_equal(file.read(document), token_file.read(document))
        part = file.read(document, size // 2)
        np.testing.assert_array_equal(part, token_file.read(document, size // 2))
        part += 1  # memory of its own
    assert file.first_outside(50_000) is None and file.changed_ns > 0


def test_a_mixture_with_a_split_is_that_of_the_disk(
    token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path
) -> None:
    put(write(tmp_path / "d", SIZES[::-1]), store.pipe, "/b/d")

    def first(a: str, b: str, split_by: str) -> tuple[list[Any], dict[str, Any]]:
        paths = BlendPaths(
            data_path=f"0.7 {a} 0.3 {b}", split="8,2,0", split_by=split_by, cache_path=str(tmp_path / "cache")
        )
        train, valid, _ = build_train_valid_test(
            paths, seq_length=16, seed=1, vocab_size=50_000, needed=(True, True, False)
        )
        assert train is not None and valid is not None
        return [sample for part in (train, valid) for sample in map(part.__getitem__, range(30))], train.order.state(20)

    for split_by in ("range", "hash"):
        expected, order = first(str(tmp_path / "c"), str(tmp_path / "d"), split_by)
        found, own = first(NAME, "memory://b/d", split_by)
        np.testing.assert_array_equal(found, expected)
        assert list(own["fingerprints"].values()) == list(order["fingerprints"].values())  # a resume goes on


def test_what_is_read_next_is_asked_for_ahead_in_the_order_of_the_samples(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples up to 6 further ones are asked for when a micro-batch is read, and each once; no read waits then."""
    monkeypatch.setattr(collate, "READ_AHEAD_SAMPLES", 6)
    monkeypatch.setattr(data_loader, "READ_AHEAD_SAMPLES", 6)
    asked: list[tuple[int, int]] = []
    read: list[tuple[tuple[int, int], bool]] = []
    prefetch, read_part = RangeReader.prefetch, RangeReader.read

    def noted(self: RangeReader, ranges: list[tuple[int, int]]) -> None:
        asked.extend(ranges)
        prefetch(self, ranges)

    def read_noted(self: RangeReader, offset: int, count: int) -> np.ndarray:
        read.append(((offset, count), (offset, count) in asked))
        return read_part(self, offset, count)

    file = cached(tmp_path / "cache")
    monkeypatch.setattr(RangeReader, "prefetch", noted)
    monkeypatch.setattr(RangeReader, "read", read_noted)
    samples_of(file, count=10)
    names = [name for name, _ in read]
    first = next(place for place, (_, was_asked) in enumerate(read) if was_asked)
    assert first <= 12 and all(was_asked for _, was_asked in read[first:])  # the first two samples alone were not
    assert asked[: len(names) - first] == names[first:]
    assert len(asked) > len(names)


def test_of_a_mixture_the_samples_that_come_are_fetched(
    token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(write(tmp_path / "d", SIZES[::-1]), store.pipe, "/b/d")
    paths = BlendPaths(data_path=f"0.7 {NAME} 0.3 memory://b/d", split="1,0,0", cache_path=str(tmp_path / "cache"))
    train, _, _ = build_train_valid_test(paths, seq_length=16, seed=1, vocab_size=50_000, needed=(True, False, False))
    assert train is not None
    coming: list[tuple[str, int]] = []
    monkeypatch.setattr(GPTDataset, "prefetch", lambda self, place: coming.append((self.prefix, place)))
    prefetch = collate.prefetch_of(train)
    assert prefetch is not None
    for index in range(50, 70):
        prefetch(index)
    located = [train.order.locate(index) for index in range(50, 70)]
    assert coming == [((NAME, "memory://b/d")[corpus], place) for corpus, place in located]


@pytest.mark.parametrize("num_readers", [1, 3])
def test_each_reader_is_told_of_what_it_will_read(num_readers: int) -> None:
    asked = (collate.MicroBatch([2 * number, 2 * number + 1]) for number in range(100))
    given = list(islice(collate.looking_ahead(asked, 2 * num_readers, num_readers), 12))
    for reader in range(num_readers):
        own = given[reader::num_readers]
        coming = [index for one in own for index in one.coming]
        assert coming == [index for one in own[1:] for index in one.indices] + coming[2 * (len(own) - 1) :]
        assert len(coming) == 2 * (len(own) - 1) + 4


def test_the_cache_never_holds_more_than_it_may_and_gives_the_same_tokens(
    token_file: IndexedDataset, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    limit = 3500  # the index has 1200 bytes, the tokens 2988
    file = cached(folder, limit)
    for document in [*range(len(SIZES)), *range(len(SIZES))]:
        np.testing.assert_array_equal(file.read(document), token_file.read(document))
        assert used(folder) <= limit
    assert 5 < len(blocks(folder)) < 60 and list(folder.rglob("whole"))


def test_a_second_job_asks_for_nothing_again(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    intercept(monkeypatch, "cat_file", lambda path, **_: asked.append(path))
    expected = samples_of(cached(tmp_path / "cache"))
    assert asked
    asked.clear()
    np.testing.assert_array_equal(samples_of(cached(tmp_path / "cache")), expected)
    ahead = set(asked)  # what is read ahead of the end is not waited for, so it may come twice
    assert len(ahead) <= 1 and not [name for name in asked if name.endswith(".idx")]


@pytest.mark.parametrize("damage", ["a bit", "cut short", "empty"])
def test_a_damaged_block_is_fetched_again_and_said(
    token_file: IndexedDataset, tmp_path: Path, capfd, damage: str
) -> None:
    file = cached(tmp_path / "cache")
    file.read(0)
    (block,) = blocks(tmp_path)
    content = block.read_bytes()
    block.write_bytes({"a bit": b"\x07" + content[1:], "cut short": content[:20], "empty": b""}[damage])
    again = cached(tmp_path / "cache")
    np.testing.assert_array_equal(again.read(0), token_file.read(0))
    assert block.read_bytes() == content and "its checksum does not match; fetching it again" in capfd.readouterr().err


def test_a_block_replaced_by_a_damaged_file_is_fetched_again_by_the_same_reader(
    token_file: IndexedDataset, tmp_path: Path, capfd
) -> None:
    """A process compares a file once; a file put in its place, by another process, is compared again."""
    file = cached(tmp_path / "cache")
    file.read(0)
    (block,) = blocks(tmp_path)
    content, damaged = block.read_bytes(), tmp_path / "damaged"
    damaged.write_bytes(b"\x07" + content[1:])
    os.replace(damaged, block)
    np.testing.assert_array_equal(file.read(0), token_file.read(0))
    assert block.read_bytes() == content and "its checksum does not match; fetching it again" in capfd.readouterr().err


def test_a_damaged_index_is_fetched_again(token_file: IndexedDataset, tmp_path: Path) -> None:
    cached(tmp_path / "cache")
    for path in tmp_path.rglob("whole"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    np.testing.assert_array_equal(cached(tmp_path / "cache").sizes, SIZES)


def test_tokens_that_were_written_again_are_others(
    token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path
) -> None:
    cached(tmp_path / "cache").read(3)
    other = put(write(tmp_path / "d", SIZES[::-1]), store.pipe, "/b/c")
    np.testing.assert_array_equal(cached(tmp_path / "cache").read(3), other.read(3))


def test_ranks_of_a_host_share_the_cache(token_file: IndexedDataset, tmp_path: Path) -> None:
    def read_all(rank: int) -> int:
        limit = [10**6, 3500][rank % 2]
        file = cached(tmp_path / "cache", limit)
        for document in np.random.default_rng(rank).permutation(len(SIZES)).tolist():
            file.prefetch([Piece(document, 0, SIZES[document])])
            np.testing.assert_array_equal(file.read(document), token_file.read(document))
        return os.getpid()

    assert len(set(run_ranks(2, read_all))) == 2
    assert used(tmp_path) == int(next(tmp_path.rglob("objects/used")).read_text())
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_block_that_comes_twice_counts_once(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "objects", 1000)
    for _ in range(30):
        cache.add("object", 1, b"x" * 46)
    assert (tmp_path / "objects" / "used").read_text() == "50" and cache.read("object", 1, 3, 5) == b"xx"


def test_a_cache_that_cannot_be_written_costs_a_warning(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    file = cached(tmp_path / "cache")

    def full(self: RangeCache) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RangeCache, "_counted", full)
    for document in range(len(SIZES)):
        np.testing.assert_array_equal(file.read(document), token_file.read(document))
    assert capfd.readouterr().err.count("blocks of object stores are not cached. Set") == 1
    with pytest.raises(DataError, match=r"c.idx cannot be cached in .*No space left.*--object-storage-cache-path"):
        cached(tmp_path / "other")
    monkeypatch.undo()


def test_an_index_larger_than_the_cache_is_refused(token_file: IndexedDataset, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"it has \d+ bytes, but the limit of the cache is 100\..*increase --object-storage-cache-gb"
    ):
        cached(tmp_path / "cache", 100)


@pytest.mark.parametrize(
    "error, text",
    [
        (OSError("503 Slow Down"), r"failed 3 times \(OSError: 503 Slow Down\)"),
        (PermissionError("Forbidden"), "refuses access .*Check the credentials"),
    ],
)
def test_a_sample_that_the_store_does_not_give_is_named(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    file = cached(tmp_path / "cache")

    def fail(path: str, **_: Any) -> None:
        raise error

    intercept(monkeypatch, "cat_file", fail)
    with pytest.raises(SampleError, match=rf"sample 4 cannot be read: document \d+, tokens .*memory://b/c.bin.*{text}"):
        samples_of(file)


def test_what_fails_once_is_asked_for_again(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Every second answer is cut short."""
    answer, lock, asked = MemoryFileSystem.cat_file, threading.Lock(), []

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        with lock:
            asked.append(path)
            is_cut = len(asked) % 2
        return answer(self, path, start, end)[: -1 if is_cut else None]

    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,) * 50)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    np.testing.assert_array_equal(samples_of(cached(tmp_path / "cache")), samples_of(token_file))
    assert "received 49 of 50 bytes" in capfd.readouterr().err


def test_missing_files_are_named(token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path) -> None:
    store.rm("/b/c.meta.json")
    assert cached(tmp_path / "cache").sidecar is None
    store.rm("/b/c.idx")
    with pytest.raises(DataError, match=r"memory://b/c.idx does not exist; token files memory://b/c are c.idx and c.b"):
        cached(tmp_path / "cache")
    store.pipe("/b/c.idx", Path(token_file.prefix + ".idx").read_bytes())
    store.pipe("/b/c.bin", b"short")
    with pytest.raises(DataError, match=r"memory://b/c.bin must have 2988 bytes .* has 5"):
        cached(tmp_path / "cache")


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_gives_the_samples_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3, also for processes that read ahead."""
    local = write(tmp_path / "c", SIZES)
    with s3(monkeypatch) as files:
        put(local, files.pipe, "bucket/c")
        expected = samples_of(local)
        for number, num_workers in enumerate((0, 2)):
            file = cached(tmp_path / str(number), name="s3://bucket/c")
            np.testing.assert_array_equal(samples_of(file, num_workers), expected)
        with pytest.raises(DataError, match="s3://none/c.idx does not exist"):
            cached(tmp_path / "cache", name="s3://none/c")
