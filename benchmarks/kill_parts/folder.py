"""What may lie in the folder of a run between two starts, and at its end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.folders import LATEST, list_checkpoints, newest_first, step_of
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.training import run_lock
from megatron.training.train_state import CHECKPOINTS

JUNK = (b"", b"step-0000", b"\x00\xff\xfe", b"step-99999999\n")


def broken(run: Path) -> Iterator[str]:
    """Yield what is wrong with the checkpoints of ``run``: what carries a checkpoint's name must be whole."""
    root = run / CHECKPOINTS
    for path in root.glob("step-*") if root.is_dir() else ():
        try:
            found = open_checkpoint(path, SINGLE).state["progress"]["step"]
        except CheckpointError as error:
            yield f"{path.name} is no whole checkpoint: {error}"
            continue
        if found != step_of(path):
            yield f"{path.name} holds the state of step {found}"


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    found = newest_first(list_checkpoints(run / CHECKPOINTS))
    return step_of(found[0]) if found else 0


def spoil_hint(run: Path, draw: random.Random) -> bool:
    """Leave ``latest`` as a kill amidst a write in place might (row A05); return whether there is one."""
    hint = run / CHECKPOINTS / LATEST
    if hint.exists():
        hint.write_bytes(draw.choice(JUNK))
    return hint.exists()


def saving_now(run: Path) -> str:
    """Return "being written", "being removed" or "", by what lies among the checkpoints at this moment."""
    names = [path.name for path in (run / CHECKPOINTS).iterdir()] if (run / CHECKPOINTS).is_dir() else []
    if any(name.startswith(".tmp-") for name in names):
        return "being written"
    return "being removed" if any(name.startswith(".deleted-") for name in names) else ""


def left_over(run: Path, kept: int, *, has_saved: bool) -> Iterator[str]:
    """Yield what a run that is done has left beside its results.

    Args:
        has_saved: the last start has saved. One that finds all steps done writes nothing: what a kill behind the last
            commit has left to tidy is left to the next save.
    """
    root = run / CHECKPOINTS
    for path in [*run.iterdir(), *(root.iterdir() if has_saved else ())]:
        if path.name.startswith(".") or path.name == run_lock.NAME:
            yield f"{path.relative_to(run)} is left behind"
    if not has_saved:
        return
    whole = newest_first(list_checkpoints(root))
    if kept and len(whole) > kept + 1:  # the one that the last start has loaded stays too
        yield f"{len(whole)} checkpoints are left, of which --keep-last wants {kept}"
    if (root / LATEST).read_text().strip() != whole[0].name:
        yield f"{LATEST} does not name the newest checkpoint"
