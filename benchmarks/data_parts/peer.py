"""The structure of Megatron's preprocessing, in our own few lines: a pool that encodes line by line, one writer.

Each worker reads the JSON of a line, encodes its text alone and sends a Python list of ids back; the parent makes an
array of each list and appends it to the file. Chunks of ``imap`` are those of the published tools: 32 lines, in that of
2020 and in CPM's 25.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from megatron.data.index_format import HEADER, MAGIC, VERSION

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Encoder:
    """What a worker does; ``make`` is called once in each."""

    make: Callable[[], Encode]
    eod_id: int
    encode_text: ClassVar[Encode]

    def start(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        Encoder.encode_text = staticmethod(self.make())  # type: ignore[assignment]

    def encode(self, line: str) -> list[int]:
        ids = Encoder.encode_text(json.loads(line)["text"])
        ids.append(self.eod_id)
        return ids


def run(corpus: Path, prefix: Path, encoder: Encoder, num_workers: int, chunk_size: int) -> None:
    """Write ``prefix.bin`` and ``prefix.idx``, tokens as u16."""
    sizes = []
    with (
        multiprocessing.get_context("fork").Pool(num_workers, initializer=encoder.start) as pool,
        open(corpus, encoding="utf-8") as lines,
        open(prefix.with_suffix(".bin"), "wb") as out,
    ):
        for ids in pool.imap(encoder.encode, lines, chunk_size):
            out.write(np.array(ids, np.uint16).tobytes())
            sizes.append(len(ids))
    _write_index(prefix.with_suffix(".idx"), np.array(sizes, np.int64))


def _write_index(path: Path, sizes: np.ndarray) -> None:
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, len(sizes), len(sizes) + 1))
        file.write(sizes.astype("<i4").tobytes())
        file.write(((np.cumsum(sizes) - sizes) * 2).astype("<i8").tobytes())
        file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
