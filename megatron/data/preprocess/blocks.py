"""The bytes of a unit's files as blocks, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from megatron.data.preprocess.compressed import decompressed
from megatron.data.preprocess.openings import HEAD_BYTES, check_is_text
from megatron.data.preprocess.records import STDIN, compression_of
from megatron.errors import DataError

BLOCK_BYTES = 1 << 18


def blocks(path: str, start: int = 0) -> Iterator[bytes]:
    """Yield the (decompressed) bytes of a file from ``start`` on; those of a stream from its beginning, checked.

    Raises:
        DataError: the file cannot be read, is damaged, or a stream holds no text.
    """
    try:
        if path == STDIN:
            with open(0, "rb", closefd=False) as file:  # a forked process has no sys.stdin, but it has its descriptor
                yield from _checked(path, _raw(file))
            return
        with open(path, "rb") as file:
            if compression_of(path):
                yield from _checked(path, decompressed(path, file))
            else:
                file.seek(start)
                yield from _raw(file)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


def _raw(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _checked(path: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Look at the first bytes of what cannot be looked at before."""
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= HEAD_BYTES:
            break
    check_is_text(path, head[:HEAD_BYTES])
    return chain([head] if head else [], pieces)
