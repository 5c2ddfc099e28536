"""Checkpoint folders that --load and --resume may name, in both formats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megatron import hub
from megatron.checkpoint.folders import CHECKPOINTS, checkpoints_in
from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.metadata import MANIFEST_NAME
from megatron.config import CheckpointConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.training import deepspeed_folders

RUNS = Path("runs")
NATIVE = "native"
LOADED = "loaded"
"""Folder in a run folder of what was downloaded from the store of another run."""


def newest_run(name: str, family: str = "") -> Path:
    """Return the run folder ``runs/<name>-*`` with the newest checkpoint.

    Args:
        family: family of the model, for the message.

    Raises:
        CheckpointError: none of them has a checkpoint.
    """
    newest = _newest_of(RUNS.glob(f"{name}-*"))
    if newest is None:
        other = _newest_of(run for run in RUNS.glob("*") if _family_of(run) == family)
        named = f"To resume {other}, add --save {other}" if other else "Name another folder with --save"
        raise CheckpointError(
            f"--resume needs a run with a checkpoint in {RUNS.resolve()}/{name}-*, found none. "
            f"{named}, or start without --resume."
        )
    return newest


def _family_of(run: Path) -> str | None:
    """Return the family of the model in the config.json of a run folder, None if there is none."""
    try:
        return str(json.loads((run / "config.json").read_text(encoding="utf-8"))["family"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _newest_of(runs: Iterable[Path]) -> Path | None:
    """Return the run folder with the newest checkpoint, None if none of them has a checkpoint."""
    saved = {run: newest for run in runs if (newest := _newest_save(run))}
    return max(saved, key=lambda run: saved[run], default=None)


def saves_in(folder: Path, flags: CheckpointConfig) -> Path:
    """Return where in a run folder its checkpoints lie: DeepSpeed's in the folder itself."""
    return folder if flags.is_deepspeed else folder / CHECKPOINTS


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, of either format, whole or not."""
    return [path for found in _formats_in(folder).values() for path in found]


def is_deepspeed_folder(source: Path) -> bool:
    """Tell whether ``source`` is, or holds, checkpoints in DeepSpeed's layout, and none in ours."""
    return not any(checkpoints_in(source).glob("step-*")) and bool(deepspeed_folders.tags_in(source))


def format_of(folder: Path, flags: CheckpointConfig) -> str:
    """Return the format in which a run saves into ``folder``: as the flags say, else as the folder's checkpoints are.

    Raises:
        ConfigError: the folder holds checkpoints of the other one; nobody could say which is newer.
    """
    held = [name for name, found in _formats_in(folder).items() if found]
    chosen = flags.checkpoint_format or (held[0] if held else NATIVE)
    if held not in ([], [chosen]) and not flags.eval_only:
        raise ConfigError(
            f"a run folder holds checkpoints of one format, got {' and '.join(held)} ones in {folder} and "
            f"--checkpoint-format {chosen}. Give --save another folder (--load may name this one), or the same format"
        )
    return chosen


def _formats_in(folder: Path) -> dict[str, list[Path]]:
    """Return the checkpoints in a run folder by their format."""
    native = [*(folder / CHECKPOINTS).glob("step-*")]
    return {NATIVE: native, deepspeed_folders.FORMAT: deepspeed_folders.tags_in(folder)}


def require_checkpoint(source: Path) -> None:
    """Check that ``source``, a run folder, a folder of checkpoints or a checkpoint, holds one, whole or not.

    A Hugging Face folder will do as well.

    Raises:
        CheckpointError: it is not there, or holds none.
    """
    if is_deepspeed_folder(source) or weights.is_folder(source):
        return
    place = checkpoints_in(source)
    if not place.is_dir():
        found_instead = "a file" if place.exists() else "not there"
        raise CheckpointError(
            hub.load_problem(source) or f"--load must name a folder of checkpoints; {place} is {found_instead}"
        )
    if not (place / MANIFEST_NAME).exists() and not any(place.glob("step-*")):
        message = f"no checkpoint found in {place}: a checkpoint is a folder like step-00000020"
        if deepspeed_folders.foreign_tags_in(source):
            message += (
                ". What DeepSpeed wrote without --checkpoint-format deepspeed does not say where a run stood; "
                "tools/import_checkpoint.py takes the weights"
            )
        raise CheckpointError(message)


def is_run_folder(source: Path) -> bool:
    """Return whether ``source`` is a run's folder, not its folder of checkpoints or one of these."""
    if (source / CHECKPOINTS).is_dir():
        return True
    return is_deepspeed_folder(source) and deepspeed_folders.tags_in(source) != [source]


def _newest_save(run: Path) -> float | None:
    """Return when the newest checkpoint of a run folder was written, None if it has none."""
    return max((path.stat().st_mtime for path in saved_in(run)), default=None)
