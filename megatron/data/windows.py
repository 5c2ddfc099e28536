"""Windows over a token file, in an order that is computed rather than stored: what samples of both models are cut from.

Each epoch permutes its documents, lays them end to end (T tokens), cuts windows of ``length + overlap`` tokens of which
neighbours share ``overlap``, drops the tail, and permutes the windows. Nothing crosses epochs. The order follows from
(seed, epoch) alone, so it is the same in every layout and needs no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron.data.permutation import Permutation
from megatron.data.token_file import TokenFile
from megatron.errors import DataError

_EPOCHS_KEPT = 2


class TokenSource(Protocol):
    """Documents of tokens: a ``TokenFile``, or what can stand in for one."""

    @property
    def prefix(self) -> str: ...

    @property
    def sizes(self) -> np.ndarray: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class Piece(NamedTuple):
    """What a window holds of one document."""

    document: int
    offset: int
    length: int


class _Epoch:
    """One epoch's order: which document follows which, where each starts, and where each window goes."""

    def __init__(self, sizes: np.ndarray, first: int, seed: int, epoch: int, num_windows: int) -> None:
        order = Permutation(len(sizes), "documents", seed, epoch).array(np.arange(len(sizes)))
        self.documents = order + first
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order], dtype=np.int64)])
        self.windows = Permutation(num_windows, "samples", seed, epoch)


class Windows:
    """Window i, for any i >= 0, is int64[length + overlap]; i // per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take.
        seed: the same on all ranks.
        asked_by: the flag with its value that asks for windows of this length; an error names it.

    Raises:
        DataError: the documents hold less than one window.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: tuple[int, int],
        length: int,
        overlap: int,
        seed: int,
        asked_by: str,
    ) -> None:
        self.token_file, self.documents, self.length, self.overlap = token_file, documents, length, overlap
        self.seed = seed
        self._sizes = token_file.sizes[documents[0] : documents[1]]
        self.num_tokens = int(self._sizes.sum(dtype=np.int64))
        self.per_epoch = max(self.num_tokens - overlap, 0) // length
        if self.per_epoch < 1:
            raise DataError(
                f"{token_file.prefix}: documents {documents[0]}:{documents[1]} hold {self.num_tokens} tokens; a sample "
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
        stop = start + self.length + self.overlap
        place = int(np.searchsorted(epoch.starts, start, "right")) - 1
        pieces = []
        while start < stop:
            end = min(int(epoch.starts[place + 1]), stop)
            if end > start:
                pieces.append(Piece(int(epoch.documents[place]), start - int(epoch.starts[place]), end - start))
            place, start = place + 1, end
        return pieces

    def read(self, index: int, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the tokens of ``pieces`` one after another.

        Raises:
            DataError: they cannot be read; names the sample ``index``, the document and the place in the file.
        """
        window = np.empty(sum(piece.length for piece in pieces), np.int64)
        filled = 0
        for piece in pieces:
            window[filled : filled + piece.length] = self._read(index, *piece)
            filled += piece.length
        return window

    def _read(self, index: int, document: int, offset: int, length: int) -> np.ndarray:
        try:
            return self.token_file.read(document, offset, length)
        except Exception as error:
            raise DataError(
                f"sample {index} cannot be read: document {document}, tokens {offset}:{offset + length}, "
                f"{_place(self.token_file, document, offset)}: {type(error).__name__}: {error}"
            ) from error

    def _epoch(self, number: int) -> _Epoch:
        epoch = self._epochs.get(number)
        if epoch is None:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            epoch = _Epoch(self._sizes, self.documents[0], self.seed, number, self.per_epoch)
            self._epochs[number] = epoch
        return epoch


def _place(source: TokenSource, document: int, offset: int) -> str:
    if isinstance(source, TokenFile):
        return f"byte {source.byte_offset(document, offset)} of {source.token_path}"
    return source.prefix
