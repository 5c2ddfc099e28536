"""What a run writes down of its own tensors, for comparing it with another one, and the search for the first NaN."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option
from megatron.config.step_ranges import steps_of

if TYPE_CHECKING:
    from megatron.config.config import Config

STEPS = "1-3"
DUMP_ONLY = ("debug_dump_steps", "debug_dump_modules", "debug_dump_tensors")
"""Fields that act with --debug-dump only."""
DEBUG_IN_TRAINING = ("debug_dump", "debug_nan")


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The dump of tensors' statistics, and the check for numbers that are not finite."""

    debug_dump: str | None = option(
        None,
        "folder for the statistics of each module's inputs, outputs and their gradients, of weights and of their "
        "gradients, by rank, step and micro-batch; tools/compare_dumps.py compares two such folders",
    )
    debug_dump_steps: str = option(STEPS, "steps that --debug-dump writes, counted from 1, as 1-3,10")
    debug_dump_modules: str = option(
        "", "modules and parameters that --debug-dump writes: a regular expression, searched in their names",
        shown_default="all",
    )  # fmt: skip
    debug_dump_tensors: bool = option(False, "--debug-dump also writes the tensors themselves")
    debug_nan: bool = option(
        False,
        "look for NaN and infinity in each module's inputs, outputs and their gradients, at every step; the first one "
        "ends the run ahead of the update and names the module that made it",
    )

    @property
    def is_on(self) -> bool:
        """True where anything is to be looked at."""
        return self.debug_dump is not None or self.debug_nan

    def steps(self) -> list[range]:
        """Return the steps to dump, as ranges.

        Raises:
            ValueError: the text names none, or not whole numbers from 1 on.
        """
        return [steps_of(word) for word in self.debug_dump_steps.split(",")]

    def wanted(self) -> re.Pattern[str]:
        """Return the pattern of the names to dump.

        Raises:
            re.error: it cannot be read.
        """
        return re.compile(self.debug_dump_modules)

    def problems(self) -> Iterator[str]:
        """Yield what cannot be read."""
        try:
            self.steps()
        except ValueError:
            yield (
                "--debug-dump-steps must be steps from 1 on and ranges of them, joined by commas, as 1-3,10; got "
                f"{self.debug_dump_steps!r}"
            )
        try:
            self.wanted()
        except re.error as error:
            yield f"--debug-dump-modules must be a regular expression, got {self.debug_dump_modules!r} ({error})"


def debug_problems(config: Config) -> Iterator[str]:
    """Yield what cannot act, or cannot work with another flag."""
    debug = config.debug
    named = [_flag(name) for name in DUMP_ONLY if name in config.given]
    if named and debug.debug_dump is None:
        yield f"{', '.join(named)} acts with --debug-dump only. Add --debug-dump FOLDER, or leave it out"
    if debug.debug_nan and config.stability.is_guarded:
        yield (
            f"--debug-nan ends the run at the first NaN, --stability-guard {config.stability.stability_guard} goes on "
            "behind it. Leave one of them out; --debug-dump names the module, too, and lets the guard go on"
        )
    yield from _dumped_beyond_run(config)
    named = [_flag(name) for name in DEBUG_IN_TRAINING if name in config.given]
    if named and config.checkpoint.eval_only:
        yield f"{', '.join(named)} acts in training only, got --eval-only. Leave one out"
    if debug.is_on and config.parallel.compile:
        yield (
            f"{'--debug-dump' if debug.debug_dump else '--debug-nan'} looks into layers, and compiled ones have no "
            "modules within, got --compile. Leave one of them out"
        )


def _dumped_beyond_run(config: Config) -> Iterator[str]:
    """Yield that the run has none of the steps to dump."""
    debug, last = config.debug, config.batch.train_iters
    if debug.debug_dump is None or any(True for _ in debug.problems()):
        return
    first = min(steps.start for steps in debug.steps())
    if first > last:
        yield (
            f"--debug-dump-steps must name a step of the run, got {debug.debug_dump_steps} and --train-iters {last}: "
            "nothing would be written. Name earlier steps, or train for longer"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
