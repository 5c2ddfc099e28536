"""RetentionPolicy: which checkpoints are kept, and the deletion of the others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron import files
from megatron.checkpoint import metadata
from megatron.checkpoint.folders import newest_first, step_of
from megatron.checkpoint.manifest import CHECKPOINTS as CHECKPOINTS
from megatron.checkpoint.metadata import Manifest
from megatron.checkpoint.remote import RemoteCheckpoint
from megatron.errors import CheckpointError

AUTOMATIC = "unasked"
"""In the state of a checkpoint that no flag asked for."""


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the last so many complete ones, each whose step is a multiple, and the one loaded.

    Attributes:
        last: None: all but those that ``automatic`` is about.
        automatic: without ``last``: of those that nobody asked for so many stay; None: all.
        earlier: up to this sequence number they are of an earlier run, and are neither counted nor deleted.
    """

    last: int | None = None
    every: int | None = None
    loaded: Path | None = None
    automatic: int | None = None
    earlier: int = 0

    def protects(self, path: Path) -> bool:
        """Tell whether ``path`` stays however many came after it."""
        if self.every is not None and step_of(path) % self.every == 0:
            return True
        return self.loaded is not None and self.loaded.exists() and path.samefile(self.loaded)

    def counts(self, content: Manifest | RemoteCheckpoint) -> bool:
        """Tell whether it is one of those of which only so many stay."""
        is_one = self.last is not None or bool(content.state.get(AUTOMATIC))
        return is_one and content.sequence > self.earlier


ALL = RetentionPolicy()


def remove(path: Path) -> None:
    """Delete the checkpoint ``path``: the rename takes it away in one step, then its files go."""
    gone = path.with_name(f".deleted-{path.name}-{os.getpid()}")
    files.rename(path, gone)
    files.remove_tree(gone)


def remove_old(paths: Iterable[Path], keep: RetentionPolicy) -> None:
    """Delete those checkpoints that need not stay.

    A damaged one does not count among the last ones. One whose manifest cannot be read, because it is broken or a later
    version wrote it, is left alone.
    """
    number = keep.automatic if keep.last is None else keep.last
    if number is None:
        return
    kept = 0
    for path in newest_first(paths):
        try:
            content = metadata.manifest_from_bytes((path / metadata.MANIFEST_NAME).read_bytes(), path)
        except (OSError, CheckpointError):
            continue
        if not keep.counts(content):
            continue
        if kept >= number and not keep.protects(path):
            remove(path)
        elif _has_files(path, content):
            kept += 1


def _has_files(path: Path, content: Manifest) -> bool:
    """Tell whether the files of ``path`` are there and have their sizes (their bytes are not read)."""
    try:
        return all((path / name).stat().st_size == facts.size for name, facts in content.files.items())
    except OSError:
        return False
