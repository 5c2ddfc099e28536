"""manifest.json as bytes: its checksum, sequence number and metadata (key ``state``). No torch."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

# ``manifest.json``: what a checkpoint folder holds. A folder without a whole one is not a checkpoint.
#
#     {"crc32": "1c291ca3",
#      "format_version": 1, "sequence": 4, "step": 20,
#      "state": {...}, "files": {"rank-00000.safetensors": [size, crc32]}, "index": {name: {...}}}
#
# The checksum covers every byte after its own line. ``sequence`` counts the saves into a folder: the newest checkpoint
# is the last one saved, also when a run went back to an earlier step and saved a lower one.

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_SECOND_LINE = re.compile(rb'\n"format_version": \d+, "sequence": (\d+), "step": \d+,')


def read_sequence(folder: Path) -> int | None:
    """Return the sequence number of the checkpoint ``folder``; None without a manifest whose checksum fits."""
    try:
        return sequence_in((folder / MANIFEST_NAME).read_bytes())
    except OSError:
        return None


def sequence_in(content: bytes) -> int | None:
    """Return the sequence number in a manifest; None where its checksum does not fit."""
    found = _SECOND_LINE.search(content[:256]) if is_whole(content) else None
    return int(found[1]) if found else None


def read_metadata(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of the checkpoint ``folder``; None without a manifest whose checksum matches."""
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
        metadata = json.loads(content)["state"] if is_whole(content) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return metadata if isinstance(metadata, dict) else None


def is_whole(content: bytes) -> bool:
    """Tell whether the checksum in the first line fits the rest."""
    first = _FIRST_LINE.match(content)
    return first is not None and first[1] == b"%08x" % zlib.crc32(content[first.end() :])


CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""


def newest_metadata(source: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return path and metadata of the newest complete manifest in ``source``; None if there is none.

    Args:
        source: a run folder, its folder of checkpoints or a checkpoint, of either format.
    """
    inner = source / CHECKPOINTS
    root = inner if inner.is_dir() else source
    paths = [root] if (root / MANIFEST_NAME).exists() else [*root.glob("step-*")] or [*source.glob("global_step*")]
    found = [(sequence, path) for path in paths if (sequence := read_sequence(path)) is not None]
    for _, path in sorted(found, reverse=True):
        metadata = read_metadata(path)
        if metadata is not None:
            return path / MANIFEST_NAME, metadata
    return None
