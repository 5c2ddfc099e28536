"""How far the encoding has come: the numbers that progress, limits and the summary are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Counts(NamedTuple):
    """What was read and what came of it; the sum of two of them is that of what both stand for.

    Args:
        num_bytes: of text and JSON, decompressed.
        num_records: lines, rows, blocks or files, those that gave no document among them.
        num_empty: records without any text; skipped.
        num_bad: records that cannot be used.
        max_token_id: -1 where there is no token.
    """

    num_bytes: int = 0
    num_records: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_bad: int = 0
    max_token_id: int = -1


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of all ``counts``."""
    found = list(counts)
    sums = {name: sum(getattr(count, name) for count in found) for name in Counts._fields}
    return Counts(**sums | {"max_token_id": max((count.max_token_id for count in found), default=-1)})
