"""From the words of the command line to values: all mistakes are collected, none ends the scan."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron.arguments.values import all_options, options_in, takes
from megatron.config.flags_table import ALREADY_SO, REFUSED
from megatron.config.option import Option
from megatron.models.registry import FAMILIES

ALIKE = 0.8
"""Share of two names that must be alike for one to be guessed: slips of the hand, no other names of the kind."""


@dataclass
class Scan:
    """What was found on the command line of a script that trains ``family``."""

    family: str = "gpt2"
    values: dict[str, Any] = field(default_factory=dict)  # field -> value
    spelling: dict[str, str] = field(default_factory=dict)  # field -> "--flag value" as typed
    repeated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)  # words for extra_args_provider


def scan(argv: Sequence[str], extra_flags: Iterable[str] = (), family: str = "gpt2") -> Scan:
    """Read ``argv``; flags in ``extra_flags`` and the words behind them are left to ``rest``."""
    known = {flag: option for option in options_in(family) for flag in option.flags}
    refused = refusals(family)
    extras = set(extra_flags)
    found = Scan(family)
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if flag in extras:
            found.rest += [word, *_values_after(words)]
        elif flag in known:
            _take(found, known[flag], flag, text if equals else None, words)
        elif flag in ALREADY_SO:
            found.notes.append(f"{flag}: already so: {ALREADY_SO[flag]}")
        elif flag in refused:
            _values_after(words)
            found.problems.append(f"{flag} is refused: {refused[flag]}")
        elif flag.startswith("-"):
            _values_after(words)
            found.problems.append(unknown("flag", flag, [*known, *extras, *ALREADY_SO], known))
        else:
            found.problems.append(f"every value must follow a flag that takes one, got {word!r} on its own. Remove it")
    return found


def refusals(family: str) -> dict[str, str]:
    """Return flag -> why a script that trains ``family`` refuses it, and what to use instead."""
    this = FAMILIES[family]
    foreign = [option for section, option in all_options() if not takes(family, section, option)]
    advice = {flag: this.advice(option) for option in foreign for flag in option.flags}
    return REFUSED | advice | dict(this.config.REFUSED)


def unknown(kind: str, name: str, known: Iterable[str], options: Mapping[str, Option] = MappingProxyType({})) -> str:
    """Return the message for a name that nobody knows, with the nearest one that is accepted.

    Args:
        options: by flag; where no name is near, the first whose help has the words of ``name``.
    """
    names = list(known)
    longer = [other for other in names if other.startswith(name)] if len(name) > 3 else []
    bare = {other.lstrip("-"): other for other in names}  # the dashes are no likeness
    close = difflib.get_close_matches(name.lower().lstrip("-"), bare, n=1, cutoff=ALIKE)
    words = name.lower().lstrip("-").replace("_", "-").replace("-", " ")
    told = [flag for flag, option in options.items() if " " in words and words in option.help]
    near = longer[:1] or [bare[other] for other in close] or told[:1]
    return f"unknown {kind} {name}" + (f"; did you mean {near[0]}?" if near else "; --help lists all flags")


def _values_after(words: list[str]) -> list[str]:
    values = []
    while words and not words[0].startswith("--"):
        values.append(words.pop(0))
    return values


def _take(found: Scan, option: Option, flag: str, text: str | None, words: list[str]) -> None:
    takes_value = option.kind != "bool" and flag not in option.constants
    if not takes_value and text is not None:
        found.problems.append(f"{flag} takes no value, got {text!r}. Write {flag} alone, or leave it out")
        return
    if takes_value and text is None and words and not words[0].startswith("--"):
        text = words.pop(0) if option.join is None else option.join(_values_after(words))
    elif text and option.join is not None:
        text = option.join([text])
    if text is None and option.alone is not None:
        text = option.alone
    if takes_value and not text:
        found.problems.append(f"{flag} needs a value: {option.rule()}; got none. Write {flag} VALUE")
        return
    value, problem = option.convert(text, flag) if text is not None else (option.constants.get(flag, True), None)
    if problem:
        found.problems.append(problem)
        return
    _store(found, option, flag, value, f"{flag} {text}" if text is not None else flag)


def _store(found: Scan, option: Option, flag: str, value: Any, spelling: str) -> None:
    if option.name in found.values:
        if option.name == "dtype" and found.values["dtype"] != value:
            found.problems.append(
                f"give one number format, got {found.spelling['dtype']} and {spelling}. Leave one out"
            )
        if flag not in found.repeated:
            found.repeated.append(flag)
    found.values[option.name] = value
    found.spelling[option.name] = spelling
