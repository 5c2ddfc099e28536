"""What can be said about a pair of token files without a model: counts, lengths, ends, ids, vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.data.inspect import ids
from megatron.data.inspect.lengths import Lengths
from megatron.data.sidecar import Sidecar
from megatron.data.token_file import TokenFile

ENDS_LOOKED_AT = 10_000


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is in one pair.

    Args:
        eod_id: the end-of-document token that ``eod_share`` counts; None where nobody tells it.
        eod_share: part of the filled documents that end with it; None without an id, or without documents.
        ends_looked_at: documents that ``eod_share`` was counted on, evenly spread.
        max_token_id: -1 without tokens.
        sidecar: what ``PREFIX.meta.json`` says, None where there is none.
    """

    prefix: str
    dtype: str
    num_documents: int
    num_tokens: int
    bin_bytes: int
    lengths: Lengths
    eod_id: int | None
    eod_share: float | None
    ends_looked_at: int
    max_token_id: int
    sidecar: Sidecar | None


def facts_of(token_file: TokenFile, eod_id: int | None = None) -> Facts:
    """Return the facts of a pair; without a sidecar all of its tokens are read once, for the largest id.

    Args:
        eod_id: of the tokenizer, where one is given; else the sidecar's is taken.
    """
    sidecar = token_file.sidecar
    if eod_id is None and sidecar is not None:
        eod_id = sidecar.eod_id
    share, looked_at = (None, 0) if eod_id is None else _share_of_ends(token_file, eod_id)
    known = token_file.max_token_id
    return Facts(
        prefix=token_file.prefix,
        dtype=token_file.dtype.name,
        num_documents=token_file.num_documents,
        num_tokens=token_file.num_tokens,
        bin_bytes=token_file.num_tokens * token_file.dtype.itemsize,
        lengths=Lengths.of(token_file.sizes),
        eod_id=eod_id,
        eod_share=share,
        ends_looked_at=looked_at,
        max_token_id=ids.largest(token_file) if known is None else known,
        sidecar=sidecar,
    )


def _share_of_ends(token_file: TokenFile, eod_id: int) -> tuple[float | None, int]:
    """Return (share, documents looked at), evenly spread over the file; empty ones are passed over."""
    count = min(token_file.num_documents, ENDS_LOOKED_AT)
    chosen = np.linspace(0, token_file.num_documents - 1, count).astype(np.int64)
    sizes = [int(token_file.sizes[document]) for document in chosen]
    ends = [
        int(token_file.read(int(document), size - 1, 1)[0]) == eod_id
        for document, size in zip(chosen, sizes, strict=True)
        if size
    ]
    return (sum(ends) / len(ends) if ends else None), len(ends)
