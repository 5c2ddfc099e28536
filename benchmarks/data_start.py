"""Time and memory from nothing to the first samples of a large corpus, on one host.

    python benchmarks/data_start.py
    python benchmarks/data_start.py --documents 1e6 --ranks 4 --workers 1 --only "one builder"

Writes a corpus that is sizes alone (20 bytes a document; the tokens are a hole in a file), starts that many processes
at once, each of which opens it, reads samples and forks loader workers that read samples too. Memory is the sum of
proportional set sizes (shared pages count once) over all of them. The second start finds what the first left.

| way | order of the documents | where a sample starts | who builds |
|---|---|---|---|
| ours | int32 files of the host's cache | searched in them | every rank some of the files |
| one builder | doc_idx, int32, .npy | sample_idx, two numbers a sample; shuffle_idx besides | rank 0, others wait |

The second is the structure of Megatron-LM's data sets, in a few lines of numpy; its compiled helper takes less than
half the time of our ``sample_idx``, which is part of the whole only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import numpy as np

from benchmarks.turns import Team
from megatron.data.cache import IndexCache
from megatron.data.dataset_metadata import DatasetMetadata
from megatron.data.documents import sizes_of
from megatron.data.index_writer import index_chunks
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_index import SampleIndex
from megatron.data.split import split_documents

SEQ_LENGTH = 1024
SPLIT = "949,50,1"
_SEED = 1234
_BLOCK = 1 << 20
_POLL_S = 0.02

Read = Callable[[int], np.ndarray]
Open = Callable[[Path, Path, int], Read]


def ours(prefix: Path, folder: Path, rank: int, reader: str = "mmap") -> Read:
    """Return what reads a sample of the training split."""
    cache = IndexCache(folder)
    file = IndexedDataset(prefix, reader=reader, cache=cache)
    train = split_documents(file.num_documents, SPLIT)[0]
    asked_by = f"--seq-length {SEQ_LENGTH}"
    windows = SampleIndex(
        file, documents=train, length=SEQ_LENGTH, overlap=1, seed=_SEED, asked_by=asked_by, cache=cache
    )
    return windows.__getitem__


def ours_pread(prefix: Path, folder: Path, rank: int) -> Read:
    """As ``ours``, without mapping the token files."""
    return ours(prefix, folder, rank, "pread")


def one_builder(prefix: Path, folder: Path, rank: int) -> Read:
    """Return what reads a sample, after rank 0 has built three arrays for all."""
    file = IndexedDataset(prefix)
    done = folder / "done"
    if rank == 0 and not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(file.sizes, split_documents(file.num_documents, SPLIT)[0], folder)
        done.touch()
    while not done.exists():
        time.sleep(_POLL_S)
    documents, samples, shuffle = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _NAMES)

    def read(index: int) -> np.ndarray:
        place, offset = samples[shuffle[index]].tolist()
        parts, missing = [], SEQ_LENGTH + 1
        while missing:
            document = int(documents[place])
            part = file.read(document, offset, min(int(file.sizes[document]) - offset, missing))
            parts.append(part)
            place, offset, missing = place + 1, 0, missing - len(part)
        return np.concatenate(parts).astype(np.int64)

    return read


_NAMES = ("doc_idx", "sample_idx", "shuffle_idx")


def _build(sizes: np.ndarray, train: tuple[int, int], folder: Path) -> None:
    generator = np.random.RandomState(_SEED)
    documents = np.arange(*train, dtype=np.int32)
    generator.shuffle(documents)
    np.save(folder / "doc_idx", documents)
    samples = _sample_starts(sizes, documents)
    np.save(folder / "sample_idx", samples)
    shuffle = np.arange(len(samples) - 1, dtype=np.uint32)
    generator.shuffle(shuffle)
    np.save(folder / "shuffle_idx", shuffle)


def _sample_starts(sizes: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return int32[samples + 1, 2]: the place of the document, and the token in it, where each sample starts."""
    found, before = [], 0
    for first in range(0, len(documents), _BLOCK):
        ends = before + np.cumsum(sizes_of(sizes, documents[first : first + _BLOCK]), dtype=np.int64)
        starts = np.arange(-(-before // SEQ_LENGTH), -(-int(ends[-1]) // SEQ_LENGTH)) * SEQ_LENGTH
        places = np.searchsorted(ends, starts, "right")
        begins = np.concatenate([[before], ends])[places]
        found.append(np.stack([first + places, starts - begins], axis=1).astype(np.int32))
        before = int(ends[-1])
    return np.concatenate(found)[: (before - 1) // SEQ_LENGTH + 1]


WAYS: dict[str, Open] = {"ours": ours, "ours, pread": ours_pread, "one builder": one_builder}


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process: a page of k processes counts 1/k in each. 0 if it ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class PeakOfSum:
    """Looks at the sum over processes from time to time while the block runs; ``bytes`` is the largest that it saw.

    Args:
        pids: gives the processes that there are now.
    """

    def __init__(self, pids: Callable[[], list[int]], interval_s: float = 0.2) -> None:
        self._pids, self._interval_s, self._ended = pids, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.bytes = 0

    def __enter__(self) -> PeakOfSum:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> int:
        """Return the sum now."""
        found = sum(pss_bytes(pid) for pid in self._pids())
        self.bytes = max(self.bytes, found)
        return found

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.look()


LONGEST_DOCUMENT = 999
_VOCAB_SIZE = 50_000


def make_corpus(prefix: Path, num_documents: int) -> int:
    """Write ``PREFIX.idx``, ``.bin`` and ``.meta.json``: documents of 1 ... 999 zeros. Return how many tokens."""

    def sizes() -> Iterator[np.ndarray]:
        generator = np.random.default_rng(0)
        for first in range(0, num_documents, _BLOCK):
            yield generator.integers(1, LONGEST_DOCUMENT + 1, min(_BLOCK, num_documents - first), np.int32)

    dtype, crc32 = np.dtype(np.uint16), 0
    with open(f"{prefix}.idx", "wb") as file:
        for chunk in index_chunks(sizes, num_documents, dtype):
            file.write(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    num_tokens = sum(int(block.sum(dtype=np.int64)) for block in sizes())
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", num_tokens * dtype.itemsize)
    sidecar = DatasetMetadata(
        num_tokens=num_tokens,
        num_documents=num_documents,
        max_token_id=0,
        vocab_size=_VOCAB_SIZE,
        tokenizer="",
        eod_id=None,
        has_eod=False,
        bin_bytes=num_tokens * dtype.itemsize,
        bin_crc32=0,
        idx_crc32=crc32,
    )
    Path(f"{prefix}.meta.json").write_bytes(sidecar.to_json())
    return num_tokens


_SAMPLES = 32
_BYTES_A_DOCUMENT = 20 + 4 + 4 + 4


def main(argv: Sequence[str] | None = None) -> dict[str, list[dict[str, float]]]:
    """Print and return, by way, what the starts took: ``start_s``, ``cpu_s``, ``memory_bytes``, ``peak_bytes``."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=lambda text: int(float(text)), default=100_000_000, help="default: 1e8")
    parser.add_argument("--ranks", type=int, default=8, help="processes that start; default: 8")
    parser.add_argument("--workers", type=int, default=2, help="loader workers that each forks; default: 2")
    parser.add_argument("--only", choices=WAYS, nargs="+", default=list(WAYS), help="default: all")
    parser.add_argument("--folder", help="where there is room; default: below the temporary folder")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="data-start-", dir=args.folder))
    try:
        _check_room(folder, args.documents)
        start = time.perf_counter()
        num_tokens = make_corpus(folder / "corpus", args.documents)
        print(f"{args.documents} documents, {num_tokens} tokens, written in {time.perf_counter() - start:.1f} s")
        print(f"{args.ranks} ranks with {args.workers} workers each, {len(os.sched_getaffinity(0))} cores")
        print(f"{'':16}{'first samples':>16}{'processor':>14}{'memory then':>14}{'peak':>10}")
        return {way: [_start(way, number, folder, args) for number in range(2)] for way in args.only}
    finally:
        shutil.rmtree(folder)


def _check_room(folder: Path, num_documents: int) -> None:
    free, needed = shutil.disk_usage(folder).free, _BYTES_A_DOCUMENT * num_documents
    if free < needed:
        raise SystemExit(
            f"{folder} needs {needed >> 20} MiB free, has {free >> 20}: give --folder or fewer --documents"
        )


def _start(way: str, number: int, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Start all ranks, wait for the first samples of each and its workers, and look at the memory."""
    cache, start = folder / way.replace(", ", "-").replace(" ", "-"), time.perf_counter()
    with closing(Team(way, Reader, (way, folder / "corpus", cache, args.workers), size=args.ranks)) as team:
        pids = team.pids
        with PeakOfSum(lambda: list(pids)) as memory:
            team.ready()
            answers = team.ask("told")
            start_s = max(answer["at"] for answer in answers) - start
            pids += [pid for answer in answers for pid in answer["workers"]]
            memory_bytes = memory.look()
        team.ask("end")
    cpu_s = sum(answer["cpu_s"] for answer in answers)
    found = {"start_s": start_s, "cpu_s": cpu_s, "memory_bytes": memory_bytes, "peak_bytes": memory.bytes}
    name = f"{way}, again" if number else way
    print(
        f"{name:18}{start_s:12.2f} s{cpu_s:12.2f} s{memory_bytes / 1e6:11.0f} MB{memory.bytes / 1e6:7.0f} MB",
        flush=True,
    )
    return found


class Reader:
    """A rank: it has read the first samples itself and in forked workers, which stay until the end."""

    def __init__(self, way: str, prefix: Path, cache: Path, num_workers: int, rank: int) -> None:
        read = WAYS[way](prefix, cache, rank)
        _read_some(read, rank)
        context = multiprocessing.get_context("fork")
        ready = context.Semaphore(0)
        self._ended, rank_pid = context.Event(), os.getpid()

        def work(worker: int) -> None:
            _read_some(read, rank * num_workers + worker)
            ready.release()
            while not self._ended.wait(1) and os.getppid() == rank_pid:
                pass

        self._workers = [context.Process(target=work, args=(worker,)) for worker in range(num_workers)]
        for each in self._workers:
            each.start()
        for _ in self._workers:
            ready.acquire()
        self._at, self._cpu_s = time.perf_counter(), time.process_time()

    def told(self) -> dict[str, Any]:
        """Return when the first samples were read, this rank's processor time until then, and its workers."""
        return {"at": self._at, "cpu_s": self._cpu_s, "workers": [each.pid for each in self._workers]}

    def end(self) -> None:
        """End the workers."""
        self._ended.set()
        for each in self._workers:
            each.join()


def _read_some(read: Any, reader: int) -> None:
    for index in range(reader * _SAMPLES, (reader + 1) * _SAMPLES):
        read(index)


if __name__ == "__main__":
    main()
