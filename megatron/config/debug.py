"""DebugConfig: tensor dumps and the search for NaN."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option, parse_steps

if TYPE_CHECKING:
    pass


DEFAULT_STEPS = "1-3"
DUMP_ONLY = ("debug_dump_steps", "debug_dump_modules", "debug_dump_tensors")
"""Fields that take effect with --debug-dump only."""
DEBUG_IN_TRAINING = ("debug_dump", "debug_nan")


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Dump of tensor statistics, and the check for values that are not finite."""

    debug_dump: str | None = option(
        None,
        "folder for statistics of the inputs, outputs and gradients of each module, and of weights and their "
        "gradients, by rank, step and micro-batch; tools/compare_dumps.py compares two such folders",
    )
    debug_dump_steps: str = option(DEFAULT_STEPS, "steps of --debug-dump, counted from 1, such as 1-3,10")
    debug_dump_modules: str = option(
        "", "modules and parameters of --debug-dump: a regular expression that is searched in their names",
        shown_default="all",
    )  # fmt: skip
    debug_dump_tensors: bool = option(False, "with --debug-dump: also write the tensors")
    debug_nan: bool = option(
        False,
        "check the inputs, outputs and gradients of each module for NaN and infinity in every step; the first one "
        "ends the run before the update and names the module that produced it",
    )

    @property
    def is_enabled(self) -> bool:
        """True if a dump or a check is enabled."""
        return self.debug_dump is not None or self.debug_nan

    def steps(self) -> list[range]:
        """Parse the steps to dump, as ranges.

        Raises:
            ValueError: a range is empty, or a number is not an integer of at least 1.
        """
        return [parse_steps(word) for word in self.debug_dump_steps.split(",")]

    def name_pattern(self) -> re.Pattern[str]:
        """Compile the pattern of names to dump.

        Raises:
            re.error: it is not a valid regular expression.
        """
        return re.compile(self.debug_dump_modules)

    def problems(self) -> Iterator[str]:
        """Yield an error message for invalid steps, and one for an invalid pattern."""
        try:
            self.steps()
        except ValueError:
            yield (
                "--debug-dump-steps must be steps or ranges of steps, counted from 1 and separated by commas, such as "
                f"1-3,10; got {self.debug_dump_steps!r}"
            )
        try:
            self.name_pattern()
        except re.error as error:
            yield f"--debug-dump-modules must be a regular expression, got {self.debug_dump_modules!r} ({error})"
