"""Read the zip archives that ``torch.save`` writes, without torch and without running code.

An archive has ``NAME/data.pkl``, the pickled values, and ``NAME/data/KEY``, each storage's bytes, uncompressed.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.torch_dist.inert_pickle import path_of, read_inertly

_STORAGE_DTYPES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""Class of a storage -> dtype, with safetensors' names."""
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SCALAR_FORMATS = {
    "F64": "d",
    "F32": "f",
    "F16": "e",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U8": "B",
    "BOOL": "?",
}
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor in an archive: its position, not its values.

    Args:
        dtype: safetensors' name.
        start, stop: its storage's byte range in the archive.
        crc32: the storage's checksum.
        offset: the first element's index in the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int
    crc32: int
    offset: int

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are stored in index order, without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def item(self, archive: memoryview) -> float | int | None:
        """Read the value of a tensor with one element; None if it has several, or its dtype is bf16."""
        if math.prod(self.shape) != 1 or self.dtype not in _SCALAR_FORMATS:
            return None
        position = self.start + self.offset * ITEM_SIZES[self.dtype]
        return struct.unpack_from(f"<{_SCALAR_FORMATS[self.dtype]}", archive, position)[0]  # type: ignore[no-any-return]


class _ViewFile(io.RawIOBase):
    """A read-only file over a memoryview, so that zipfile copies only what it reads."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._position = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._view) if size is None or size < 0 else self._position + size
        content = bytes(self._view[self._position : stop])
        self._position += len(content)
        return content


def read_archive(archive: memoryview) -> Any:
    """Read the values in a ``torch.save`` archive, with ``ArchivedTensor`` for tensors.

    Class instances become ``InertObject``.

    Raises:
        ValueError: ``archive`` is not such an archive, or it is damaged.
    """
    try:
        with zipfile.ZipFile(_ViewFile(archive)) as members:  # type: ignore[arg-type]
            infos = {info.filename.partition("/")[2]: info for info in members.infolist()}
            content = members.read(infos["data.pkl"])
            order = members.read(infos["byteorder"]) if "byteorder" in infos else b"little"
    except (zipfile.BadZipFile, KeyError, OSError, NotImplementedError, EOFError, struct.error) as error:
        raise ValueError(f"it is not an archive of torch.save: {error}") from error
    if order != b"little":
        raise ValueError("it was written on a big-endian machine")

    def load_storage(persistent_id: Any) -> tuple[str, int, int, int]:
        _, storage_class, key, *_ = persistent_id
        info = infos[f"data/{key}"]
        dtype = _STORAGE_DTYPES.get(path_of(storage_class).rpartition(".")[2], "")
        start = info.header_offset + _LOCAL_HEADER_BYTES
        name_length, extra_length = struct.unpack_from("<HH", archive, start - 4)
        start += name_length + extra_length
        if info.compress_type != zipfile.ZIP_STORED or start + info.file_size > len(archive):
            raise ValueError(f"the storage {key} is truncated")
        return dtype, start, start + info.file_size, info.CRC

    def rebuild(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> ArchivedTensor:
        dtype, start, stop, crc32 = storage
        return ArchivedTensor(dtype, tuple(shape), tuple(stride), start, stop, crc32, offset)

    builders = dict.fromkeys(_REBUILD, rebuild)
    return read_inertly(content, {**builders, _REBUILD_PARAMETER: lambda tensor, *_: tensor}, load_storage)
