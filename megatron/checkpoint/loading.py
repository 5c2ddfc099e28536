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
from megatron.checkpoint.verify import verify
from megatron.errors import CheckpointError, marked
from megatron.mpu.groups import Group

if TYPE_CHECKING:
    pass


def open_latest(
    root: Path, world: Group, *, strict: bool = False, accept: Callable[[Path], bool] | None = None
) -> Checkpoint:
    """Return the newest checkpoint in ``root`` that verifies, or ``root`` itself if it is one. Collective.

    All ranks get the same one. Each that had to be passed over is named in a warning with its reason.

    Args:
        strict: nothing is passed over: the newest must verify.
        accept: which ones to look at; asked on rank 0.

    Raises:
        CheckpointError: there is no folder ``root``, no checkpoint in it, or none that verifies.
    """
    root = Path(root)
    candidates = gather_verdict(world, lambda: None, lambda _: _candidates(root, accept))
    found = open_first(candidates, world, root, strict=strict)
    if world.rank == 0 and accept is None and found.path != root:
        _compare_hint(root, found)
    return found


def open_first(candidates: list[Path], world: Group, root: Path, *, strict: bool = False) -> Checkpoint:
    """Return the first of ``candidates``, the same on all ranks, that verifies; else as ``open_latest``. Collective."""
    if candidates == [root]:
        return open_checkpoint(root, world)

    def opened(path: Path) -> tuple[Checkpoint, str]:
        found = open_checkpoint(path, world)
        return found, f"{path.name} (step {found.step})"

    return first_that_verifies(candidates, opened, world, root, strict=strict)


Candidate = TypeVar("Candidate")
Opened = TypeVar("Opened")


@marked(is_of_this_rank=False)
def first_that_verifies(
    candidates: Sequence[Candidate],
    opened: Callable[[Candidate], tuple[Opened, str]],
    world: Group,
    root: Path | str,
    *,
    strict: bool = False,
) -> Opened:
    """Return what ``opened`` makes of the first of ``candidates`` for which it raises no CheckpointError. Collective.

    Args:
        opened: also returns what the candidate is called in the warning that names those that were passed over.

    Raises:
        CheckpointError: of none, or ``strict`` and not of the first; on all ranks alike.
    """
    reasons = []
    for one in candidates:
        try:
            found, name = opened(one)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if strict:
                raise CheckpointError(f"the newest checkpoint must verify, none older is taken: {error}") from error
            reasons.append(str(error))
            continue
        if reasons and world.rank == 0:
            log.warning(f"going back to {name}, since: " + " | ".join(reasons))
        return found
    raise CheckpointError(f"no checkpoint in {root} verifies: " + " | ".join(reasons))


def _candidates(root: Path, accept: Callable[[Path], bool] | None) -> list[Path]:
    """Return what may be opened in ``root``, the newest first. Rank 0 only."""
    if not root.is_dir():
        found_instead = "a file" if root.exists() else "not there"
        raise CheckpointError(f"checkpoints must lie in a folder; {root} is {found_instead}")
    if (root / metadata.MANIFEST_NAME).exists():
        return [root]
    found = [path for path in folders.in_turn(folders.list_checkpoints(root)) if accept is None or accept(path)]
    if not found:
        raise CheckpointError(
            f"no checkpoint found in {root}: a checkpoint is a folder like step-00000020{_deepspeed_hint(root)}"
        )
    return found


def _deepspeed_hint(root: Path) -> str:
    """Return the end of a message if ``root`` holds checkpoints of DeepSpeed's engine, else an empty text."""
    theirs = list(root.glob("global_step*"))
    ours = folders.in_turn(path for path in theirs if (path / metadata.MANIFEST_NAME).exists())
    if ours:
        return f". {in_deepspeed_format(ours[0])}"
    if theirs:
        return f"; {theirs[0].name} was written by DeepSpeed: tools/import_checkpoint.py takes its weights"
    return ""


def in_deepspeed_format(path: Path) -> str:
    """Return the message for a checkpoint that DeepSpeed's engine wrote, where one of our own format is needed."""
    return (
        f"{path} is in DeepSpeed's format, which only training reads. Resume it in a new run folder, which gets a "
        f"checkpoint that every tool reads: --load {path} --checkpoint-format native --save NEW_FOLDER"
    )


def _compare_hint(root: Path, found: Checkpoint) -> None:
    hint = folders.read_latest(root)
    if hint != found.path.name:
        log.warning(f"{root / folders.LATEST} says {hint!r}; the newest complete checkpoint is {found.path.name}")


@marked(is_of_this_rank=False)
def open_checkpoint(path: Path, world: Group) -> Checkpoint:
    """Verify the checkpoint in the folder ``path``, the ranks sharing its files, and return it. Collective.

    Raises:
        CheckpointError: on all ranks alike; naming each file that is missing, truncated or altered.
    """
    path = Path(path)
    raw = gather_verdict(world, lambda: None, lambda _: manifest_bytes(path))
    content = metadata.manifest_from_bytes(raw, path / metadata.MANIFEST_NAME)
    verify(path, content, world)
    if world.rank == 0:
        _warn_foreign(path, content)
    return Checkpoint(path, content, world)


def manifest_bytes(path: Path) -> bytes:
    """Return the content of the manifest in ``path``. Rank 0 only, so that all ranks see the same."""
    try:
        return (path / metadata.MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {metadata.MANIFEST_NAME}: {error.strerror}"
        ) from error


def _warn_foreign(path: Path, content: Manifest) -> None:
    foreign = sorted(
        child.name for child in path.iterdir() if child.name not in {*content.files, metadata.MANIFEST_NAME}
    )
    if foreign:
        log.warn_once(f"{path} also holds files that are not part of it; they are ignored: {', '.join(foreign)}")
