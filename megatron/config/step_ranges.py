"""Steps on a command line: a number or a range of them, counted from 1."""

from __future__ import annotations

import re


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
