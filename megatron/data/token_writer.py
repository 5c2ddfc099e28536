"""Writing a pair of token files, document after document, in memory that does not grow with the corpus."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron import files
from megatron.data import commit, index_format
from megatron.data.sidecar import Sidecar
from megatron.errors import DataError


class TokenFileWriter:
    """Streams documents into ``PREFIX.bin``, ``.idx``, ``.meta.json``, which appear together when the block ends well.

    Args:
        vocab_size: ids must be below it; also chooses the token type.
        tokenizer: identity of the tokenizer, kept in the sidecar.
        eod_id: id that ends every document given to ``add``, or None if documents have no such end.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int, tokenizer: str = "", eod_id: int | None = None) -> None:
        self.prefix = str(prefix)
        self.dtype = index_format.token_type(vocab_size)
        self.num_tokens = self.num_documents = 0
        self._vocab_size, self._tokenizer, self._eod_id = vocab_size, tokenizer, eod_id
        self._sizes: list[np.ndarray] = []
        self._max_token_id, self._crc32 = -1, 0
        self._paths = [Path(self.prefix + suffix) for suffix in (".bin", ".idx", ".meta.json")]
        self._temporary = [commit.temporary_path(path) for path in self._paths]

    def __enter__(self) -> TokenFileWriter:
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        commit.roll_forward(self.prefix)
        commit.remove_leftovers(self.prefix)
        self._file = open(self._temporary[0], "wb")  # noqa: SIM115 - closed in __exit__
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            if not commit.is_pending(self.prefix):
                self._remove_temporary()

    def _remove_temporary(self) -> None:
        for path in self._temporary:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, sizes: np.ndarray | None = None) -> None:
        """Append documents: ``tokens`` holds them one after the other, ``sizes`` their lengths (None: one document)."""
        sizes = np.array([len(tokens)], np.int64) if sizes is None else sizes
        sizes = sizes[sizes > 0].astype(np.int32)
        if int(sizes.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(f"sizes sum to {sizes.sum()}, but {len(tokens)} tokens were given")
        if not len(tokens):
            return
        self._check_ids(tokens)
        data = np.ascontiguousarray(tokens, self.dtype).data.cast("B")
        files.before_operation("write", self._temporary[0])
        self._file.write(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        self._sizes.append(sizes)
        self.num_tokens += len(tokens)
        self.num_documents += len(sizes)

    def _check_ids(self, tokens: np.ndarray) -> None:
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self._vocab_size:
            raise DataError(f"token ids must be in 0 ... {self._vocab_size - 1}, got {lowest} ... {highest}")
        self._max_token_id = max(self._max_token_id, highest)

    def _finish(self) -> None:
        files.before_operation("fsync", self._temporary[0])
        self._file.flush()
        os.fsync(self._file.fileno())
        index = index_format.encode_index(np.concatenate([*self._sizes, np.zeros(0, np.int32)]), self.dtype)
        files.write_bytes(self._temporary[1], index)
        files.write_bytes(self._temporary[2], self._sidecar(index).to_json())
        commit.replace_together(self.prefix, self._paths)

    def _sidecar(self, index: bytes) -> Sidecar:
        return Sidecar(
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            max_token_id=self._max_token_id,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            eod_id=self._eod_id,
            has_eod=self._eod_id is not None,
            bin_bytes=self.num_tokens * self.dtype.itemsize,
            bin_crc32=self._crc32,
            idx_crc32=zlib.crc32(index),
        )
