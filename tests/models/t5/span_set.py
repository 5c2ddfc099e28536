"""Sets of CPM's three files for tests, written as the tools that made such sets did."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCAB_SIZE = 1000


class CorruptedDocument(NamedTuple):
    """A document as slices that stay and spans that were cut out behind them."""

    text_runs: list[list[int]]
    spans: list[list[int]]


def write_pair(prefix: Path, rows: list[list[int]]) -> None:
    """Write a pair of 16-bit numbers, one sequence per row; numbers wrap and no document is ever ended."""
    lengths = np.array([len(row) for row in rows], "<i4")
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    counts = len(rows).to_bytes(8, "little") + (1).to_bytes(8, "little")
    arrays = lengths.tobytes() + offsets.astype("<i8").tobytes() + np.zeros(1, "<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(header + counts + arrays)
    flat = np.array([token for row in rows for token in row], np.int64)
    Path(f"{prefix}.bin").write_bytes((flat & 0xFFFF).astype("<u2").tobytes())


def write_set(prefix: Path, documents: list[CorruptedDocument], vocab_size: int = VOCAB_SIZE) -> None:
    """Write the three pairs of a set."""
    contexts, targets, offsets = [], [], []
    for document in documents:
        context, target, offset = [], [], []
        for span_idx, (run, span) in enumerate(zip(document.text_runs, document.spans, strict=True)):
            context += [*run, vocab_size + span_idx]
            offset += [len(target), len(span) + 1]
            target += [vocab_size + span_idx, *span]
        contexts.append(context)
        targets.append(target)
        offsets.append(offset)
    for suffix, rows in (("_context", contexts), ("_target", targets), ("_target_offset", offsets)):
        write_pair(Path(f"{prefix}{suffix}"), rows)


def make_counting_documents(run_lengths: list[tuple[int, ...]]) -> list[CorruptedDocument]:
    """Return documents whose tokens count up from 1 through all of them; a document is kept, cut, kept, cut ..."""
    documents, next_token = [], 1
    for lengths in run_lengths:
        token_runs = []
        for length in lengths:
            token_runs.append(list(range(next_token, next_token + length)))
            next_token += length
        documents.append(CorruptedDocument(token_runs[::2], token_runs[1::2]))
    return documents
