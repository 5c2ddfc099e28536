"""Decompressing .gz and .zst in pieces, so that memory does not depend on the file; damage is named with its place."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import zstandard

from megatron.data.preprocess.records import compression_of
from megatron.errors import DataError

_PIECE_BYTES = {"gz": 1 << 16, "zst": 1 << 11}
"""Compressed bytes at a time. One call may inflate gzip a thousandfold and zstandard 32,000-fold, so pieces are small:
a file made to burst takes some 200 MB, ordinary text a few hundred kB."""

_LARGEST_WINDOW = 1 << 31
"""What ``zstd --long=31`` asks for; memory is taken only for files that were written with such a window."""

_JUDGED_BYTES = 1 << 23


class _Stream(Protocol):
    """One gzip member or zstandard frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def decompressed(path: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of ``file``, which is compressed as its name says; members one after another are one text.

    Raises:
        DataError: the file is damaged or cut off; says at which byte, and how many could be unpacked.
    """
    kind = compression_of(path) or ""
    stream, in_stream, place, unpacked = _new(kind), False, 0, 0
    while piece := file.read(_PIECE_BYTES[kind]):
        place += len(piece)
        while piece := piece if in_stream or kind != "gz" else piece.lstrip(b"\x00"):  # tapes fill up with zeros
            try:
                data = stream.decompress(piece)
            except (zlib.error, zstandard.ZstdError) as error:
                raise _damaged(path, kind, f"damaged before byte {place} ({error})", unpacked) from None
            unpacked += len(data)
            if data:
                yield data
            in_stream, piece = not stream.eof, stream.unused_data
            if not in_stream:
                stream = _new(kind)
    if in_stream:
        raise _damaged(path, kind, f"cut off: it ends at byte {place}, in the middle of a stream", unpacked)


def check_is_whole(path: str) -> None:
    """Read a compressed file through; one with no checksum is only seen to be damaged where that breaks its stream.

    Raises:
        DataError: the file is damaged or cut off, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for _ in decompressed(path, file):
                pass
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


def unpacked_size(path: str) -> int:
    """Return about how many bytes a compressed file holds, judged by its first ones; exact for small files."""
    unpacked = 0
    with open(path, "rb") as file:
        for data in decompressed(path, file):
            unpacked += len(data)
            if unpacked >= _JUDGED_BYTES:
                return unpacked * Path(path).stat().st_size // file.tell()
    return unpacked


def _new(kind: str) -> _Stream:
    if kind == "gz":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


def _damaged(path: str, kind: str, what: str, unpacked: int) -> DataError:
    tool = {"gz": "gzip -t", "zst": "zstd -t"}[kind]
    return DataError(
        f"--input {path} must be a whole .{kind} file; it is {what}, after {unpacked} bytes of text. "
        f"Check it ({tool}) and fetch it again."
    )
