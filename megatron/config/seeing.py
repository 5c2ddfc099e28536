"""What a run shows beside its log line: norms by layer, Weights & Biases, and the profile of some steps."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option
from megatron.config.step_ranges import steps_of

if TYPE_CHECKING:
    from megatron.config.config import Config

WANDB_ONLY = ("wandb_exp_name", "wandb_save_dir", "wandb_entity")
"""Fields that act with --wandb-project only."""
LOGGING_IN_TRAINING = ("log_layer_norms", "profile")


@dataclass(frozen=True, kw_only=True)
class SeeingConfig:
    """Metrics on request, and the profiler."""

    log_layer_norms: bool = option(
        False, "record the norm of the gradients of each layer, too, at the steps of --log-interval"
    )
    wandb_project: str | None = option(
        None, "send the metrics to this project of Weights & Biases; WANDB_MODE=offline writes them to a folder"
    )
    wandb_exp_name: str | None = option(
        None, "name of the run there", aliases=("--wandb-name",), shown_default="the run folder's"
    )
    wandb_save_dir: str | None = option(None, "folder of wandb's own files", shown_default="in the run folder")
    wandb_entity: str | None = option(None, "team or user that the project is of", shown_default="wandb's own")
    profile: str | None = option(
        None,
        "record these steps, counted from 1, as 5-7 or 5, with torch's profiler: a trace of each rank for Perfetto and "
        "a table of the operators that take longest, in RUN/profile",
    )

    def profiled(self) -> range:
        """Return the steps to profile.

        Raises:
            ValueError: the text names none, or not whole numbers from 1 on.
        """
        return steps_of(self.profile) if self.profile is not None else range(0)

    def problems(self) -> Iterator[str]:
        """Yield what cannot be read."""
        try:
            self.profiled()
        except ValueError:
            yield f"--profile must be a step from 1 on or a range of steps, as 5-7; got {self.profile!r}"


def logging_problems(config: Config) -> Iterator[str]:
    """Yield what cannot act, or cannot work here."""
    seeing = config.seeing
    named = [_flag(name) for name in WANDB_ONLY if name in config.given]
    if named and not seeing.wandb_project:
        yield f"{', '.join(named)} acts with --wandb-project only. Add --wandb-project NAME, or leave it out"
    if seeing.wandb_project and os.environ.get("RANK", "0") == "0" and not _has_wandb():  # which alone imports it
        yield (
            "--wandb-project needs the package wandb, which is not installed here. Run pip install "
            "-e '.[wandb]' or pip install wandb, or leave the flag out: metrics.jsonl and TensorBoard's files "
            "are written anyway"
        )
    named = [_flag(name) for name in LOGGING_IN_TRAINING if name in config.given]
    if named and config.checkpoint.eval_only:
        yield f"{', '.join(named)} acts in training only, got --eval-only. Leave one out"
    yield from _profiled_beyond_run(config)


def _profiled_beyond_run(config: Config) -> Iterator[str]:
    """Yield that the run has not all of the steps to profile."""
    seeing, last = config.seeing, config.batch.train_iters
    if seeing.profile is None or any(True for _ in seeing.problems()):
        return
    if seeing.profiled()[-1] > last:
        yield (
            f"--profile must name steps of the run, got {seeing.profile} and --train-iters {last}. Name earlier steps, "
            "or train for longer"
        )


def _has_wandb() -> bool:
    return "wandb" in sys.modules or importlib.util.find_spec("wandb") is not None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
