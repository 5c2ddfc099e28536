"""A row of the table of other trainers' flags: what happens here to one flag that is no field of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NEUTRAL, CONVERTED, REFUSED = "neutral", "converted", "refused"
"""What happens to a flag.

| class | on the command line |
|---|---|
| neutral | accepted and named in the start table: it asks for what holds anyway, or only tunes |
| converted | sets fields of ours, in their units |
| refused | an error, exit code 2, with what to use instead: it would change the numbers, and cannot be done |

--strict-flags refuses what is neutral, too.
"""


@dataclass(frozen=True, kw_only=True)
class FlagRow:
    """One flag of another trainer.

    Args:
        about: why it holds anyway, what it becomes, or why it is refused and what to use instead.
        num_values: words behind the flag: 0, 1, or "*" for all up to the next flag.
        holds: of a neutral flag, the values that ask for what holds; none: all of them.
        otherwise: why other values are refused, and what to use instead.
        kind_of_value: of a converted flag: int, float or str; "" where it has none.
        fields: of a converted flag, the fields that it sets, for docs/flags.md.
    """

    flag: str
    kind: str
    about: str
    num_values: int | str = 0
    holds: tuple[str, ...] = ()
    otherwise: str = ""
    kind_of_value: str = ""
    fields: tuple[str, ...] = ()

    def count_problem(self, values: list[str]) -> str | None:
        """Return why so many values cannot stand behind the flag, or None."""
        if self.num_values == 0 and values:
            return f"{self.flag} takes no value, got {values[0]!r}. Write {self.flag} alone, or leave it out"
        if self.num_values != 0 and not values:
            return f"{self.flag} needs a value, got none. Write {self.flag} VALUE, or leave it out"
        if self.num_values == 1 and len(values) > 1:
            return f"every value must follow a flag that takes one, got {values[1]!r} on its own. Remove it"
        return None

    def value_problem(self, values: list[str]) -> str | None:
        """Return why a neutral flag with these values is refused, or None."""
        if not self.holds or all(_same(value, self.holds) for value in values):
            return None
        return f"{self.flag} {' '.join(values)} is refused: {self.otherwise}"


def _same(value: str, wanted: tuple[str, ...]) -> bool:
    if value in wanted:
        return True
    try:
        return any(float(value) == float(one) for one in wanted)
    except ValueError:
        return False


def rows_of(kind: str, groups: Mapping[str, str]) -> Iterator[FlagRow]:
    """Yield the rows of ``groups``: reason -> flags; ``--a`` has no value, ``--a=`` has one, ``--a=*`` several.

    Args:
        kind: class of all of them.
    """
    for about, flags in groups.items():
        for word in flags.split():
            flag, has_value, several = word.partition("=")
            number: int | str = several or (1 if has_value else 0)
            yield FlagRow(flag=flag, kind=kind, about=about, num_values=number)
