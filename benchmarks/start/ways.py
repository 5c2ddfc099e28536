"""Two ways to the first samples of a corpus.

| way | order of the documents | where a sample starts | who builds |
|---|---|---|---|
| ours | int32 files of the host's cache | searched in them | every rank some of the files |
| one builder | doc_idx, int32, as .npy | sample_idx, two numbers a sample; shuffle_idx besides | rank 0, others wait |

The second is the structure of Megatron-LM's data sets, in a few lines of numpy; its compiled helper takes less than
half the time of our ``sample_idx``, which is part of the whole only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset, sizes_of
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
