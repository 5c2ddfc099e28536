"""Find the newest complete checkpoint and verify every byte.

Loading never writes to the checkpoint folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron import log
from megatron.checkpoint import folders, metadata
from megatron.checkpoint.metadata import (
    Manifest,
    NewerFormatError,
)
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.checkpoint.torch_dist.checkpoint import open_torch_dist
from megatron.checkpoint.torch_dist.folder import find_iteration
from megatron.checkpoint.verify import verify
from megatron.errors import CheckpointError, marked
from megatron.mpu.groups import Group

if TYPE_CHECKING:
    pass


def open_latest(
    root: Path, world: Group, *, strict: bool = False, accept: Callable[[Path], bool] | None = None
) -> Checkpoint:
    """Open the newest checkpoint in ``root`` that verifies, or ``root`` itself if it is a checkpoint. Collective.

    All ranks get the same checkpoint. A warning names every newer checkpoint that was skipped, with the reason.

    Args:
        strict: raise if the newest checkpoint does not verify, instead of trying older ones.
        accept: predicate that selects the checkpoints to try; called on rank 0.

    Raises:
        CheckpointError: ``root`` does not exist, contains no checkpoint, or none of its checkpoints verifies.
    """
    root = Path(root)
    candidates = gather_verdict(world, lambda: None, lambda _: _list_candidates(root, accept))
    checkpoint = open_first(candidates, world, root, strict=strict)
    if world.rank == 0 and accept is None and checkpoint.path != root:
        _check_latest_hint(root, checkpoint)
    return checkpoint


def open_first(candidates: list[Path], world: Group, root: Path, *, strict: bool = False) -> Checkpoint:
    """Open the first of ``candidates`` that verifies, with warnings and errors as in ``open_latest``. Collective.

    Args:
        candidates: checkpoint paths, the same on all ranks.
    """
    if candidates == [root]:
        return open_checkpoint(root, world)

    def open_path(path: Path) -> tuple[Checkpoint, str]:
        checkpoint = open_checkpoint(path, world)
        return checkpoint, f"{path.name} (step {checkpoint.step})"

    return open_first_valid(candidates, open_path, world, root, strict=strict)


Candidate = TypeVar("Candidate")
Opened = TypeVar("Opened")


@marked(is_of_this_rank=False)
def open_first_valid(
    candidates: Sequence[Candidate],
    open_candidate: Callable[[Candidate], tuple[Opened, str]],
    world: Group,
    root: Path | str,
    *,
    strict: bool = False,
) -> Opened:
    """Return the result for the first candidate that ``open_candidate`` opens without a CheckpointError. Collective.

    Args:
        open_candidate: opens a candidate; returns the result and a name for the candidate. A warning about skipped
            candidates uses the name.

    Raises:
        NewerFormatError: a later version wrote the candidate; older candidates are not tried.
        CheckpointError: no candidate verifies, or with ``strict`` the first one does not; raised on all ranks.
    """
    reasons = []
    for candidate in candidates:
        try:
            result, name = open_candidate(candidate)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if strict:
                raise CheckpointError(f"the newest checkpoint must verify with --strict-load: {error}") from error
            reasons.append(str(error))
            continue
        if reasons and world.rank == 0:
            log.warning(f"falling back to {name}, because: " + " | ".join(reasons))
        return result
    raise CheckpointError(f"no checkpoint in {root} verifies: " + " | ".join(reasons))


def _list_candidates(root: Path, accept: Callable[[Path], bool] | None) -> list[Path]:
    """List the checkpoints in ``root`` in the order in which to try them, newest first. Rank 0 only."""
    if not root.is_dir():
        actual = "is a file" if root.exists() else "does not exist"
        raise CheckpointError(f"{root} {actual}; a folder with checkpoints is required")
    if (root / metadata.MANIFEST_NAME).exists():
        return [root]
    checkpoints = [
        path for path in folders.order_candidates(folders.list_checkpoints(root)) if accept is None or accept(path)
    ]
    if not checkpoints:
        raise CheckpointError(
            f"no checkpoint found in {root}: a checkpoint is a folder like step-00000020{_deepspeed_hint(root)}"
        )
    return checkpoints


def _deepspeed_hint(root: Path) -> str:
    """Return an addition to an error message if ``root`` has checkpoints from DeepSpeed's engine, otherwise ""."""
    engine_folders = list(root.glob("global_step*"))
    with_manifest = folders.order_candidates(
        path for path in engine_folders if (path / metadata.MANIFEST_NAME).exists()
    )
    if with_manifest:
        return f". {deepspeed_format_message(with_manifest[0])}"
    if engine_folders:
        return (
            f"; {engine_folders[0].name} was written by DeepSpeed: import its weights with tools/import_checkpoint.py"
        )
    return ""


def deepspeed_format_message(path: Path) -> str:
    """Format the error message for a checkpoint in DeepSpeed's format where the native format is needed."""
    return (
        f"{path} is in DeepSpeed's format, which only the training scripts can read. Resume it in a new run folder to "
        f"save it in the native format: --load {path} --checkpoint-format native --save NEW_FOLDER"
    )


def _check_latest_hint(root: Path, checkpoint: Checkpoint) -> None:
    hint = folders.read_latest(root)
    if hint != checkpoint.path.name:
        log.warning(
            f"{root / folders.LATEST} names {hint!r}, but the newest complete checkpoint is {checkpoint.path.name}"
        )


def open_newest(source: Path, world: Group, *, strict: bool = False) -> Checkpoint:
    """Open the newest checkpoint in ``source`` that verifies: ours, otherwise Megatron-Core's. Collective.

    Args:
        source: a run folder, its checkpoint folder, one checkpoint, or a Megatron-LM folder.
        strict: as in ``open_latest``.

    Raises:
        CheckpointError: as ``open_latest``.
    """
    iteration = gather_verdict(world, lambda: None, lambda _: find_iteration(source))
    if iteration is not None:
        return open_torch_dist(iteration, world)
    return open_latest(folders.checkpoints_folder(source), world, strict=strict)


@marked(is_of_this_rank=False)
def open_checkpoint(path: Path, world: Group) -> Checkpoint:
    """Verify and open the checkpoint in the folder ``path``. Each rank reads some of the files. Collective.

    Raises:
        CheckpointError: names each file that is missing, truncated or altered; raised on all ranks.
    """
    path = Path(path)
    if gather_verdict(world, lambda: None, lambda _: find_iteration(path)) is not None:
        return open_torch_dist(path, world)
    raw = gather_verdict(world, lambda: None, lambda _: read_manifest_bytes(path))
    manifest = metadata.manifest_from_bytes(raw, path / metadata.MANIFEST_NAME)
    verify(path, manifest, world)
    if world.rank == 0:
        _warn_extra_files(path, manifest)
    return Checkpoint(path, manifest, world)


def read_manifest_bytes(path: Path) -> bytes:
    """Read the manifest in ``path``. Only rank 0 reads it, so that all ranks use the same bytes."""
    try:
        return (path / metadata.MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {metadata.MANIFEST_NAME}: {error.strerror}"
        ) from error


def _warn_extra_files(path: Path, manifest: Manifest) -> None:
    extra_files = sorted(
        child.name for child in path.iterdir() if child.name not in {*manifest.files, metadata.MANIFEST_NAME}
    )
    if extra_files:
        log.warn_once(
            f"{path} contains files that are not part of the checkpoint; they are ignored: {', '.join(extra_files)}"
        )
