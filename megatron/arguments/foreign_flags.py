"""Flags of other trainers that are not flags of ours, from the table ``foreign_flags.tsv``.

Flags that set a single field of ours under another name are aliases of that field (``megatron/config/*.py``). All
others have a row in the table.

| rule | effect |
|---|---|
| ignored | accepted without effect and listed in the start table; ``--strict-flags`` rejects it |
| by-value | ignored with the values in ``target``; an error with any other value |
| dense-only | ignored in a model without experts; an error with ``--num-experts`` |
| converted | sets the fields in ``target`` |
| rejected | an error: it would change the results and is not supported |

A target is a list of items: ``field`` stores the flag's value, ``field=VALUE`` sets a constant,
``field=WORD:VALUE,WORD:VALUE`` maps the flag's value, ``field?=VALUE`` sets a constant unless the field has a value,
and ``function:field,field`` names a conversion of ``translate`` and the fields that it sets. ``*`` at the end of
a flag's name matches any text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

IGNORED, BY_VALUE, DENSE_ONLY, CONVERTED, REJECTED = "ignored", "by-value", "dense-only", "converted", "rejected"
TABLE = Path(__file__).with_name("foreign_flags.tsv")


class Target(NamedTuple):
    """One item of a target.

    Args:
        fields: fields that are set.
        function: name of the function that sets them; "" for none.
        value: constant, or WORD:VALUE pairs; "" for the flag's value.
        is_fallback: a value from another flag takes precedence.
    """

    fields: tuple[str, ...]
    function: str = ""
    value: str = ""
    is_fallback: bool = False

    @property
    def choices(self) -> dict[str, str | bool]:
        """Value of the flag -> value of the field; empty for a constant."""
        pairs = [pair.partition(":") for pair in self.value.split(",")]
        return {word: value == "True" or value for word, colon, value in pairs if colon}


@dataclass(frozen=True)
class ForeignFlag:
    """A row of the table.

    Args:
        programs: trainers that have the flag.
        value: type of its value: "" (none), int, float, str, bool (the word true or false), "str*" (one word or more),
            or "any" (any number of words).
        target: accepted values (by-value), or the fields that it sets (converted).
        note: reason, or meaning of the conversion, as shown to the user.
        alternative: advice for a value that is not accepted.
    """

    flag: str
    programs: tuple[str, ...]
    rule: str
    value: str = ""
    target: str = ""
    note: str = ""
    alternative: str = ""

    @functools.cached_property
    def targets(self) -> tuple[Target, ...]:
        return tuple(_target_of(item) for item in self.target.split()) if self.rule == CONVERTED else ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that the flag determines.

        Targets with ``?`` yield to other flags and are left out. If all targets have a ``?``, the first one counts.
        """
        targets = [target for target in self.targets if not target.is_fallback] or self.targets[:1]
        return tuple(field for target in targets for field in target.fields)

    @property
    def is_fallback(self) -> bool:
        """True if the flag sets its first field only if no other flag sets it."""
        return bool(self.targets) and self.targets[0].is_fallback

    def count_problem(self, values: list[str]) -> str | None:
        """Explain why the number of words after the flag is wrong; None if it is valid."""
        if not self.value and values:
            return f"{self.flag} takes no value, got {values[0]!r}. Remove the value, or the flag"
        if self.value == "any":
            return None
        if self.value and not values:
            return f"{self.flag} needs a value, got none. Write {self.flag} VALUE, or remove it"
        if self.value != "str*" and len(values) > 1:
            return f"every value must follow a flag that takes one, got {values[1]!r} on its own. Remove it"
        return None

    def value_problem(self, values: list[str]) -> str | None:
        """Explain why ``values`` are not supported; None if they are, or if the rule is not by-value."""
        if self.rule != BY_VALUE or all(_is_accepted(value, self.target.split()) for value in values):
            return None
        return f"{self.flag} {' '.join(values)} is not supported: {self.alternative}"


@functools.cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    """Map flags to rows. The table is read on the first call, so a run without foreign flags never reads it."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return {flag: ForeignFlag(flag, tuple(programs.split(",")), *cells) for flag, programs, *cells in rows}


def foreign_flag(flag: str) -> ForeignFlag | None:
    """Look up ``flag`` by name or by a pattern that ends in ``*``; None if there is no row."""
    rows = foreign_flags()
    patterns = (row for name, row in rows.items() if name.endswith("*") and flag.startswith(name[:-1]))
    return rows.get(flag) or next((replace(row, flag=flag) for row in patterns), None)


def flags_with_rule(*rules: str) -> Iterator[ForeignFlag]:
    """Select the rows with one of ``rules``."""
    yield from (row for row in foreign_flags().values() if row.rule in rules)


def _target_of(item: str) -> Target:
    left, _, value = item.partition("=")
    function, _, fields = left.rpartition(":")
    names = fields.split(",") if fields else []
    return Target(tuple(name.rstrip("?") for name in names), function, value, is_fallback=fields.endswith("?"))


def _is_accepted(value: str, accepted: Iterable[str]) -> bool:
    if value in accepted:
        return True
    try:
        return any(float(value) == float(candidate) for candidate in accepted)
    except ValueError:
        return False
