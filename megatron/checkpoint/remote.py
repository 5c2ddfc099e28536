"""Checkpoints in an object store: which of them are whole, and their deletion. No torch.

    s3://bucket/run/checkpoints/step-00000020/rank-00000.safetensors
    s3://bucket/run/checkpoints/step-00000020/manifest.json             uploaded last, deleted first
    s3://bucket/run/hf/step-00000020/config.json                        likewise

A checkpoint counts as whole if its manifest fits its checksum and all files that it names are there in their sizes.
What is downloaded (``megatron.checkpoint.downloading``) is compared with the checksums of the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron import log, object_store
from megatron.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME, sequence_in
from megatron.errors import CheckpointError, DataError

_NAME = re.compile(r"step-(\d{8,})(-\d+)?")


class RemoteCheckpoint(NamedTuple):
    """One that is whole; ``files`` are the (bytes, crc32) of each, by name."""

    path: str
    sequence: int
    step: int
    manifest: bytes
    files: dict[str, tuple[int, int]]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the run that saved the checkpoint."""
        return json.loads(self.manifest)["state"]


def find(source: str) -> list[RemoteCheckpoint]:
    """Return the whole checkpoints of ``source``, the last saved first; what is not whole is named in a warning.

    Args:
        source: the place of a run in a store, its folder of checkpoints, or one checkpoint.

    Raises:
        DataError: the store cannot be asked.
    """
    sizes = object_store.sizes_below(source)
    folders: dict[tuple[str, ...], dict[str, int]] = {}
    for parts, size in sizes.items():
        folders.setdefault(parts[:-1], {})[parts[-1]] = size
    found = []
    for folder, held in folders.items():
        path = object_store.join(source, *folder)
        is_inside = folder[:-1] in ((), (CHECKPOINTS,)) and _NAME.fullmatch(path.rpartition("/")[2])
        if MANIFEST_NAME in held and is_inside:
            one = _read(path, held)
            found += [one] if one is not None else []
    return sorted(found, key=lambda one: (one.sequence, one.step), reverse=True)


def _read(path: str, held: dict[str, int]) -> RemoteCheckpoint | None:
    content = object_store.read_range(object_store.join(path, MANIFEST_NAME), 0, held[MANIFEST_NAME])
    sequence = sequence_in(content)
    if sequence is None:
        log.warning(f"{path} is not whole and is passed over: its {MANIFEST_NAME} does not fit its checksum")
        return None
    fields = json.loads(content)
    named = {name: (int(size), int(crc, 16)) for name, (size, crc) in fields["files"].items()}
    missing = {name: size for name, (size, _) in named.items() if held.get(name) != size}
    wrong = [f"{name} has {held.get(name, 0)} of {size} bytes" for name, size in missing.items()]
    if wrong:
        log.warning(f"{path} is not whole and is passed over: {', '.join(wrong)}")
        return None
    return RemoteCheckpoint(path, sequence, int(fields["step"]), content, named)


def newest_metadata(source: str) -> tuple[str, dict[str, Any]] | None:
    """Return path and metadata of the newest complete manifest in ``source``; None if there is none."""
    found = find(source)
    return (object_store.join(found[0].path, MANIFEST_NAME), found[0].metadata) if found else None


def require(source: str) -> list[RemoteCheckpoint]:
    """Return what ``find`` does, which must be one checkpoint at least.

    Raises:
        CheckpointError: there is none, or the store cannot be asked.
    """
    try:
        found = find(source)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if not found:
        raise CheckpointError(
            f"no whole checkpoint found in {source}: one is a folder like {CHECKPOINTS}/step-00000020 with a "
            f"{MANIFEST_NAME}, which is uploaded last"
        )
    return found


def remove(path: str, last: str = MANIFEST_NAME) -> None:
    """Delete what lies below ``path``: ``last`` first, without which nothing counts as whole.

    Raises:
        DataError: the store refuses.
    """
    names = ["/".join(parts) for parts in object_store.sizes_below(path)]
    for name in sorted(names, key=lambda name: name != last):
        object_store.remove(object_store.join(path, name))


def remove_old(source: str, counts: Callable[[RemoteCheckpoint], bool], number: int, every: int | None) -> list[str]:
    """Delete all but the last ``number`` whole checkpoints of those that count; return the names of what has gone.

    Args:
        counts: which are counted and may be deleted.
        every: one whose step is a multiple of this stays.

    Raises:
        DataError: the store refuses.
    """
    old = [one for one in [one for one in find(source) if counts(one)][number:] if not every or one.step % every]
    for one in old:
        remove(one.path)
    return [one.name for one in old]
