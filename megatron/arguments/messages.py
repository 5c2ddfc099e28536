"""Add the names that the user knows to problems: aliases as typed, and variables of the run script."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.arguments.flag_values import options_in
from megatron.arguments.scan import Scan

FLAG_VARIABLES = "MEGATRON_VARIABLES"
"""Environment variable with ``--flag=NAME`` for each flag that a variable of the run script sets, for messages."""


def with_typed_flags(problems: list[str], found: Scan) -> list[str]:
    """Return the problems; for each flag that a problem names, the alias typed by the user is added."""
    if not problems:
        return problems
    names = {option.name: option.flag for option in options_in(found.family) if option.flag}
    typed = {names[field]: text for field, text in found.spelling.items() if field in names and text.startswith("--")}
    lines = []
    for problem in problems:
        renamed = [
            f"{flag} was given as {text}"
            for flag, text in typed.items()
            if text.split(" ")[0] != flag and _names(problem, flag) and not _names(problem, text.split(" ")[0])
        ]
        lines.append(f"{problem} ({', '.join(renamed)})" if renamed else problem)
    return lines


def _names(text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


def with_variables(problems: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the problems; for each flag that a problem names, the variable of the run script that sets it is added."""
    pairs = [pair.split("=", 1) for pair in env.get(FLAG_VARIABLES, "").split() if "=" in pair]
    lines = []
    for problem in problems:
        known = [f"{flag} is {name}" for flag, name in pairs if re.search(rf"{re.escape(flag)}(?![\w-])", problem)]
        lines.append(f"{problem} (in the run script: {', '.join(known)})" if known else problem)
    return lines
