"""``Option``, which describes a dataclass field's flag; parsing of step ranges."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Each field of a configuration dataclass defines one flag, together with its help and its range.

LARGEST_INT = 2**31 - 1

VALUE_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True, kw_only=True)
class Option:
    """Name, type and allowed values of a flag; built from a dataclass field by ``options_of``."""

    name: str  # name of the field, and attribute of get_args()
    flag: str  # spelling on the command line
    value_type: str  # type of the value: int, float, str or bool
    default: Any
    help: str
    shown_default: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # flag without a value -> the value it sets
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    family_kind: str = ""  # KIND of the families that accept it, "" for any KIND; the ADVICE of a family may reject it
    elsewhere: str = ""  # advice if the family rejects it; the family's ADVICE takes precedence
    alone: str | None = None  # value if no value follows the flag
    read: Callable[[str], Any] | None = None  # converts text to the value, if the type itself cannot
    join: Callable[[Sequence[str]], str] | None = None  # joins all words up to the next flag into one text
    repeats: bool = False  # with ``join``: a repeated flag adds its words to those before, instead of replacing them
    is_list: bool = False  # takes several values, too, which are stored as a text of words
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other trainers' words -> the choice
    short: str = ""  # line in --help; flags without it are listed in --help-all only

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings that set this field, the flag itself first (if the field has a flag)."""
        return ((self.flag,) if self.flag else ()) + self.aliases + tuple(self.constants)

    @property
    def shown_type(self) -> str:
        """Describe a value in tables: its choices, or its type followed by dots if it may be several words."""
        return ", ".join(self.choices) or (f"{self.value_type} ..." if self.join else self.value_type)

    def values_of(self, value: Any) -> list[Any]:
        """List the values in ``value``, which is one value, or a text of several ones if ``is_list``.

        Raises:
            ValueError: a word is not a number.
        """
        if not (self.is_list and isinstance(value, str)):
            return [value]
        words = [self.synonyms.get(word, word) for word in value.split()] or [""]
        return [float(word) for word in words] if self.value_type == "float" else words

    def rule(self) -> str:
        """Describe the valid values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = [
            f"at least {self.minimum:g}" if self.minimum is not None else "",
            f"more than {self.above:g}" if self.above is not None else "",
            f"at most {self.maximum:g}" if self.maximum is not None else "",
            f"less than {self.below:g}" if self.below is not None else "",
        ]
        if (self.value_type, self.minimum, self.maximum) == ("int", 1, None):
            return "a positive integer"
        noun = {"int": "an integer", "float": "a finite number", "str": "a string", "bool": "true or false"}[
            self.value_type
        ]
        limits = " and ".join(bound for bound in bounds if bound)
        return f"{noun} of {limits}" if limits else noun

    def problem(self, value: Any, label: str = "") -> str | None:
        """Explain why ``value`` is invalid for this field; None if it is valid. ``label`` names its source."""
        if value is None and self.default is None:
            return None
        if self.is_list and isinstance(value, str):
            try:
                problems = [self._problem_of_one(word, label) for word in self.values_of(value)]
            except ValueError:
                return f"{label or self.flag} must be {self.rule()}, got {value!r}"
            return next(filter(None, problems), None)
        return self._problem_of_one(value, label)

    def _problem_of_one(self, value: Any, label: str) -> str | None:
        types = VALUE_TYPES[self.value_type]
        is_wrong_type = not isinstance(value, types) or (isinstance(value, bool) and self.value_type != "bool")
        if is_wrong_type or not self._in_range(value):
            return f"{label or self.flag} must be {self.rule()}, got {value!r}"
        return None

    def _in_range(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.value_type not in ("int", "float"):
            return True
        return (
            math.isfinite(value)
            and (self.value_type != "int" or abs(value) <= max(LARGEST_INT, self.maximum or 0))
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def convert(self, text: str, flag: str) -> tuple[Any, str | None]:
        """Parse the text after ``flag`` into (value, problem)."""
        value: Any = self.synonyms.get(text, text)
        try:
            if self.is_list:
                words = self.values_of(text)
                value = words[0] if len(words) == 1 else " ".join(map(str, words))
            elif self.read is not None:
                value = self.read(text)
            elif self.value_type in ("int", "float"):
                value = int(text) if self.value_type == "int" else float(text)
        except ValueError:
            return None, f"{flag} must be {self.rule()}, got {text!r}"
        return value, self.problem(value, flag)


def option(default: Any, help: str, *, flag: str | None = None, shown_default: str = "", **attributes: Any) -> Any:
    """Define a flag by a dataclass field; ``flag`` "" means that only constants or aliases set the field.

    A default of 0 for a field with ``minimum=1`` means "derived from other fields"; ``shown_default`` describes how.
    """
    metadata = {"flag": flag, "help": help, "shown_default": shown_default, **attributes}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options_of(section: type) -> tuple[Option, ...]:
    """List a configuration dataclass's options in field order, inherited fields last."""
    local_fields = section.__dict__.get("__annotations__", {})
    flag_fields = [field for field in dataclasses.fields(section) if field.metadata]
    return tuple(_option_of(field) for field in sorted(flag_fields, key=lambda field: field.name not in local_fields))


def _option_of(field: dataclasses.Field[Any]) -> Option:
    attributes = dict(field.metadata)
    flag = attributes.pop("flag")
    annotation = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    shown_default = attributes.pop("shown_default") or (
        "" if field.default in (None, False, "") else str(field.default)
    )
    return Option(
        name=field.name,
        flag="--" + field.name.replace("_", "-") if flag is None else flag,
        value_type=annotation.split(" ")[0],
        default=field.default,
        shown_default=shown_default,
        **attributes,
    )


def is_derived(option: Option, value: Any) -> bool:
    """Check if ``value`` is 0 and stands for "derived from other fields"."""
    return value == option.default == 0 and bool(option.problem(value))


# Steps on a command line: a number or a range, counted from 1.


def parse_steps(word: str) -> range:
    """Parse steps such as "5" or "5-7".

    Raises:
        ValueError: the range is empty, or a number is not an integer of at least 1.
    """
    first, dash, last = word.strip().partition("-")
    steps = range(_parse_step(first), _parse_step(last if dash else first) + 1)
    if not steps:
        raise ValueError(word)
    return steps


def _parse_step(word: str) -> int:
    if not re.fullmatch(r"\s*[0-9]+\s*", word) or int(word) < 1:
        raise ValueError(word)
    return int(word)
