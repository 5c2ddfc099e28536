"""Sets of CPM's three files for tests, written as the tools that made such sets did."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCAB_SIZE = 1000


class Cut(NamedTuple):
    """A document as pieces that stay and spans that were cut out behind them."""

    kept: list[list[int]]
    spans: list[list[int]]


def write_pair(prefix: Path, rows: list[list[int]]) -> None:
    """Write a pair of 16-bit numbers, one sequence per row; numbers wrap and no document is ever ended."""
    lengths = np.array([len(row) for row in rows], "<i4")
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    counts = len(rows).to_bytes(8, "little") + (1).to_bytes(8, "little")
    arrays = lengths.tobytes() + offsets.astype("<i8").tobytes() + np.zeros(1, "<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(head + counts + arrays)
    flat = np.array([number for row in rows for number in row], np.int64)
    Path(f"{prefix}.bin").write_bytes((flat & 0xFFFF).astype("<u2").tobytes())


def write_set(prefix: Path, documents: list[Cut], vocab_size: int = VOCAB_SIZE) -> None:
    """Write the three pairs of a set."""
    contexts, targets, offsets = [], [], []
    for document in documents:
        context, target, offset = [], [], []
        for number, (kept, span) in enumerate(zip(document.kept, document.spans, strict=True)):
            context += [*kept, vocab_size + number]
            offset += [len(target), len(span) + 1]
            target += [vocab_size + number, *span]
        contexts.append(context)
        targets.append(target)
        offsets.append(offset)
    for suffix, rows in (("_context", contexts), ("_target", targets), ("_target_offset", offsets)):
        write_pair(Path(f"{prefix}{suffix}"), rows)


def counting(sizes: list[tuple[int, ...]]) -> list[Cut]:
    """Return documents whose tokens count up from 1 through all of them; a document is kept, cut, kept, cut ..."""
    documents, first = [], 1
    for runs in sizes:
        pieces = []
        for run in runs:
            pieces.append(list(range(first, first + run)))
            first += run
        documents.append(Cut(pieces[::2], pieces[1::2]))
    return documents
