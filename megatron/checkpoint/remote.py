"""Find, verify and delete checkpoints in an object store. No torch.

Run layout in a store:

    s3://bucket/run/checkpoints/step-00000020/rank-00000.safetensors
    s3://bucket/run/checkpoints/step-00000020/manifest.json             uploaded last, deleted first
    s3://bucket/run/hf/step-00000020/config.json                        uploaded last, deleted first

A checkpoint is complete if its manifest matches its checksum and all files in the manifest exist with the listed sizes.
``megatron.checkpoint.downloading`` compares downloaded files with the manifest's checksums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron import log, object_store
from megatron.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME, sequence_in
from megatron.errors import CheckpointError, DataError

_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(-\d+)?")


class RemoteCheckpoint(NamedTuple):
    """A complete checkpoint in a store; ``files`` maps file names to (size in bytes, crc32)."""

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
        """Metadata of the run that saved the checkpoint."""
        return json.loads(self.manifest)["state"]


def find_checkpoints(source: str) -> list[RemoteCheckpoint]:
    """List the complete checkpoints in ``source``, last saved first; warn about each incomplete one.

    Args:
        source: store address of a run, its checkpoint folder, or one checkpoint.

    Raises:
        DataError: the store cannot be read.
    """
    object_sizes = object_store.sizes_below(source)
    folders: dict[tuple[str, ...], dict[str, int]] = {}
    for parts, size in object_sizes.items():
        folders.setdefault(parts[:-1], {})[parts[-1]] = size
    checkpoints = []
    for folder, file_sizes in folders.items():
        path = object_store.join(source, *folder)
        is_inside = folder[:-1] in ((), (CHECKPOINTS,)) and _CHECKPOINT_NAME.fullmatch(path.rpartition("/")[2])
        if MANIFEST_NAME in file_sizes and is_inside:
            checkpoint = _read_checkpoint(path, file_sizes)
            checkpoints += [checkpoint] if checkpoint is not None else []
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.sequence, checkpoint.step), reverse=True)


def _read_checkpoint(path: str, file_sizes: dict[str, int]) -> RemoteCheckpoint | None:
    content = object_store.read_range(object_store.join(path, MANIFEST_NAME), 0, file_sizes[MANIFEST_NAME])
    sequence = sequence_in(content)
    if sequence is None:
        log.warning(f"{path} is incomplete and is skipped: the checksum of its {MANIFEST_NAME} does not match")
        return None
    fields = json.loads(content)
    expected = {name: (int(size), int(crc, 16)) for name, (size, crc) in fields["files"].items()}
    missing = {name: size for name, (size, _) in expected.items() if file_sizes.get(name) != size}
    problems = [f"{name} has {file_sizes.get(name, 0)} of {size} bytes" for name, size in missing.items()]
    if problems:
        log.warning(f"{path} is incomplete and is skipped: {', '.join(problems)}")
        return None
    return RemoteCheckpoint(path, sequence, int(fields["step"]), content, expected)


def newest_metadata(source: str) -> tuple[str, dict[str, Any]] | None:
    """Read path and metadata of the newest complete checkpoint in ``source``; None without a complete checkpoint."""
    checkpoints = find_checkpoints(source)
    return (object_store.join(checkpoints[0].path, MANIFEST_NAME), checkpoints[0].metadata) if checkpoints else None


def require_checkpoints(source: str) -> list[RemoteCheckpoint]:
    """Call ``find_checkpoints`` for ``source``, which must have a complete checkpoint.

    Raises:
        CheckpointError: ``source`` has no complete checkpoint, or the store cannot be read.
    """
    try:
        checkpoints = find_checkpoints(source)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if not checkpoints:
        raise CheckpointError(
            f"no complete checkpoint found in {source}: a checkpoint is a folder like {CHECKPOINTS}/step-00000020 with "
            f"a {MANIFEST_NAME}, which is uploaded last"
        )
    return checkpoints


def remove(path: str, marker_name: str = MANIFEST_NAME) -> None:
    """Delete all objects below ``path``, ``marker_name`` first, so that a partly deleted folder counts as incomplete.

    Args:
        marker_name: name of the last uploaded file, which marks the folder as complete.

    Raises:
        DataError: the store rejects the deletion.
    """
    names = ["/".join(parts) for parts in object_store.sizes_below(path)]
    for name in sorted(names, key=lambda name: name != marker_name):
        object_store.remove(object_store.join(path, name))


def remove_old(
    source: str, is_counted: Callable[[RemoteCheckpoint], bool], keep_last: int, keep_every: int | None
) -> list[str]:
    """Delete complete checkpoints that ``is_counted`` selects, except the last ``keep_last``; return the deleted names.

    Args:
        is_counted: predicate; only checkpoints for which it is True are counted and may be deleted.
        keep_every: keep each checkpoint whose step is a multiple of this.

    Raises:
        DataError: the store rejects the deletion.
    """
    expired = [
        checkpoint
        for checkpoint in [checkpoint for checkpoint in find_checkpoints(source) if is_counted(checkpoint)][keep_last:]
        if not keep_every or checkpoint.step % keep_every
    ]
    for checkpoint in expired:
        remove(checkpoint.path)
    return [checkpoint.name for checkpoint in expired]
