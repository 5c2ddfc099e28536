"""Add hints to problems: the alias that the user typed for a flag, or the variable of the run script that sets it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.arguments.flag_values import family_options
from megatron.arguments.scan import Scan

FLAG_VARIABLES = "MEGATRON_VARIABLES"
"""Environment variable with a list of ``--flag=NAME``: the variable NAME of the run script sets the flag."""


def with_typed_flags(problems: list[str], scanned: Scan) -> list[str]:
    """Append to each problem the aliases that the user typed for the flags in its message."""
    if not problems:
        return problems
    names = {option.name: option.flag for option in family_options(scanned.family) if option.flag}
    typed = {names[field]: text for field, text in scanned.spelling.items() if field in names and text.startswith("--")}
    lines = []
    for problem in problems:
        renamed = [
            f"{flag} was given as {text}"
            for flag, text in typed.items()
            if text.split(" ")[0] != flag and _mentions(problem, flag) and not _mentions(problem, text.split(" ")[0])
        ]
        lines.append(f"{problem} ({', '.join(renamed)})" if renamed else problem)
    return lines


def _mentions(text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


def with_variables(problems: list[str], env: Mapping[str, str]) -> list[str]:
    """Append to each problem the variables of the run script that set the flags in its message."""
    pairs = [pair.split("=", 1) for pair in env.get(FLAG_VARIABLES, "").split() if "=" in pair]
    lines = []
    for problem in problems:
        known = [f"{flag} is {name}" for flag, name in pairs if re.search(rf"{re.escape(flag)}(?![\w-])", problem)]
        lines.append(f"{problem} (in the run script: {', '.join(known)})" if known else problem)
    return lines
