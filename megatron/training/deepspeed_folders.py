"""Names and commit of checkpoints in the DeepSpeed layout (``--checkpoint-format deepspeed``).

| name | content |
|---|---|
| ``global_step20`` | a checkpoint: DeepSpeed's files and our ``manifest.json``, which DeepSpeed ignores |
| ``global_step20-1`` | a second checkpoint of the same step; existing checkpoints are never overwritten |
| ``latest`` | the name of the checkpoint that DeepSpeed loads; our loader uses the manifests instead |
| ``.tmp-...``, ``.deleted-...`` | left over from a killed save or deletion; the next save removes them |

Renaming the temporary folder commits the checkpoint; ``latest`` is then replaced atomically. So after a kill at any
time, both loaders find a complete checkpoint. Without this module, DeepSpeed writes directly into the final folder,
and updates ``latest`` while other ranks are still writing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from megatron import files, log
from megatron.checkpoint import Checkpoint, folders
from megatron.checkpoint.loading import open_first
from megatron.checkpoint.metadata import MANIFEST_NAME, FileInfo, Manifest, manifest_to_bytes
from megatron.checkpoint.one_process import DEEPSPEED
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.checkpoint.retention import RetentionPolicy, remove_old
from megatron.mpu.groups import Group

FORMAT = DEEPSPEED
_TAG = re.compile(r"global_step(\d+)(-\d+)?")
_STALE = (".tmp-global_step", ".deleted-global_step", f".{folders.LATEST}.tmp-")


def tags_in(source: Path) -> list[Path]:
    """Find checkpoints with this layout in ``source`` (see ``folders.order_candidates``), or ``source`` itself."""
    if _TAG.fullmatch(source.resolve().name) and (source / MANIFEST_NAME).exists():
        return [source]
    tags = _tag_folders(source) if source.is_dir() else []
    return folders.order_candidates(path for path in tags if (path / MANIFEST_NAME).exists())


def foreign_tags_in(source: Path) -> list[Path]:
    """Find folders written by DeepSpeed without our manifest; a run cannot resume from them."""
    return [path for path in _tag_folders(source) if not (path / MANIFEST_NAME).exists()] if source.is_dir() else []


def is_deepspeed_checkpoint(checkpoint: Checkpoint) -> bool:
    """Return True if ``checkpoint`` is in DeepSpeed's format."""
    return checkpoint.metadata.get("format") == FORMAT


def open_newest(source: Path, world: Group, *, strict: bool = False) -> Checkpoint:
    """Open the newest checkpoint in ``source`` that verifies; damaged ones are logged and skipped. Collective.

    Args:
        strict: do not skip damaged checkpoints.

    Raises:
        CheckpointError: no checkpoint verifies.
    """
    return open_first(gather_verdict(world, lambda: None, lambda _: tags_in(source)), world, source, strict=strict)


def make_temporary_folder(root: Path, step: int) -> Path:
    """Create a temporary folder for the checkpoint of ``step`` and return the path. Rank 0 only."""
    files.make_folder(root)
    folders.remove_stale(root, _STALE)
    temporary = root / f".tmp-global_step{step}-{os.getpid()}"
    files.make_folder(temporary)
    return temporary


def commit(temporary: Path, step: int, metadata: dict[str, Any], file_facts: dict[str, FileInfo]) -> Path:
    """Write the manifest, rename ``temporary`` to the checkpoint, and return the new path. Rank 0 only."""
    root = temporary.parent
    manifest = Manifest(folders.last_sequence(_tag_folders(root)) + 1, step, metadata, file_facts, {})
    files.write_bytes(temporary / MANIFEST_NAME, manifest_to_bytes(manifest))
    files.sync_folder(temporary)
    target = _unused_path(root, step)
    folders.commit_checkpoint(temporary, target)
    return target


def clean_up(path: Path, retention: RetentionPolicy) -> None:
    """Point ``latest`` at ``path`` and delete old checkpoints; errors are only logged. Rank 0 only."""
    root = path.parent
    try:
        files.replace_bytes(root / folders.LATEST, path.name.encode())
        remove_old(tags_in(root), retention)
    except OSError as error:
        log.warning(f"{root}: {error}; {path} is complete, but `latest` or older checkpoints were not updated")


def _tag_folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if _TAG.fullmatch(path.name)]


def _unused_path(root: Path, step: int) -> Path:
    """Return a checkpoint path for ``step`` that does not exist yet."""
    path, suffix = root / f"global_step{step}", 0
    while path.exists():
        suffix += 1
        path = root / f"global_step{step}-{suffix}"
    return path
