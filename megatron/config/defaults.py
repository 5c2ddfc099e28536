"""Defaults from outside: a script's own ``pretrain(args_defaults=...)`` and MEGATRON_DEFAULTS of a run script.

Both are soft: they hold where neither the command line nor the JSON says otherwise, and MEGATRON_DEFAULTS is the
stronger of the two. A soft value that contradicts what the user gave steps back instead of becoming an error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.arguments.values import all_options, options_in
from megatron.config.data import EACH
from megatron.config.scan import Scan, scan, unknown
from megatron.models.registry import FAMILIES

VARIABLE = "MEGATRON_DEFAULTS"
"""Flags, as a shell reads them."""
FLAG_VARIABLES = "MEGATRON_VARIABLES"
"""``--flag=NAME`` for each flag that the run script sets by a variable of its own, so that messages can name both."""


def soft_values(
    defaults: Mapping[str, Any], env: Mapping[str, str], found: Scan, extra_flags: Iterable[str]
) -> dict[str, Any]:
    """Return field -> value of both sources; what is wrong with them goes to ``found.problems``."""
    return _of_script(defaults, found) | _of_environment(env, found, extra_flags)


def _of_script(defaults: Mapping[str, Any], found: Scan) -> dict[str, Any]:
    family, options = FAMILIES[found.family], {option.name: option for _, option in all_options()}
    taken = {option.name for option in options_in(found.family)}
    checked = {}
    for name, value in defaults.items():
        if name not in options:
            found.problems.append(unknown("name in the defaults of pretrain():", name, options))
        elif name not in taken:
            found.problems.append(f"{name} in the defaults of pretrain() is refused: {family.advice(options[name])}")
        elif problem := options[name].problem(value, f"the default of {name}"):
            found.problems.append(problem)
        else:
            checked[name] = value
    return checked


def _of_environment(env: Mapping[str, str], found: Scan, extra_flags: Iterable[str]) -> dict[str, Any]:
    text = env.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        found.problems.append(f"{VARIABLE} must be flags as a shell reads them, got {text!r}: {error}")
        return {}
    soft = scan(words, extra_flags, found.family)
    found.problems += [f"{VARIABLE}: {problem}" for problem in soft.problems]
    found.notes += soft.notes
    found.rest[:0] = soft.rest
    return soft.values


def step_back(soft: dict[str, Any], firm: Mapping[str, Any], excluded: Iterable[str], notes: list[str]) -> None:
    """Take out of ``soft`` what contradicts ``firm``: values of the command line and the JSON."""
    if soft.get("dtype") in tuple(excluded):
        del soft["dtype"]
    if "vocab_file" in firm or "merge_file" in firm:
        soft.pop("tokenizer_path", None)
    if any(name in firm for name in EACH):
        soft.pop("data_path", None)
        soft.pop("split", None)
    elif "data_path" in firm:
        for name in EACH:
            soft.pop(name, None)
    if "lr" in firm and soft.get("min_lr", 0.0) > firm["lr"]:
        notes.append(f"the default --min-lr {soft.pop('min_lr'):g} is above --lr {firm['lr']:g}, so --min-lr is 0")


def with_variables(problems: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the messages; one that names a flag with a variable in the run script names that, too."""
    pairs = [pair.split("=", 1) for pair in env.get(FLAG_VARIABLES, "").split() if "=" in pair]
    told = []
    for problem in problems:
        known = [f"{flag} is {name}" for flag, name in pairs if re.search(rf"{re.escape(flag)}(?![\w-])", problem)]
        told.append(f"{problem} (in the run script: {', '.join(known)})" if known else problem)
    return told
