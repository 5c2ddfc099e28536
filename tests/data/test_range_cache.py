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
from megatron.data.documents import DocumentSlice
from megatron.data.gpt_builder import build_train_valid_test
from megatron.data.range_cache import RangeCache, RangeReader
from megatron.errors import DataError, SampleError
from tests.helpers.fake_store import intercept, make_empty_store, needs_moto, s3
from tests.helpers.harness import run_ranks
from tests.helpers.token_data import write_documents

SIZES = [7, 30, 1, 12, 64, 5, 9, 100, 3, 18] * 6
NAME = "memory://b/c"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    """An empty store; blocks of 50 bytes, so that documents cross them."""
    monkeypatch.setattr(range_cache, "BLOCK_BYTES", 50)
    return make_empty_store(monkeypatch)


@pytest.fixture
def token_file(tmp_path: Path, store: MemoryFileSystem) -> IndexedDataset:
    """The same tokens on the disk; the store has them as memory://b/c."""
    return upload(write_documents(tmp_path / "c", SIZES), store.pipe, "/b/c")


def upload(file: IndexedDataset, pipe: Callable[[str, bytes], None], name: str) -> IndexedDataset:
    for suffix in (".bin", ".idx", ".meta.json"):
        pipe(name + suffix, Path(file.prefix + suffix).read_bytes())
    return file


def open_cached(folder: Path, limit_bytes: int = 10**6, name: str = NAME) -> IndexedDataset:
    return IndexedDataset(name, cache=IndexCache(folder, objects_bytes=limit_bytes))


def block_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.block") if not path.name.startswith(".")]


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("objects/*/*"))


def load_samples(file: IndexedDataset, num_workers: int = 0, num_batches: int = 40) -> list[np.ndarray]:
    dataset = GPTDataset(file, documents=(0, file.num_documents), seq_length=16, seed=3)
    loader = DataLoader(
        dataset, micro_batch_size=2, num_micro_batches=2, data_rank=0, data_size=1, samples_consumed=4,
        num_workers=num_workers,
    )  # fmt: skip
    batches = iter(loader)
    samples = [batch["text"].numpy().copy() for batch in islice(batches, num_batches)]
    if hasattr(batches, "close"):
        batches.close()
    return samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_and_fingerprint_equal_local_files(
    token_file: IndexedDataset, tmp_path: Path, num_workers: int
) -> None:
    file = open_cached(tmp_path / "cache")
    assert file.fingerprint == token_file.fingerprint and file.is_remote
    for expected, sample in zip(load_samples(token_file), load_samples(file, num_workers), strict=True):
        np.testing.assert_array_equal(sample, expected)


