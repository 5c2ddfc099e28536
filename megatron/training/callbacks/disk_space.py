"""DiskSpaceWarning: warns at the start if the disk of the run folder has no room for the checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron import files, log
from megatron.config import Config
from megatron.log import human_bytes
from megatron.training.trainer import Callback

_format_bytes = partial(human_bytes, units=("B", "kB", "MB", "GB"), digits=1)


class DiskSpaceWarning(Callback):
    """Warns on rank 0 if there is no room for the first checkpoint, or for a second one next to it.

    A save on a full disk fails, which is known only hours later. An old checkpoint is deleted after the next one is
    complete, so a run that saves repeatedly needs room for two.

    Args:
        param_counts: parameter count in the full model, then per rank of each stage.
    """

    on_all_ranks = False

    def __init__(self, param_counts: Sequence[int]) -> None:
        self.param_counts = param_counts

    def on_train_start(self) -> None:
        trainer, flags = self.trainer, self.trainer.config.checkpoint
        saves_again = bool(flags.save_interval or flags.minutes) and trainer.resumed_step is None
        problem = disk_space_problem(trainer.config, self.param_counts[0], trainer.folder, 2 if saves_again else 1)
        if problem:
            log.warning(problem)


def checkpoint_bytes(config: Config, num_parameters: int) -> int:
    """Estimate the size of a checkpoint in bytes: main params, and AdamW's moments as the flags store them.

    The estimate is too small for other optimizers, whose states are not counted, and for experts' and random states.
    """
    value_bytes = 8 if config.precision.dtype == "fp64" else 4
    optimizer = config.optimizer
    state_bytes = 0
    if optimizer.optimizer == "adamw" and not config.checkpoint.no_save_optim:
        dtypes = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
        state_bytes = sum(2 if dtype == "bf16" else value_bytes for dtype in dtypes)
    return num_parameters * (value_bytes + state_bytes)


def disk_space_problem(config: Config, num_parameters: int, folder: Path, num_checkpoints: int) -> str | None:
    """Describe the lack of space for ``num_checkpoints`` on the disk of ``folder``; None if there is enough."""
    needed_bytes, free_bytes = num_checkpoints * checkpoint_bytes(config, num_parameters), files.free_bytes(folder)
    if needed_bytes <= free_bytes:
        return None
    subject = "a checkpoint needs" if num_checkpoints == 1 else f"{num_checkpoints} checkpoints need"
    return (
        f"{subject} about {_format_bytes(needed_bytes)}, but only {_format_bytes(free_bytes)} are free on the disk "
        f"of {folder}. Free some space, or set --save to another disk"
    )
