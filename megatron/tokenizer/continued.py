"""A ``tokenizers`` JSON text for parts that go on in the middle of a word.

Many tokenizers put a space in front of a text. Where a text was cut inside the spelling of a control token, its second
part must not get one, or the text would come back with a space that it never had.
"""

from __future__ import annotations

import json
import re
from typing import Any

_FIRST_WORD = re.compile(r"\S*")


def without_prefix(description: str) -> str:
    """Return the JSON text of the same tokenizer that puts no space in front of a text."""
    fields = json.loads(description)
    for name in ("normalizer", "pre_tokenizer"):
        fields[name] = _changed(fields.get(name))
    return json.dumps(fields, ensure_ascii=False)


def _changed(part: Any) -> Any:
    if isinstance(part, list):
        return [step for step in map(_changed, part) if step is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never[name] if name in never else _changed(value) for name, value in part.items()}


def splits_words(description: str) -> bool:
    """Whether the tokenizer splits at spaces first, as T5's does: then each word has a space put in front."""
    return '"WhitespaceSplit"' in json.dumps(json.loads(description).get("pre_tokenizer"))


def behind_first_word(text: str) -> tuple[str, str]:
    """Return what goes on with the word before, and the rest from the next space on."""
    found = _FIRST_WORD.match(text)
    stop = found.end() if found else 0
    return text[:stop], text[stop:]
