"""Encoding a chunk of text as the continuation of an earlier chunk.

Many tokenizers put a space in front of a text, and some drop spaces at both ends. Where a text was cut, its second
part must not get a space, and its first must not lose one, or the text would come back otherwise than it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

_FIRST_WORD = re.compile(r"\S*")


def without_prefix(description: str) -> str:
    """Return the JSON text of the same tokenizer that puts no space in front of a text and drops none."""
    fields = json.loads(description)
    for name in ("normalizer", "pre_tokenizer"):
        fields[name] = _changed(fields.get(name))
    return json.dumps(fields, ensure_ascii=False)


def _changed(part: Any) -> Any:
    if isinstance(part, list):
        return [step for step in map(_changed, part) if step is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") in ("Prepend", "Strip"):
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never[name] if name in never else _changed(value) for name, value in part.items()}


def strips_end(description: str) -> bool:
    """Whether the tokenizer drops the spaces at the end of a text."""
    return '"strip_right": true' in json.dumps(json.loads(description).get("normalizer"))


def with_blanks_in_front(pieces: Iterable[str], blanks: Collection[str] | None = None) -> Iterator[str]:
    """Yield the pieces of a text, the blanks at the end of each moved to the front of the next; the last are dropped.

    Args:
        blanks: the characters that are blanks; those of ``str.isspace`` if not given.
    """
    characters = None if blanks is None else "".join(blanks)
    carried = ""
    for piece in pieces:
        whole = carried + piece
        kept = whole.rstrip(characters)
        carried = whole[len(kept) :]
        if kept:
            yield kept


def splits_words(description: str) -> bool:
    """Whether the tokenizer splits at spaces first, as T5's does: then each word has a space put in front."""
    return '"WhitespaceSplit"' in json.dumps(json.loads(description).get("pre_tokenizer"))


def behind_first_word(text: str) -> tuple[str, str]:
    """Return what goes on with the word before, and the rest from the next space on."""
    found = _FIRST_WORD.match(text)
    stop = found.end() if found else 0
    return text[:stop], text[stop:]
