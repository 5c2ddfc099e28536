"""Manifest: a checkpoint's parsed ``manifest.json``."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME
from megatron.checkpoint.manifest import has_valid_checksum as has_valid_checksum
from megatron.checkpoint.manifest import read_sequence as read_sequence
from megatron.checkpoint.tensor_record import DTYPES, tiling_problem
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard

_FIELDS = {"crc32", "format_version", "sequence", "step", "state", "files", "index"}


class NewerFormatError(CheckpointError):
    """The checkpoint was written by a later version of this program."""


@dataclass(frozen=True)
class StoredShard:
    """A stored shard: its position in the global tensor (``shard``), its file, and its key in the file."""

    file: str
    key: str
    shard: Shard


@dataclass(frozen=True)
class TensorEntry:
    """A named global tensor: its dtype (safetensors' name), shape and shards."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True)
class FileInfo:
    """File size in bytes and checksum as written; verified when the checkpoint is opened."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Content of one ``manifest.json``. In the file, ``metadata`` has the key ``state``."""

    sequence: int
    step: int
    metadata: dict[str, Any]
    files: dict[str, FileInfo]
    index: dict[str, TensorEntry]


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Serialize the manifest as ``manifest.json``."""
    lines = [
        f'"format_version": {FORMAT_VERSION}, "sequence": {manifest.sequence}, "step": {manifest.step}',
        f'"state": {json.dumps(manifest.metadata)}',
        f'"files": {json.dumps({name: [f.size, f"{f.crc32:08x}"] for name, f in manifest.files.items()})}',
        f'"index": {{\n{_index_lines(manifest.index)}\n}}}}\n',
    ]
    body = ",\n".join(lines).encode()
    return b'{"crc32": "%08x",\n' % zlib.crc32(body) + body


def _index_lines(index: dict[str, TensorEntry]) -> str:
    return ",\n".join(f" {json.dumps(name)}: {json.dumps(_entry_fields(entry))}" for name, entry in index.items())


def _entry_fields(entry: TensorEntry) -> dict[str, Any]:
    shard_fields = [
        {
            "file": stored.file, "key": stored.key, "partition_dim": stored.shard.partition_dim,
            "start": stored.shard.start, "length": stored.shard.length,
        }
        for stored in entry.shards
    ]  # fmt: skip
    return {"dtype": entry.dtype, "shape": list(entry.shape), "pieces": shard_fields}


def manifest_from_bytes(content: bytes, path: Path) -> Manifest:
    """Parse a manifest.

    Args:
        content: bytes of ``manifest.json``.
        path: file path for error messages.

    Raises:
        NewerFormatError: a later version wrote the manifest.
        CheckpointError: the manifest is truncated or altered, or its content is not valid.
    """
    if not has_valid_checksum(content):
        raise CheckpointError(f"{path} is damaged: its checksum does not match ({len(content)} bytes)")
    try:
        fields = json.loads(content)
        version = fields["format_version"]
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{path} has the format version {version}; this program supports versions up to {FORMAT_VERSION}. "
                "Install the version that wrote it, or a later one."
            )
        if unknown := sorted(fields.keys() - _FIELDS):
            raise NewerFormatError(
                f"{path} has fields that this program does not support: {', '.join(unknown)}. "
                "Install the version that wrote it, or a later one."
            )
        return Manifest(
            sequence=int(fields["sequence"]),
            step=int(fields["step"]),
            metadata=fields["state"],
            files={
                _check_plain_name(name): FileInfo(int(size), int(crc, 16))
                for name, (size, crc) in fields["files"].items()
            },
            index={name: _parse_entry(name, entry) for name, entry in fields["index"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} does not describe a checkpoint: {type(error).__name__}: {error}") from error


def _check_plain_name(name: str) -> str:
    """Return ``name`` if it is a plain file name, which cannot point outside the checkpoint's folder.

    Raises:
        ValueError: ``name`` has a path separator, or is the manifest's name.
    """
    if Path(name).name != name or name == MANIFEST_NAME:
        raise ValueError(f"the file of a shard must be a plain file name, got {name!r}")
    return name


def _parse_entry(name: str, fields: dict[str, Any]) -> TensorEntry:
    shape = tuple(fields["shape"])
    stored_shards = tuple(
        StoredShard(
            _check_plain_name(shard_fields["file"]),
            shard_fields["key"],
            Shard(shape, shard_fields["partition_dim"], shard_fields["start"], shard_fields["length"]),
        )
        for shard_fields in fields["pieces"]
    )
    problem = tiling_problem(shape, [stored_shard.shard for stored_shard in stored_shards])
    if problem or fields["dtype"] not in DTYPES:
        raise ValueError(f"{name}: {problem or fields['dtype']}")
    return TensorEntry(fields["dtype"], shape, stored_shards)
