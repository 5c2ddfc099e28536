"""How long a training step waits for its data: from the disk, and from an object store that answers after 2 ms.

    python benchmarks/store.py
    python benchmarks/store.py --latency-ms 5 --step-ms 50 --rounds 3 --json store.json

The store is simulated: files of the disk behind fsspec, each request of which takes the latency in addition; any number
of requests goes at once. A step computes (matrices on one core) and takes 2 micro-batches of 4 samples. Contenders take
turns, each round with a new and empty cache; the first step, which nothing can be read ahead of, is counted apart.

| contender | reads |
|---|---|
| disk | a mapped file in the page cache |
| store | the same from the store, nothing of it in the cache |
| store, cached | the same again: the cache has what the turn before has fetched |
| store, no read-ahead | each sample when it is asked for |
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from benchmarks.data import SEQ_LENGTH, write_tokens
from benchmarks.turns import surroundings
from megatron.data import DataLoader, GPTDataset, IndexedDataset, collate
from megatron.data.cache import IndexCache
from megatron.training.batch_iterators import TimedBatches

MICRO_BATCH, NUM_MICRO_BATCHES = 4, 2


class SlowFiles(LocalFileSystem):
    """Files of the disk by names such as slow:///data/corpus.bin, each request of which takes ``latency_s`` more."""

    protocol = "slow"
    latency_s = 0.002
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("slow://")))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        time.sleep(self.latency_s)
        return super().info(path, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        time.sleep(self.latency_s)
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))


fsspec.register_implementation("slow", SlowFiles, clobber=True)


def work_of(seconds: float) -> Callable[[], None]:
    """Return what computes for about so long on one core."""
    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)
    began = time.perf_counter()
    for _ in range(100):
        matrix @ matrix
    count = max(round(seconds / ((time.perf_counter() - began) / 100)), 1)

    def compute() -> None:
        for _ in range(count):
            matrix @ matrix

    return compute


def wait_of(name: str, cache: Path, steps: int, num_workers: int, compute: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds that the first step waits for its data, and the mean over the others."""
    file = IndexedDataset(name, cache=IndexCache(cache))
    dataset = GPTDataset(file, documents=(0, file.num_documents), seq_length=SEQ_LENGTH, seed=0)
    loader = DataLoader(
        dataset,
        micro_batch_size=MICRO_BATCH,
        num_micro_batches=NUM_MICRO_BATCHES,
        data_rank=0,
        data_size=1,
        num_workers=num_workers,
    )
    waits = []
    with TimedBatches(loader) as batches:
        for _ in range(steps + 1):
            for _ in range(NUM_MICRO_BATCHES):
                next(batches)
            waits.append(batches.drain_waited_s())
            compute()
    return waits[0], statistics.mean(waits[1:])


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return (first wait, mean of the others) of each contender in each round."""
    write_tokens(folder / "read", args.tokens)
    SlowFiles.latency_s = args.latency_ms / 1000
    compute, depth = work_of(args.step_ms / 1000), collate.READ_AHEAD_SAMPLES
    disk, store = str(folder / "read"), f"slow://{folder}/read"
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(args.rounds):
        for workers in args.workers:
            here = folder / f"cache-{number}-{workers}"
            turns = {
                f"disk, {workers} workers": (disk, here, depth),
                f"store, {workers} workers": (store, here, depth),
                f"store, cached, {workers} workers": (store, here, depth),
                f"store, no read-ahead, {workers} workers": (store, folder / f"none-{number}-{workers}", 0),
            }
            for name, (path, cache, ahead) in turns.items():
                collate.READ_AHEAD_SAMPLES = ahead
                found.setdefault(name, []).append(wait_of(path, cache, args.steps, workers, compute))
    collate.READ_AHEAD_SAMPLES = depth
    return found


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--step-ms", type=float, default=100.0, help="of computing in a step (100)")
    parser.add_argument("--steps", type=int, default=40, help="of a turn, behind the first (40)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="of the file that is read (2e7)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="--num-workers of the loader (0 2)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write it."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megatron-store-") as folder:
        found = measure(args, Path(folder))
    print(f"{'':34} first ms   then ms/step   of a step   over disk")
    for name, waits in found.items():
        first, then = (statistics.median(each) * 1000 for each in zip(*waits, strict=True))
        of_disk = [wait[1] for wait in found[f"disk, {name.rpartition(', ')[2]}"]]
        ratio = statistics.median(wait[1] / other for wait, other in zip(waits, of_disk, strict=True))
        print(f"{name:34} {first:8.1f} {then:14.2f} {then / (then + args.step_ms):11.2%} {ratio:11.2f}")
    if args.json:
        args.json.write_text(json.dumps({"waits_s": found, **surroundings()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
