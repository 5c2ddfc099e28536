"""Names and commit of checkpoints in DeepSpeed's layout (``--checkpoint-format deepspeed``).

| name | is |
|---|---|
| ``global_step20`` | a checkpoint: DeepSpeed's files and our ``manifest.json``, which DeepSpeed passes over |
| ``global_step20-1`` | the same step saved once more: nothing is written over |
| ``latest`` | the name that DeepSpeed loads; our loader goes by the manifests |
| ``.tmp-...``, ``.deleted-...`` | a save or a removal that was killed; the next save removes it |

The rename of the temporary folder is the commit; ``latest`` follows in one step. So a kill at any moment leaves the
checkpoint before, whole, for both loaders. DeepSpeed by itself writes into the folder that it names, and names it
while other ranks still write.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from megatron import files, log
from megatron.checkpoint import Checkpoint, folders
from megatron.checkpoint.loading import open_first
from megatron.checkpoint.metadata import MANIFEST_NAME, FileFacts, Manifest, manifest_to_bytes
from megatron.checkpoint.one_process import DEEPSPEED
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.checkpoint.retention import RetentionPolicy, remove_old
from megatron.mpu.groups import Group

FORMAT = DEEPSPEED
_TAG = re.compile(r"global_step(\d+)(-\d+)?")
_STALE = (".tmp-global_step", ".deleted-global_step", f".{folders.LATEST}.tmp-")


def tags_in(source: Path) -> list[Path]:
    """Return the checkpoints of this layout in ``source`` as ``folders.in_turn``; ``source`` itself if it is one."""
    if _TAG.fullmatch(source.resolve().name) and (source / MANIFEST_NAME).exists():
        return [source]
    named = _named(source) if source.is_dir() else []
    return folders.in_turn(path for path in named if (path / MANIFEST_NAME).exists())


def foreign_tags_in(source: Path) -> list[Path]:
    """Return folders that DeepSpeed wrote without us: they say nothing of the run, and are not resumed from."""
    return [path for path in _named(source) if not (path / MANIFEST_NAME).exists()] if source.is_dir() else []


def is_of_this_format(checkpoint: Checkpoint) -> bool:
    """Tell whether ``checkpoint`` holds DeepSpeed's files."""
    return checkpoint.metadata.get("format") == FORMAT


def open_newest(source: Path, world: Group, *, strict: bool = False) -> Checkpoint:
    """Return the last one saved in ``source`` that verifies; those passed over are named. Collective.

    Args:
        strict: nothing is passed over.

    Raises:
        CheckpointError: none verifies.
    """
    return open_first(gather_verdict(world, lambda: None, lambda _: tags_in(source)), world, source, strict=strict)


def prepare(root: Path, step: int) -> Path:
    """Make the temporary folder for a checkpoint of ``step`` and return its path. Rank 0 only."""
    files.make_folder(root)
    folders.remove_stale(root, _STALE)
    temporary = root / f".tmp-global_step{step}-{os.getpid()}"
    files.make_folder(temporary)
    return temporary


def commit(temporary: Path, step: int, metadata: dict[str, Any], facts: dict[str, FileFacts]) -> Path:
    """Write the manifest, rename ``temporary`` to the checkpoint, and return its path. Rank 0 only."""
    root = temporary.parent
    content = Manifest(folders.last_sequence(_named(root)) + 1, step, metadata, facts, {})
    files.write_bytes(temporary / MANIFEST_NAME, manifest_to_bytes(content))
    files.sync_folder(temporary)
    target = _free_name(root, step)
    folders.commit_checkpoint(temporary, target)
    return target


def clean_up(path: Path, keep: RetentionPolicy) -> None:
    """Point ``latest`` at ``path`` and delete old ones: the save has succeeded whatever happens here. Rank 0 only."""
    root = path.parent
    try:
        files.replace_bytes(root / folders.LATEST, path.name.encode())
        remove_old(tags_in(root), keep)
    except OSError as error:
        log.warning(f"{root}: {error}; {path} is complete, but `latest` or older checkpoints are as they were")


def _named(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if _TAG.fullmatch(path.name)]


def _free_name(root: Path, step: int) -> Path:
    path, number = root / f"global_step{step}", 0
    while path.exists():
        number += 1
        path = root / f"global_step{step}-{number}"
    return path
