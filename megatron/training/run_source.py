"""What --load and --resume may name, and where a run folder's checkpoints lie, in both formats."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint import manifest
from megatron.checkpoint.folders import CHECKPOINTS, checkpoints_in
from megatron.checkpoint.hf import direct
from megatron.config import CheckpointConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.training import deepspeed_format_folder

RUNS = Path("runs")
NATIVE = "native"


def newest_run(name: str) -> Path:
    """Return the run folder of this kind of model with the newest checkpoint.

    Raises:
        CheckpointError: no run here has one.
    """
    runs = {run: newest for run in RUNS.glob(f"{name}-*") if (newest := _newest_save(run))}
    if not runs:
        raise CheckpointError(
            f"--resume needs a run with a checkpoint in {RUNS.resolve()}/{name}-*, found none. "
            "Start without --resume, or name a folder with --load."
        )
    return max(runs, key=lambda run: runs[run])


def saves_in(folder: Path, flags: CheckpointConfig) -> Path:
    """Return where in a run folder its checkpoints lie: DeepSpeed's in the folder itself."""
    return folder if flags.is_deepspeed else folder / CHECKPOINTS


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, of either format, whole or not."""
    return [path for found in _formats_in(folder).values() for path in found]


def is_deepspeed_folder(source: Path) -> bool:
    """Tell whether ``source`` is, or holds, checkpoints in DeepSpeed's layout, and none in ours."""
    return not any(checkpoints_in(source).glob("step-*")) and bool(deepspeed_format_folder.tags_in(source))


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
    return {NATIVE: native, deepspeed_format_folder.FORMAT: deepspeed_format_folder.tags_in(folder)}


def require_checkpoint(source: Path) -> None:
    """Check that ``source``, a run folder, a folder of checkpoints or a checkpoint, holds one, whole or not.

    A Hugging Face folder will do as well.

    Raises:
        CheckpointError: it is not there, or holds none.
    """
    if is_deepspeed_folder(source) or direct.is_folder(source):
        return
    place = checkpoints_in(source)
    if not place.is_dir():
        found_instead = "a file" if place.exists() else "not there"
        raise CheckpointError(f"--load must name a folder of checkpoints; {place} is {found_instead}")
    if not (place / manifest.NAME).exists() and not any(place.glob("step-*")):
        told = f"no checkpoint found in {place}: a checkpoint is a folder like step-00000020"
        if deepspeed_format_folder.foreign_tags_in(source):
            told += (
                ". What DeepSpeed wrote without --checkpoint-format deepspeed does not say where a run stood; "
                "tools/import_checkpoint.py takes the weights"
            )
        raise CheckpointError(told)


def is_run_folder(source: Path) -> bool:
    """Return whether ``source`` is a run's folder, not its folder of checkpoints or one of these."""
    if (source / CHECKPOINTS).is_dir():
        return True
    return is_deepspeed_folder(source) and deepspeed_format_folder.tags_in(source) != [source]


def _newest_save(run: Path) -> float | None:
    """Return when the newest checkpoint of a run folder was written, None if it has none."""
    return max((path.stat().st_mtime for path in saved_in(run)), default=None)
