"""Reading a pair of token files: ``PREFIX.idx`` and the memory-mapped ``PREFIX.bin``."""

from __future__ import annotations

import hashlib
import zlib
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron.data import commit, index_format, sidecar
from megatron.errors import DataError

_SCAN_TOKENS = 1 << 22
_WHOLE_BELOW_BYTES = 64 << 20
_NUM_PROBES = 256
_PROBE_BYTES = 1 << 16


class TokenFile:
    """The documents of one pair of token files; ours and Megatron's.

    ``sizes`` is the number of tokens of each document (int32); ``sidecar`` is None for files that have none.

    Raises:
        DataError: a file is missing, damaged, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = _without_suffix(str(prefix))
        self.index_path, self.token_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        commit.roll_forward(self.prefix)
        self._check_present()
        index = self.index_path.read_bytes()
        self.sizes, self.dtype = index_format.decode_index(index, self.index_path)
        self.sidecar = sidecar.read(Path(self.prefix + ".meta.json"), index)
        self._index_crc32 = zlib.crc32(index)
        self.num_documents = len(self.sizes)
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])
        self.num_tokens = int(self.starts[-1])
        self._tokens = self._map_tokens()

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return a copy of ``length`` tokens of ``document`` from ``offset`` on (all that follow if None)."""
        size = int(self.sizes[document])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(
                f"{self.prefix}: tokens {offset}:{offset + length} of document {document}, which has {size}"
            )
        start = int(self.starts[document]) + offset
        return np.array(self._tokens[start : start + length])

    def byte_offset(self, document: int, offset: int = 0) -> int:
        """Return where in the ``.bin`` a token lies."""
        return (int(self.starts[document]) + offset) * self.dtype.itemsize

    @property
    def max_token_id(self) -> int | None:
        """The largest token id where a sidecar tells it, else None."""
        return self.sidecar.max_token_id if self.sidecar else None

    @property
    def has_eod(self) -> bool | None:
        """Whether each document ends with an end-of-document token; None where no sidecar tells it."""
        return self.sidecar.has_eod if self.sidecar else None

    def first_outside(self, vocab_size: int) -> tuple[int, int, int] | None:
        """Return (document, offset, id) of the first token id that is not in 0 ... vocab_size - 1, reading all."""
        for start in range(0, self.num_tokens, _SCAN_TOKENS):
            block = self._tokens[start : start + _SCAN_TOKENS]
            if int(block.max()) < vocab_size and int(block.min()) >= 0:
                continue
            place = start + int(np.flatnonzero((block >= vocab_size) | (block < 0))[0])
            document = int(np.searchsorted(self.starts, place, "right")) - 1
            return document, place - int(self.starts[document]), int(self._tokens[place])
        return None

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes when the tokens do: all of a small ``.bin``, evenly spaced parts of a large one."""
        digest = hashlib.sha256(f"{self.dtype.name}:{self.num_tokens}:{self._index_crc32}".encode())
        content = self._tokens.view(np.uint8)
        if len(content) <= _WHOLE_BELOW_BYTES:
            digest.update(content.tobytes())
        else:
            for start in np.linspace(0, len(content) - _PROBE_BYTES, _NUM_PROBES).astype(np.int64):
                digest.update(content[start : start + _PROBE_BYTES].tobytes())
        return digest.hexdigest()[:16]

    def _check_present(self) -> None:
        for path in (self.index_path, self.token_path):
            if not path.is_file():
                raise DataError(
                    f"{path} does not exist; --data-path {self.prefix} needs {self.index_path.name} and "
                    f"{self.token_path.name}. Build them: python tools/preprocess_data.py --input CORPUS.jsonl "
                    f"--tokenizer-path TOKENIZER.json --output-prefix {self.prefix}"
                )

    def _map_tokens(self) -> np.ndarray:
        expected, found = self.num_tokens * self.dtype.itemsize, self.token_path.stat().st_size
        if expected != found:
            raise DataError(
                f"{self.token_path} must have {expected} bytes ({self.num_tokens} tokens of {self.dtype.itemsize} "
                f"bytes by {self.index_path.name}), it has {found}. "
                "It was cut short or belongs to another .idx: build both again."
            )
        if not found:
            return np.zeros(0, self.dtype)
        return np.memmap(self.token_path, self.dtype, "r").view(np.ndarray)


def _without_suffix(prefix: str) -> str:
    for suffix in (".bin", ".idx"):
        prefix = prefix.removesuffix(suffix)
    return prefix
