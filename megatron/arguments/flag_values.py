"""The flags of each family, and ``scan``, which parses the words of a command line and collects all problems."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.arguments import translate
from megatron.arguments.foreign_flags import (
    CONVERTED,
    REJECTED,
    ForeignFlag,
    flags_with_rule,
    foreign_flag,
    foreign_flags,
)
from megatron.arguments.scan import Scan
from megatron.config.config import FIRST_FAMILY, SECTIONS, Config
from megatron.config.family import ModelFamily
from megatron.config.option import Option, options_of
from megatron.models.registry import FAMILIES, family_of

# All flags, and a Config from the values of their fields.


def all_sections() -> dict[str, type]:
    """Map section names to dataclasses, in --help order, including the families' sections."""
    family_sections = {family.name: family.config for family in FAMILIES.values() if family.has_section}
    return {"model": SECTIONS["model"], **family_sections, **SECTIONS}


def all_options() -> tuple[tuple[str, Option], ...]:
    """List all flags as (section, option)."""
    return _options(tuple(FAMILIES.values()))


@functools.cache
def _options(families: tuple[ModelFamily, ...]) -> tuple[tuple[str, Option], ...]:
    return tuple((name, item) for name, section in all_sections().items() for item in options_of(section))


def accepts_option(family: str, section: str, option: Option) -> bool:
    """Check if ``family`` accepts the flag ``option`` in ``section``."""
    return FAMILIES[family].accepts_option(option, section, is_family_section=section not in SECTIONS)


def family_options(family: str) -> tuple[Option, ...]:
    """List the flags that ``family`` accepts."""
    return _family_options(family, tuple(FAMILIES.values()))


@functools.cache
def _family_options(family: str, families: tuple[ModelFamily, ...]) -> tuple[Option, ...]:
    return tuple(option for section, option in _options(families) if accepts_option(family, section, option))


def config_from_values(values: Mapping[str, Any], *, family: str = FIRST_FAMILY, **others: Any) -> Config:
    """Build a Config from field -> value. Missing fields have the defaults of the family.

    Args:
        others: further fields of ``Config``.

    Raises:
        TypeError: a name that no section has.
        ValueError: the family does not exist.
    """
    family_config = family_of(family).config
    unknown_names = values.keys() - {option.name for _, option in all_options()}
    if unknown_names:
        raise TypeError(f"each name must be a field of a section, got {', '.join(sorted(unknown_names))}")
    values = {**family_config.DEFAULTS, **values}
    sections = {
        name: section(**{option.name: values[option.name] for option in options_of(section) if option.name in values})
        for name, section in {**SECTIONS, "family_config": family_config}.items()
    }
    return Config(family=family, **sections, **others)


# Parse the words of a command line. All problems are collected; none ends the scan.

MAX_COUNT = 2**62
"""Maximum number of samples or tokens, which are counted in 64 bits."""
MIN_SIMILARITY = 0.8
"""Minimum similarity of two names for a suggestion; high enough to match typing errors only."""


def scan(argv: Sequence[str], extra_flags: Iterable[str] = (), family: str = "gpt2") -> Scan:
    """Parse ``argv``. Flags in ``extra_flags`` and their values are added to ``extra_words``."""
    known = {flag: option for option in family_options(family) for flag in option.flags}
    accepted = FAMILIES[family].config.ALWAYS_ON_FLAGS
    extras = set(extra_flags)
    scanned = Scan(family)
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        with_dashes = flag.replace("_", "-")
        if flag not in extras and flag not in known and with_dashes in known:
            flag = with_dashes
        if flag in extras:
            scanned.extra_words += [word, *_values_after(words)]
        elif flag in known:
            _parse_flag(scanned, known[flag], flag, text if equals else None, words)
        elif flag in accepted:
            scanned.ignored[flag] = accepted[flag]
        elif not flag.startswith("-"):
            scanned.problems.append(
                f"every value must follow a flag that takes one, got {word!r} on its own. Remove it"
            )
        else:
            values = [text, *_values_after(words)] if equals else _values_after(words)
            if reason := rejected_flags(family).get(flag):
                scanned.problems.append(f"{flag} is not supported: {reason}")
            elif row := foreign_flag(flag) or foreign_flag(with_dashes):
                _parse_foreign_flag(scanned, row, values)
            else:
                other_flags = [row.flag for row in foreign_flags().values() if row.rule != REJECTED]
                problem = unknown_message("flag", flag, [*known, *extras, *other_flags], known)
                scanned.add_unknown(problem, " ".join([flag, *values]))
    translate.set_converted_fields(scanned)
    return scanned


