"""Windows over a token file, in an order that is computed: what samples of both models are cut from.

Each epoch permutes its documents, lays them end to end (T tokens), cuts windows of ``length + overlap`` tokens of which
neighbours share ``overlap``, drops the tail, and permutes the windows. Nothing crosses epochs. The order follows from
(seed, epoch) alone, so it is the same in every layout and no process needs another one's index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.cache import Cache
from megatron.data.document_order import DocumentOrder
from megatron.data.documents import Documents, count_of, num_tokens_of
from megatron.data.permutation import Permutation
from megatron.data.token_file import TokenFile
from megatron.data.token_source import Piece, TokenSource
from megatron.errors import DataError, SampleError

__all__ = ["Piece", "TokenSource", "Windows", "read_pieces"]

_EPOCHS_KEPT = 2


class _Epoch(NamedTuple):
    documents: DocumentOrder
    windows: Permutation


class Windows:
    """Window i, for any i >= 0, is int64[length + overlap]; i // per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        seed: the same on all ranks.
        asked_by: the flag with its value that asks for windows of this length; an error names it.
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.

    Raises:
        DataError: the documents hold less than one window.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        length: int,
        overlap: int,
        seed: int,
        asked_by: str,
        cache: Cache | None = None,
    ) -> None:
        self.token_file, self.documents, self.length, self.overlap = token_file, documents, length, overlap
        self.seed, self.cache = seed, cache
        self.num_tokens = num_tokens_of(token_file.sizes, documents)
        self.per_epoch = max(self.num_tokens - overlap, 0) // length
        if self.per_epoch < 1:
            raise DataError(
                f"{token_file.prefix}: {_named(documents)} hold {self.num_tokens} tokens; a sample "
                f"of {asked_by} needs {length + overlap}. Shorten {asked_by.split()[0]} or give more data."
            )
        self._epochs: dict[int, _Epoch] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of window ``index``."""
        return self.read(index, self.pieces(index))

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of documents that window ``index`` is made of, none of them empty."""
        if index < 0:
            raise IndexError(f"samples count from 0, got {index}")
        number, index_in_epoch = divmod(int(index), self.per_epoch)
        epoch = self._epoch(number)
        start = epoch.windows(index_in_epoch) * self.length
        return epoch.documents.pieces(start, start + self.length + self.overlap)

    def run(self, epoch: int, start: int, length: int) -> list[Piece]:
        """Return the pieces of ``length`` tokens from ``start`` on, as the documents of an epoch lie end to end."""
        return self._epoch(epoch).documents.pieces(start, start + length)

    def read(self, index: int, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the tokens of ``pieces``: ``read_pieces`` of this file."""
        return read_pieces(self.token_file, index, pieces)

    def _epoch(self, number: int) -> _Epoch:
        epoch = self._epochs.get(number)
        if epoch is None:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            order = DocumentOrder(self.token_file, self.documents, seed=self.seed, epoch=number, cache=self.cache)
            epoch = _Epoch(order, Permutation(self.per_epoch, "samples", self.seed, number))
            self._epochs[number] = epoch
        return epoch


def read_pieces(source: TokenSource, index: int, pieces: Sequence[Piece]) -> np.ndarray:
    """Return the tokens of ``pieces`` one after another as int64.

    Raises:
        SampleError: they cannot be read; names the sample ``index``, the document and the place in the file.
    """
    tokens = np.empty(sum(piece.length for piece in pieces), np.int64)
    filled = 0
    for document, offset, length in pieces:
        try:
            tokens[filled : filled + length] = source.read(document, offset, length)
        except Exception as error:
            raise SampleError(
                f"sample {index} cannot be read: document {document}, tokens {offset}:{offset + length}, "
                f"{_place(source, document, offset)}: {type(error).__name__}: {error}"
            ) from error
        filled += length
    return tokens


def _named(documents: Documents) -> str:
    if isinstance(documents, np.ndarray):
        return f"{count_of(documents)} documents of a split by hash"
    return f"documents {documents[0]}:{documents[1]}"


def _place(source: TokenSource, document: int, offset: int) -> str:
    if isinstance(source, TokenFile):
        return f"byte {source.byte_offset(document, offset)} of {source.token_path}"
    return source.prefix
