"""Time and memory from nothing to the first samples of a large corpus, on one host.

    python benchmarks/data_start.py [--documents 1e8] [--ranks 8] [--workers 2] [--only "one builder"]

Writes a corpus that is sizes alone (20 bytes a document; the tokens are a hole in a file), starts that many processes
at once, each of which opens it, reads samples and forks loader workers that read samples too. Memory is the sum of
proportional set sizes (shared pages count once) over all of them. The second start finds what the first left.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.start.corpus import make_corpus  # noqa: E402
from benchmarks.start.memory import PeakOfSum  # noqa: E402
from benchmarks.start.ways import WAYS  # noqa: E402

_SAMPLES = 32
_BYTES_A_DOCUMENT = 20 + 4 + 4 + 4
_DEADLINE_S = 600


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
    cache = folder / way.replace(", ", "-").replace(" ", "-")
    context = multiprocessing.get_context("spawn")
    start, ranks, pipes = time.perf_counter(), [], []
    for rank in range(args.ranks):
        here, there = context.Pipe()
        ranks.append(context.Process(target=_rank, args=(way, folder / "corpus", cache, rank, args.workers, there)))
        pipes.append(here)
        ranks[-1].start()
        there.close()
    pids = [rank.pid or 0 for rank in ranks]
    try:
        with PeakOfSum(lambda: list(pids)) as memory:
            answers = [_answer(pipe) for pipe in pipes]
            start_s = max(answer["at"] for answer in answers) - start
            pids += [pid for answer in answers for pid in answer["workers"]]
            memory_bytes = memory.look()
    finally:
        for pipe, rank in zip(pipes, ranks, strict=True):
            pipe.close()
            rank.join()
    cpu_s = sum(answer["cpu_s"] for answer in answers)
    found = {"start_s": start_s, "cpu_s": cpu_s, "memory_bytes": memory_bytes, "peak_bytes": memory.bytes}
    name = f"{way}, again" if number else way
    print(
        f"{name:18}{start_s:12.2f} s{cpu_s:12.2f} s{memory_bytes / 1e6:11.0f} MB{memory.bytes / 1e6:7.0f} MB",
        flush=True,
    )
    return found


def _answer(pipe: Connection) -> dict[str, Any]:
    if not pipe.poll(_DEADLINE_S):
        raise TimeoutError(f"a rank said nothing for {_DEADLINE_S} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise RuntimeError("a rank ended before its first samples; what it said is above") from error


def _rank(way: str, prefix: Path, cache: Path, rank: int, num_workers: int, pipe: Connection) -> None:
    """Read the first samples here and in forked workers, say so, and stay until the other end of the pipe closes."""
    read = WAYS[way](prefix, cache, rank)
    _read_some(read, rank)
    context = multiprocessing.get_context("fork")
    ready = context.Semaphore(0)
    ended, rank_pid = context.Event(), os.getpid()

    def work(worker: int) -> None:
        _read_some(read, rank * num_workers + worker)
        ready.release()
        while not ended.wait(1) and os.getppid() == rank_pid:
            pass

    workers = [context.Process(target=work, args=(worker,)) for worker in range(num_workers)]
    for each in workers:
        each.start()
    for _ in workers:
        ready.acquire()
    pipe.send({"at": time.perf_counter(), "cpu_s": time.process_time(), "workers": [each.pid for each in workers]})
    with suppress(EOFError):
        pipe.recv()
    ended.set()
    for each in workers:
        each.join()


def _read_some(read: Any, reader: int) -> None:
    for index in range(reader * _SAMPLES, (reader + 1) * _SAMPLES):
        read(index)


if __name__ == "__main__":
    main()
