"""Read a manifest.json: checksum, sequence number and metadata (key ``state``). No torch."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

# ``manifest.json`` describes a checkpoint's contents. A folder without a complete manifest is not a checkpoint.
#
#     {"crc32": "1c291ca3",
#      "format_version": 1, "sequence": 4, "step": 20,
#      "state": {...}, "files": {"rank-00000.safetensors": [size, crc32]}, "index": {name: {...}}}
#
# The checksum covers every byte after the first line. ``sequence`` counts the saves into a folder and determines which
# checkpoint is the newest. The step does not, since after a rollback an earlier save may have a higher step.

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_SECOND_LINE = re.compile(rb'\n"format_version": \d+, "sequence": (\d+), "step": \d+,')


def read_sequence(folder: Path) -> int | None:
    """Read the sequence number in ``folder``; None without a manifest whose checksum matches."""
    try:
        return sequence_in((folder / MANIFEST_NAME).read_bytes())
    except OSError:
        return None


def sequence_in(content: bytes) -> int | None:
    """Parse the sequence number in a manifest; None if its checksum does not match."""
    match = _SECOND_LINE.search(content[:256]) if has_valid_checksum(content) else None
    return int(match[1]) if match else None


def read_metadata(folder: Path) -> dict[str, Any] | None:
    """Read the metadata in ``folder``; None without a manifest whose checksum matches."""
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
        metadata = json.loads(content)["state"] if has_valid_checksum(content) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return metadata if isinstance(metadata, dict) else None


def has_valid_checksum(content: bytes) -> bool:
    """Return True if the checksum in the first line matches the remaining bytes."""
    match = _FIRST_LINE.match(content)
    return match is not None and match[1] == b"%08x" % zlib.crc32(content[match.end() :])


CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""


def newest_metadata(source: Path) -> tuple[Path, dict[str, Any]] | None:
    """Read path and metadata of the newest complete manifest in ``source``; None without a complete manifest.

    Args:
        source: a run folder, its checkpoint folder, or a checkpoint, in the native or in DeepSpeed's format.
    """
    inner = source / CHECKPOINTS
    root = inner if inner.is_dir() else source
    paths = [root] if (root / MANIFEST_NAME).exists() else [*root.glob("step-*")] or [*source.glob("global_step*")]
    by_sequence = [(sequence, path) for path in paths if (sequence := read_sequence(path)) is not None]
    for _, path in sorted(by_sequence, reverse=True):
        metadata = read_metadata(path)
        if metadata is not None:
            return path / MANIFEST_NAME, metadata
    return None
