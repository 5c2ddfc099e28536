"""``PREFIX.meta.json``: tokenizer, special tokens and checksums for a pair of token files.

The file is optional. Other programs that read token files ignore it.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import DataError

FORMAT = 1
_CHECKSUM = "crc32"
_OPTIONAL = ("source", "probe")
"""Fields that are left out if they are unknown, as in files of earlier versions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetMetadata:
    """Metadata for a pair of token files, written together with it.

    Args:
        source: digest of the encoded text; None: unknown.
        probe: the tokenizer's ids of the probe texts (``megatron.tokenizer.probe``); None in older files.
    """

    num_tokens: int
    num_documents: int
    max_token_id: int
    vocab_size: int
    tokenizer: str
    eod_id: int | None
    has_eod: bool
    bin_bytes: int
    bin_crc32: int
    idx_crc32: int
    format: int = FORMAT
    source: str | None = None
    probe: Mapping[str, Any] | None = None

    def to_json(self) -> bytes:
        """Serialize the fields and their crc32."""
        fields = dataclasses.asdict(self)
        fields = {name: value for name, value in fields.items() if value is not None or name not in _OPTIONAL}
        return (json.dumps(fields | {_CHECKSUM: _crc32(fields)}, indent=2) + "\n").encode()


def read(path: Path) -> DatasetMetadata | None:
    """Read the sidecar at ``path``; None if the file does not exist.

    Raises:
        DataError: the file is unreadable, has another format, or does not match its crc32 (older files have none).
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). Correct its permissions, or copy it again.") from error
    return parse(content, path)


def parse(content: bytes, path: Path | str) -> DatasetMetadata:
    """Parse a sidecar's content; ``path`` is used in messages.

    Raises:
        DataError: see ``read``.
    """
    try:
        fields = dict(json.loads(content))
        crc32 = fields.pop(_CHECKSUM, None)
        sidecar = DatasetMetadata(**fields)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Delete it, or build the data again.") from error
    if sidecar.format != FORMAT:
        raise DataError(
            f"{path}: format must be {FORMAT}, got {sidecar.format}. Delete the file, or build the data again."
        )
    if crc32 is not None and crc32 != _crc32(fields):
        raise DataError(
            f"{path}: the crc32 of its fields is {_crc32(fields)}, but the file states {crc32}; it was damaged or "
            "edited. Build the data again, or delete the file."
        )
    return sidecar


def check_matches_files(
    sidecar: DatasetMetadata, path: Path, *, num_documents: int, num_tokens: int, idx_crc32: int | None
) -> None:
    """Check that the sidecar read from ``path`` describes the token files next to it.

    Args:
        idx_crc32: checksum of the ``.idx``; None if unknown.

    Raises:
        DataError: the sidecar describes other files.
    """
    expected = f"{sidecar.num_documents} documents, {sidecar.num_tokens} tokens"
    actual = f"{num_documents} documents, {num_tokens} tokens"
    if idx_crc32 is not None and sidecar.idx_crc32 != idx_crc32:
        expected, actual = f"crc32 {sidecar.idx_crc32:08x}", f"{idx_crc32:08x}"
    if expected != actual:
        raise DataError(
            f"{path} describes another .idx ({expected}) than the .idx next to it ({actual}). Delete it if the .bin "
            "and .idx are correct; otherwise build all three again."
        )


def _crc32(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
