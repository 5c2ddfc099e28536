"""All flags there are, and a Config from the values of their fields."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megatron.config.config import FIRST_FAMILY, SECTIONS, Config
from megatron.config.family import ModelFamily
from megatron.config.option import Option, options_of
from megatron.models.registry import FAMILIES, family_of


def all_sections() -> dict[str, type]:
    """Return name -> dataclass of every section: the groups of --help, in this order, those of the families in it."""
    own = {family.name: family.config for family in FAMILIES.values() if family.has_section}
    return {"model": SECTIONS["model"], **own, **SECTIONS}


def all_options() -> tuple[tuple[str, Option], ...]:
    """Return (section, option) for every flag of ours."""
    return _options(tuple(FAMILIES.values()))


@functools.cache
def _options(families: tuple[ModelFamily, ...]) -> tuple[tuple[str, Option], ...]:
    return tuple((name, item) for name, section in all_sections().items() for item in options_of(section))


def takes(family: str, section: str, option: Option) -> bool:
    """Return whether a run of ``family`` takes a flag of ``section``."""
    return FAMILIES[family].takes(option, section, is_own=section not in SECTIONS)


def options_in(family: str) -> list[Option]:
    """Return the flags that a run of ``family`` takes."""
    return [option for section, option in all_options() if takes(family, section, option)]


def config_from_values(values: Mapping[str, Any], *, family: str = FIRST_FAMILY, **others: Any) -> Config:
    """Return a Config from flat field names to values; what is missing takes its default in the family.

    Args:
        others: further fields of ``Config``.

    Raises:
        TypeError: a name that no section has.
        ValueError: there is no such family.
    """
    own = family_of(family).config
    unknown = values.keys() - {option.name for _, option in all_options()}
    if unknown:
        raise TypeError(f"each name must be a field of a section, got {', '.join(sorted(unknown))}")
    values = {**own.DEFAULTS, **values}
    sections = {
        name: section(**{option.name: values[option.name] for option in options_of(section) if option.name in values})
        for name, section in {**SECTIONS, "own": own}.items()
    }
    return Config(family=family, **sections, **others)