def _parse_foreign_flag(scanned: Scan, row: ForeignFlag, values: list[str]) -> None:
    """Store a flag of another trainer that is ignored or converted."""
    inapplicable = _inapplicable_field(scanned.family, row)
    if inapplicable is not None:
        scanned.problems.append(f"{row.flag} is not supported: {FAMILIES[scanned.family].advice(inapplicable)}")
    elif problem := row.count_problem(values) or row.value_problem(values):
        scanned.problems.append(problem)
    elif row.rule != CONVERTED:
        scanned.ignored[" ".join([row.flag, *values]) if row.target else row.flag] = row.note
    elif row.value == "str*":
        scanned.converted[row.flag] = values
    elif not row.value:
        scanned.converted[row.flag] = True
    elif row.value == "bool":
        if values[0] in ("true", "false"):
            scanned.converted[row.flag] = values[0] == "true"
        else:
            scanned.problems.append(f"{row.flag} must be true or false, got {values[0]!r}")
    else:
        value, problem = Option(
            name="", flag=row.flag, value_type=row.value, default=None, help="", shown_default="", minimum=0,
            maximum=MAX_COUNT,
        ).convert(values[0], row.flag)  # fmt: skip
        if problem:
            scanned.problems.append(problem)
        else:
            scanned.converted[row.flag] = value


def _inapplicable_field(family: str, row: ForeignFlag) -> Option | None:
    """Find a field that the flag sets but ``family`` lacks; None if there is none."""
    inapplicable = {
        option.name: option for section, option in all_options() if not accepts_option(family, section, option)
    }
    accepted = {option.name for option in family_options(family)}
    return next((inapplicable[name] for name in row.fields if name in inapplicable and name not in accepted), None)


def rejected_flags(family: str) -> Mapping[str, str]:
    """Map each flag that ``family`` does not support to the reason and the alternative."""
    return _rejected_flags(family, tuple(FAMILIES.values()))


@functools.cache
def _rejected_flags(family: str, families: tuple[ModelFamily, ...]) -> Mapping[str, str]:
    model_family = FAMILIES[family]
    other_options = [option for section, option in all_options() if not accepts_option(family, section, option)]
    advice = {flag: model_family.advice(option) for option in other_options for flag in option.flags}
    advice = {flag: reason for flag, reason in advice.items() if flag not in model_family.config.ALWAYS_ON_FLAGS}
    return {row.flag: row.note for row in flags_with_rule(REJECTED)} | advice | dict(model_family.config.REJECTED_FLAGS)


def unknown_message(
    noun: str, name: str, known: Iterable[str], options: Mapping[str, Option] = MappingProxyType({})
) -> str:
    """Format the message about an unknown name, with a suggestion if an accepted name is similar.

    Args:
        options: flag -> option; if no name is similar, the first flag whose help contains the words of ``name`` is
            suggested.
    """
    names = list(known)
    completions = [other for other in names if other.startswith(name)] if len(name) > 3 else []
    name_without_dashes = {other.lstrip("-"): other for other in names}  # the dashes do not count for the similarity
    close = difflib.get_close_matches(name.lower().lstrip("-"), name_without_dashes, n=1, cutoff=MIN_SIMILARITY)
    words = name.lower().lstrip("-").replace("_", "-").replace("-", " ")
    matching = [flag for flag, option in options.items() if " " in words and words in option.help]
    suggestions = completions[:1] or [name_without_dashes[other] for other in close] or matching[:1]
    return f"unknown {noun} {name}" + (
        f"; did you mean {suggestions[0]}?" if suggestions else "; --help-all lists all flags"
    )


def has_suggestion(name: str, known: Iterable[str]) -> bool:
    """Check if ``unknown_message`` would suggest one of ``known`` for ``name``."""
    return "did you mean" in unknown_message("name", name, known)


def _values_after(words: list[str]) -> list[str]:
    values = []
    while words and not words[0].startswith("--"):
        values.append(words.pop(0))
    return values


def _parse_flag(scanned: Scan, option: Option, flag: str, text: str | None, words: list[str]) -> None:
    takes_value = option.value_type != "bool" and flag not in option.constants
    if not takes_value and text is not None:
        scanned.problems.append(f"{flag} takes no value, got {text!r}. Remove the value, or the flag")
        return
    if takes_value and text is None and words and not words[0].startswith("--"):
        text = words.pop(0) if option.join is None else option.join(_values_after(words))
    elif text and option.join is not None:
        text = option.join([text])
    if text is None and option.alone is not None:
        text = option.alone
    if takes_value and not text:
        scanned.problems.append(f"{flag} needs a value: {option.rule()}; got none. Write {flag} VALUE")
        return
    value, problem = option.convert(text, flag) if text is not None else (option.constants.get(flag, True), None)
    if problem and option.name == "tokenizer_type":
        scanned.unknown_tokenizer_type = str(text)
        return
    if problem:
        scanned.problems.append(problem)
        return
    _store_value(scanned, option, flag, value, f"{flag} {text}" if text is not None else flag)


def _store_value(scanned: Scan, option: Option, flag: str, value: Any, spelling: str) -> None:
    if option.name in scanned.values:
        if option.name == "dtype" and scanned.values["dtype"] != value:
            scanned.problems.append(
                f"only one number format may be set, got {scanned.spelling['dtype']} and {spelling}. Remove one of them"
            )
        if option.repeats:
            value, spelling = f"{scanned.values[option.name]} {value}", f"{scanned.spelling[option.name]} {spelling}"
        elif flag not in scanned.repeated:
            scanned.repeated.append(flag)
    scanned.values[option.name] = value
    scanned.spelling[option.name] = spelling
