"""Option: one dataclass field is one flag; ranges of steps."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# One field of a configuration dataclass = one flag; a flag is written once, here, with its help and its range.

LARGEST_INT = 2**31 - 1

KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a flag is called, takes and allows; built from a dataclass field by ``options_of``."""

    name: str  # the field, and the attribute of get_args()
    flag: str  # as the user types it
    kind: str  # int, float, str or bool
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
    family_kind: str = ""  # of the families in which it acts; "" for all but those whose ADVICE names it
    elsewhere: str = ""  # what a run in which it does not act is told to do, where its family's ADVICE is silent
    alone: str | None = None  # the value where none follows the flag
    read: Callable[[str], Any] | None = None  # a text to the value, where it is written in another way than its kind
    join: Callable[[Sequence[str]], str] | None = None  # takes all words to the next flag; makes one text of them
    short: str = ""  # its line in --help, of a flag that people set; without one it is in --help-all only

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling that sets this field, the flag itself first (none when only constants set it)."""
        return ((self.flag,) if self.flag else ()) + self.aliases + tuple(self.constants)

    @property
    def shown_kind(self) -> str:
        """What a value looks like in tables: its choices or its kind, with dots where it is several words."""
        return ", ".join(self.choices) or (f"{self.kind} ..." if self.join else self.kind)

    def rule(self) -> str:
        """Say in words what a value must be."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = [
            f"at least {self.minimum:g}" if self.minimum is not None else "",
            f"more than {self.above:g}" if self.above is not None else "",
            f"at most {self.maximum:g}" if self.maximum is not None else "",
            f"less than {self.below:g}" if self.below is not None else "",
        ]
        if (self.kind, self.minimum, self.maximum) == ("int", 1, None):
            return "a positive integer"
        noun = {"int": "an integer", "float": "a finite number", "str": "a text", "bool": "true or false"}[self.kind]
        limits = " and ".join(bound for bound in bounds if bound)
        return f"{noun} of {limits}" if limits else noun

    def problem(self, value: Any, label: str = "") -> str | None:
        """Return why ``value`` cannot be used for this field, or None; ``label`` says where it comes from."""
        if value is None and self.default is None:
            return None
        good = KINDS[self.kind]
        wrong_kind = not isinstance(value, good) or (isinstance(value, bool) and self.kind != "bool")
        if wrong_kind or not self._in_range(value):
            return f"{label or self.flag} must be {self.rule()}, got {value!r}"
        return None

    def _in_range(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind not in ("int", "float"):
            return True
        return (
            math.isfinite(value)
            and (self.kind != "int" or abs(value) <= LARGEST_INT)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def convert(self, text: str, flag: str) -> tuple[Any, str | None]:
        """Return (value, problem) of what the user typed after ``flag``."""
        value: Any = text
        try:
            if self.read is not None:
                value = self.read(text)
            elif self.kind in ("int", "float"):
                value = int(text) if self.kind == "int" else float(text)
        except ValueError:
            return None, f"{flag} must be {self.rule()}, got {text!r}"
        return value, self.problem(value, flag)


def option(default: Any, help: str, *, flag: str | None = None, shown_default: str = "", **facts: Any) -> Any:
    """Return a dataclass field that carries its flag; ``flag`` "" means that only constants or aliases set it.

    A default of 0 for a field with ``minimum=1`` means "derived from other fields"; ``shown_default`` says how.
    """
    metadata = {"flag": flag, "help": help, "shown_default": shown_default, **facts}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options_of(section: type) -> tuple[Option, ...]:
    """Return the options of a configuration dataclass in the order of its fields, those of its base last."""
    own = section.__dict__.get("__annotations__", {})
    found = [field for field in dataclasses.fields(section) if field.metadata]
    return tuple(_option_of(field) for field in sorted(found, key=lambda field: field.name not in own))


def _option_of(field: dataclasses.Field[Any]) -> Option:
    facts = dict(field.metadata)
    flag = facts.pop("flag")
    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    shown = facts.pop("shown_default") or ("" if field.default in (None, False, "") else str(field.default))
    return Option(
        name=field.name,
        flag="--" + field.name.replace("_", "-") if flag is None else flag,
        kind=kind.split(" ")[0],
        default=field.default,
        shown_default=shown,
        **facts,
    )


def is_derived(option: Option, value: Any) -> bool:
    """True for the value 0 of a field that stands for "derived from other fields"."""
    return value == option.default == 0 and bool(option.problem(value))


# Steps on a command line: a number or a range of them, counted from 1.


def steps_of(word: str) -> range:
    """Return the steps that ``word`` names, "5" or "5-7".

    Raises:
        ValueError: it names none, or not whole numbers from 1 on.
    """
    first, dash, last = word.strip().partition("-")
    found = range(_step(first), _step(last if dash else first) + 1)
    if not found:
        raise ValueError(word)
    return found


def _step(word: str) -> int:
    if not re.fullmatch(r"\s*[0-9]+\s*", word) or int(word) < 1:
        raise ValueError(word)
    return int(word)