def test_reads_return_tokens_of_local_file(token_file: IndexedDataset, tmp_path: Path) -> None:
    file = open_cached(tmp_path / "cache")
    for document, size in enumerate(SIZES):
        np.testing.assert_array_equal(file.read(document), token_file.read(document))
        tokens = file.read(document, size // 2)
        np.testing.assert_array_equal(tokens, token_file.read(document, size // 2))
        tokens += 1  # memory of its own
    assert file.find_invalid_id(50_000) is None and file.mtime_ns > 0


def test_blend_with_split_equals_local_blend(
    token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path
) -> None:
    upload(write_documents(tmp_path / "d", SIZES[::-1]), store.pipe, "/b/d")

    def build_first_samples(first_path: str, second_path: str, split_by: str) -> tuple[list[Any], dict[str, Any]]:
        paths = BlendPaths(
            data_path=f"0.7 {first_path} 0.3 {second_path}",
            split="8,2,0",
            split_by=split_by,
            cache_path=str(tmp_path / "cache"),
        )
        train, valid, _ = build_train_valid_test(
            paths, seq_length=16, seed=1, vocab_size=50_000, needed=(True, True, False)
        )
        assert train is not None and valid is not None
        return [
            sample for dataset in (train, valid) for sample in map(dataset.__getitem__, range(30))
        ], train.order.state(20)

    for split_by in ("range", "hash"):
        expected, expected_state = build_first_samples(str(tmp_path / "c"), str(tmp_path / "d"), split_by)
        samples, state = build_first_samples(NAME, "memory://b/d", split_by)
        np.testing.assert_array_equal(samples, expected)
        assert list(state["fingerprints"].values()) == list(expected_state["fingerprints"].values())  # a resume goes on


def test_next_samples_are_prefetched_in_order(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples up to 6 further ones are asked for when a micro-batch is read, and each once; no read waits then."""
    monkeypatch.setattr(collate, "READ_AHEAD_SAMPLES", 6)
    monkeypatch.setattr(data_loader, "READ_AHEAD_SAMPLES", 6)
    prefetched: list[tuple[int, int]] = []
    num_reads: list[tuple[tuple[int, int], bool]] = []
    prefetch, original_read = RangeReader.prefetch, RangeReader.read

    def record_prefetch(self: RangeReader, ranges: list[tuple[int, int]]) -> None:
        prefetched.extend(ranges)
        prefetch(self, ranges)

    def record_read(self: RangeReader, offset: int, count: int) -> np.ndarray:
        num_reads.append(((offset, count), (offset, count) in prefetched))
        return original_read(self, offset, count)

    file = open_cached(tmp_path / "cache")
    monkeypatch.setattr(RangeReader, "prefetch", record_prefetch)
    monkeypatch.setattr(RangeReader, "read", record_read)
    load_samples(file, num_batches=10)
    ranges = [range for range, _ in num_reads]
    first_prefetched = next(read_idx for read_idx, (_, is_prefetched) in enumerate(num_reads) if is_prefetched)
    assert first_prefetched <= 12 and all(
        is_prefetched for _, is_prefetched in num_reads[first_prefetched:]
    )  # the first two samples alone were not
    assert prefetched[: len(ranges) - first_prefetched] == ranges[first_prefetched:]
    assert len(prefetched) > len(ranges)


def test_blend_prefetches_upcoming_samples(
    token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(write_documents(tmp_path / "d", SIZES[::-1]), store.pipe, "/b/d")
    paths = BlendPaths(data_path=f"0.7 {NAME} 0.3 memory://b/d", split="1,0,0", cache_path=str(tmp_path / "cache"))
    train, _, _ = build_train_valid_test(paths, seq_length=16, seed=1, vocab_size=50_000, needed=(True, False, False))
    assert train is not None
    prefetched: list[tuple[str, int]] = []
    monkeypatch.setattr(GPTDataset, "prefetch", lambda self, sample_idx: prefetched.append((self.prefix, sample_idx)))
    prefetch = collate.make_prefetch(train)
    assert prefetch is not None
    for index in range(50, 70):
        prefetch(index)
    located = [train.order.locate(index) for index in range(50, 70)]
    assert prefetched == [((NAME, "memory://b/d")[corpus], sample_idx) for corpus, sample_idx in located]


@pytest.mark.parametrize("num_readers", [1, 3])
def test_each_reader_receives_its_upcoming_samples(num_readers: int) -> None:
    micro_batches = (collate.MicroBatch([2 * idx, 2 * idx + 1]) for idx in range(100))
    with_upcoming = list(islice(collate.add_prefetch_indices(micro_batches, 2 * num_readers, num_readers), 12))
    for reader in range(num_readers):
        reader_batches = with_upcoming[reader::num_readers]
        upcoming = [index for batch in reader_batches for index in batch.prefetch_indices]
        assert (
            upcoming
            == [index for batch in reader_batches[1:] for index in batch.indices]
            + upcoming[2 * (len(reader_batches) - 1) :]
        )
        assert len(upcoming) == 2 * (len(reader_batches) - 1) + 4


def test_cache_never_exceeds_limit_and_returns_correct_tokens(token_file: IndexedDataset, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    limit_bytes = 3500  # the index has 1200 bytes, the tokens 2988
    file = open_cached(folder, limit_bytes)
    for document in [*range(len(SIZES)), *range(len(SIZES))]:
        np.testing.assert_array_equal(file.read(document), token_file.read(document))
        assert used_bytes(folder) <= limit_bytes
    assert 5 < len(block_files(folder)) < 60 and list(folder.rglob("whole"))


def test_second_job_uses_cached_blocks(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    intercept(monkeypatch, "cat_file", lambda path, **_: requests.append(path))
    expected = load_samples(open_cached(tmp_path / "cache"))
    assert requests
    requests.clear()
    np.testing.assert_array_equal(load_samples(open_cached(tmp_path / "cache")), expected)
    refetched = set(requests)  # what is read ahead of the end is not waited for, so it may come twice
    assert len(refetched) <= 1 and not [name for name in requests if name.endswith(".idx")]


@pytest.mark.parametrize("damage", ["a bit", "cut short", "empty"])
def test_damaged_block_is_refetched_with_warning(
    token_file: IndexedDataset, tmp_path: Path, capfd, damage: str
) -> None:
    file = open_cached(tmp_path / "cache")
    file.read(0)
    (block,) = block_files(tmp_path)
    content = block.read_bytes()
    block.write_bytes({"a bit": b"\x07" + content[1:], "cut short": content[:20], "empty": b""}[damage])
    reopened = open_cached(tmp_path / "cache")
    np.testing.assert_array_equal(reopened.read(0), token_file.read(0))
    assert block.read_bytes() == content and "its checksum does not match; fetching it again" in capfd.readouterr().err


def test_replaced_damaged_block_is_refetched_by_same_reader(token_file: IndexedDataset, tmp_path: Path, capfd) -> None:
    """A process compares a file once; a file put in its place, by another process, is compared again."""
    file = open_cached(tmp_path / "cache")
    file.read(0)
    (block,) = block_files(tmp_path)
    content, damaged = block.read_bytes(), tmp_path / "damaged"
    damaged.write_bytes(b"\x07" + content[1:])
    os.replace(damaged, block)
    np.testing.assert_array_equal(file.read(0), token_file.read(0))
    assert block.read_bytes() == content and "its checksum does not match; fetching it again" in capfd.readouterr().err


def test_damaged_index_is_refetched(token_file: IndexedDataset, tmp_path: Path) -> None:
    open_cached(tmp_path / "cache")
    for path in tmp_path.rglob("whole"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    np.testing.assert_array_equal(open_cached(tmp_path / "cache").document_lengths, SIZES)


def test_rewritten_object_is_not_read_from_cache(
    token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path
) -> None:
    open_cached(tmp_path / "cache").read(3)
    rewritten = upload(write_documents(tmp_path / "d", SIZES[::-1]), store.pipe, "/b/c")
    np.testing.assert_array_equal(open_cached(tmp_path / "cache").read(3), rewritten.read(3))


def test_ranks_of_host_share_cache(token_file: IndexedDataset, tmp_path: Path) -> None:
    def read_all(rank: int) -> int:
        limit_bytes = [10**6, 3500][rank % 2]
        file = open_cached(tmp_path / "cache", limit_bytes)
        for document in np.random.default_rng(rank).permutation(len(SIZES)).tolist():
            file.prefetch([DocumentSlice(document, 0, SIZES[document])])
            np.testing.assert_array_equal(file.read(document), token_file.read(document))
        return os.getpid()

    assert len(set(run_ranks(2, read_all))) == 2
    assert used_bytes(tmp_path) == int(next(tmp_path.rglob("objects/used")).read_text())
    assert not list(tmp_path.rglob("*.tmp"))


def test_duplicate_block_counts_once(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "objects", 1000)
    for _ in range(30):
        cache.add("object", 1, b"x" * 46)
    assert (tmp_path / "objects" / "used").read_text() == "50" and cache.read("object", 1, 3, 5) == b"xx"


def test_unwritable_cache_warns(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    file = open_cached(tmp_path / "cache")

    def raise_disk_full(self: RangeCache) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RangeCache, "_locked_usage", raise_disk_full)
    for document in range(len(SIZES)):
        np.testing.assert_array_equal(file.read(document), token_file.read(document))
    assert capfd.readouterr().err.count("blocks of object stores are not cached. Set") == 1
    with pytest.raises(DataError, match=r"c.idx cannot be cached in .*No space left.*--object-storage-cache-path"):
        open_cached(tmp_path / "other")
    monkeypatch.undo()


def test_index_larger_than_cache_is_rejected(token_file: IndexedDataset, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"it has \d+ bytes, but the limit of the cache is 100\..*increase --object-storage-cache-gb"
    ):
        open_cached(tmp_path / "cache", 100)


@pytest.mark.parametrize(
    "error, text",
    [
        (OSError("503 Slow Down"), r"failed 3 times \(OSError: 503 Slow Down\)"),
        (PermissionError("Forbidden"), "denies access .*Check the credentials"),
    ],
)
def test_sample_unavailable_in_store_is_named(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    file = open_cached(tmp_path / "cache")

    def fail(path: str, **_: Any) -> None:
        raise error

    intercept(monkeypatch, "cat_file", fail)
    with pytest.raises(SampleError, match=rf"sample 4 cannot be read: document \d+, tokens .*memory://b/c.bin.*{text}"):
        load_samples(file)


def test_failed_read_is_retried(
    token_file: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Every second answer is cut short."""
    original_cat_file, lock, requests = MemoryFileSystem.cat_file, threading.Lock(), []

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        with lock:
            requests.append(path)
            is_truncated = len(requests) % 2
        return original_cat_file(self, path, start, end)[: -1 if is_truncated else None]

    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,) * 50)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    np.testing.assert_array_equal(load_samples(open_cached(tmp_path / "cache")), load_samples(token_file))
    assert "received 49 of 50 bytes" in capfd.readouterr().err


def test_missing_files_are_named(token_file: IndexedDataset, store: MemoryFileSystem, tmp_path: Path) -> None:
    store.rm("/b/c.meta.json")
    assert open_cached(tmp_path / "cache").sidecar is None
    store.rm("/b/c.idx")
    with pytest.raises(DataError, match=r"memory://b/c.idx does not exist; token files memory://b/c are c.idx and c.b"):
        open_cached(tmp_path / "cache")
    store.pipe("/b/c.idx", Path(token_file.prefix + ".idx").read_bytes())
    store.pipe("/b/c.bin", b"short")
    with pytest.raises(DataError, match=r"memory://b/c.bin must have 2988 bytes .* has 5"):
        open_cached(tmp_path / "cache")


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_samples_equal_local_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3, also for processes that read ahead."""
    local = write_documents(tmp_path / "c", SIZES)
    with s3(monkeypatch) as files:
        upload(local, files.pipe, "bucket/c")
        expected = load_samples(local)
        for cache_idx, num_workers in enumerate((0, 2)):
            file = open_cached(tmp_path / str(cache_idx), name="s3://bucket/c")
            np.testing.assert_array_equal(load_samples(file, num_workers), expected)
        with pytest.raises(DataError, match="s3://none/c.idx does not exist"):
            open_cached(tmp_path / "cache", name="s3://none/c")
