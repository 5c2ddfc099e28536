"""Checkpoint folders that --load and --resume accept, in both formats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megatron import hub
from megatron.checkpoint.folders import CHECKPOINTS, checkpoints_folder
from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.metadata import MANIFEST_NAME
from megatron.checkpoint.torch_dist.folder import find_iteration
from megatron.config import CheckpointConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.training import deepspeed_folders

RUNS = Path("runs")
NATIVE = "native"
DOWNLOADS = "loaded"
"""Folder within a run folder for checkpoints downloaded from the store of another run."""


def newest_run(name: str, family: str = "") -> Path:
    """Find the run folder ``runs/<name>-*`` with the newest checkpoint.

    Args:
        family: model family, for the error message.

    Raises:
        CheckpointError: no such run has a checkpoint.
    """
    newest = _run_with_newest_checkpoint(RUNS.glob(f"{name}-*"))
    if newest is None:
        other = _run_with_newest_checkpoint(run for run in RUNS.glob("*") if _family_of(run) == family)
        advice = f"To resume {other}, add --save {other}" if other else "Name another folder with --save"
        raise CheckpointError(
            f"--resume needs a run with a checkpoint in {RUNS.resolve()}/{name}-*, found none. "
            f"{advice}, or start without --resume."
        )
    return newest


def _family_of(run: Path) -> str | None:
    """Read the model family from a run folder's config.json, or None if there is none."""
    try:
        return str(json.loads((run / "config.json").read_text(encoding="utf-8"))["family"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run_with_newest_checkpoint(runs: Iterable[Path]) -> Path | None:
    save_times = {run: newest for run in runs if (newest := _newest_save_time(run))}
    return max(save_times, key=lambda run: save_times[run], default=None)


def checkpoint_folder(folder: Path, flags: CheckpointConfig) -> Path:
    """Return a run's checkpoint folder; DeepSpeed checkpoints are stored in the run folder itself."""
    return folder if flags.is_deepspeed else folder / CHECKPOINTS


def saved_checkpoints(folder: Path) -> list[Path]:
    """List checkpoints in a run folder, in both formats, including incomplete ones."""
    return [path for paths in _checkpoints_by_format(folder).values() for path in paths]


def is_deepspeed_folder(source: Path) -> bool:
    """Return True if ``source`` is or contains DeepSpeed checkpoints, and contains no native ones."""
    return not any(checkpoints_folder(source).glob("step-*")) and bool(deepspeed_folders.tags_in(source))


def choose_format(folder: Path, flags: CheckpointConfig) -> str:
    """Choose the format for saves into ``folder``: from the flags, or else from its existing checkpoints.

    Raises:
        ConfigError: the folder contains checkpoints in the other format, so that the newest one would be ambiguous.
    """
    existing_formats = [name for name, paths in _checkpoints_by_format(folder).items() if paths]
    checkpoint_format = flags.checkpoint_format or (existing_formats[0] if existing_formats else NATIVE)
    if existing_formats not in ([], [checkpoint_format]) and not flags.eval_only:
        raise ConfigError(
            f"a run folder may contain checkpoints of one format only, got {' and '.join(existing_formats)} ones in "
            f"{folder} and --checkpoint-format {checkpoint_format}. Set --save to another folder (--load may name this "
            "one), or use the same format"
        )
    return checkpoint_format


def _checkpoints_by_format(folder: Path) -> dict[str, list[Path]]:
    native = [*(folder / CHECKPOINTS).glob("step-*")]
    return {NATIVE: native, deepspeed_folders.FORMAT: deepspeed_folders.tags_in(folder)}


def require_checkpoint(source: Path) -> None:
    """Check that ``source`` contains a checkpoint, which may be incomplete.

    Args:
        source: a run folder, a checkpoint folder, a checkpoint, a Hugging Face folder, or a Megatron-LM folder.

    Raises:
        CheckpointError: the folder does not exist or contains no checkpoint.
    """
    if is_deepspeed_folder(source) or weights.is_huggingface_folder(source) or find_iteration(source) is not None:
        return
    folder = checkpoints_folder(source)
    if not folder.is_dir():
        found_instead = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            hub.load_problem(source) or f"--load must name a folder of checkpoints; {folder} {found_instead}"
        )
    if not (folder / MANIFEST_NAME).exists() and not any(folder.glob("step-*")):
        message = f"no checkpoint found in {folder}: a checkpoint is a folder like step-00000020"
        if deepspeed_folders.foreign_tags_in(source):
            message += (
                ". A checkpoint that DeepSpeed wrote without --checkpoint-format deepspeed does not contain the "
                "position of the run; tools/import_checkpoint.py imports its weights"
            )
        raise CheckpointError(message)


def is_run_folder(source: Path) -> bool:
    """Return True if ``source`` is a run folder, not its checkpoint folder or a single checkpoint."""
    if (source / CHECKPOINTS).is_dir():
        return True
    return is_deepspeed_folder(source) and deepspeed_folders.tags_in(source) != [source]


def _newest_save_time(run: Path) -> float | None:
    """Return the newest checkpoint's modification time, or None if the run folder has none."""
    return max((path.stat().st_mtime for path in saved_checkpoints(run)), default=None)
