"""Select the checkpoints to keep, and delete all others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron import files
from megatron.checkpoint import metadata
from megatron.checkpoint.folders import newest_first, step_of
from megatron.checkpoint.metadata import Manifest
from megatron.checkpoint.remote import RemoteCheckpoint
from megatron.config import CheckpointConfig
from megatron.config.checkpoint import DEFAULT_NUM_CHECKPOINTS
from megatron.errors import CheckpointError, ConfigError

AUTOMATIC = "unasked"
"""Metadata key of a checkpoint that was saved by default, without a flag that requests it."""


@dataclass(frozen=True)
class RetentionPolicy:
    """Selects the checkpoints that are kept after a save.

    Args:
        last: number of complete checkpoints to keep (at least 1); None keeps all, except for the limit ``automatic``.
        every: keep each checkpoint whose step is a multiple of this.
        loaded: the checkpoint that the run started from, which is always kept.
        automatic: if ``last`` is None, number of checkpoints to keep among those saved at the default interval; None
            keeps all.
        earlier_sequence: checkpoints up to this sequence number belong to an earlier run and are neither counted nor
            deleted.

    Raises:
        ConfigError: ``last`` or ``every`` is below 1.
    """

    last: int | None = None
    every: int | None = None
    loaded: Path | None = None
    automatic: int | None = None
    earlier_sequence: int = 0

    def __post_init__(self) -> None:
        for flag, value in (("--keep-last", self.last), ("--keep-every", self.every)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")

    def protects(self, path: Path) -> bool:
        """Check if ``path`` is kept regardless of later checkpoints."""
        if self.every is not None and step_of(path) % self.every == 0:
            return True
        return self.loaded is not None and self.loaded.exists() and path.samefile(self.loaded)

    def counts(self, checkpoint: Manifest | RemoteCheckpoint) -> bool:
        """Check if the checkpoint counts toward the limit on kept checkpoints."""
        is_limited = self.last is not None or bool(checkpoint.metadata.get(AUTOMATIC))
        return is_limited and checkpoint.sequence > self.earlier_sequence


KEEP_ALL = RetentionPolicy()


def remove(path: Path) -> None:
    """Delete the checkpoint ``path``. It is renamed first, so that it disappears in one step."""
    renamed = path.with_name(f".deleted-{path.name}-{os.getpid()}")
    files.rename(path, renamed)
    files.remove_tree(renamed)


def remove_old(paths: Iterable[Path], retention: RetentionPolicy) -> None:
    """Delete the checkpoints that ``retention`` does not retain.

    A damaged checkpoint does not count toward the limit. A checkpoint whose manifest cannot be read, because it is
    damaged or was written by a later version, is not deleted.
    """
    limit = retention.automatic if retention.last is None else retention.last
    if limit is None:
        return
    num_kept = 0
    for path in newest_first(paths):
        try:
            manifest = metadata.manifest_from_bytes((path / metadata.MANIFEST_NAME).read_bytes(), path)
        except (OSError, CheckpointError):
            continue
        if not retention.counts(manifest):
            continue
        if num_kept >= limit and not retention.protects(path):
            remove(path)
        elif _has_files(path, manifest):
            num_kept += 1


def _has_files(path: Path, manifest: Manifest) -> bool:
    """Return True if all files have the sizes in the manifest. The contents are not read."""
    try:
        return all((path / name).stat().st_size == info.size for name, info in manifest.files.items())
    except OSError:
        return False


def make_retention_policy(
    flags: CheckpointConfig, *, loaded: Path | None = None, earlier_sequence: int = 0
) -> RetentionPolicy:
    """Build the retention policy from the flags; ``loaded``, ``earlier_sequence``: see ``RetentionPolicy``."""
    automatic = DEFAULT_NUM_CHECKPOINTS if flags.is_default_interval else None
    return RetentionPolicy(flags.keep_last, flags.keep_every, loaded, automatic, earlier_sequence)
