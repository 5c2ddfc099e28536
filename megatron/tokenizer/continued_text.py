"""Encode a chunk of text as the continuation of an earlier chunk.

Many tokenizers add a space before a text, and some remove spaces at both ends. If a text is split, the second chunk
must not get a space, and the first chunk must not lose one; otherwise, decoding would not restore the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

_FIRST_WORD = re.compile(r"\S*")


def without_prefix(description: str) -> str:
    """Return the tokenizer's JSON text with the addition and removal of spaces disabled."""
    fields = json.loads(description)
    for name in ("normalizer", "pre_tokenizer"):
        fields[name] = _without_space_handling(fields.get(name))
    return json.dumps(fields, ensure_ascii=False)


def _without_space_handling(node: Any) -> Any:
    if isinstance(node, list):
        return [step for step in map(_without_space_handling, node) if step is not None]
    if not isinstance(node, dict):
        return node
    if node.get("type") in ("Prepend", "Strip"):
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never[name] if name in never else _without_space_handling(value) for name, value in node.items()}


def strips_end(description: str) -> bool:
    """Return True if the tokenizer removes spaces at the end of a text."""
    return '"strip_right": true' in json.dumps(json.loads(description).get("normalizer"))


def move_blanks_forward(chunks: Iterable[str], blanks: Collection[str] | None = None) -> Iterator[str]:
    """Yield the chunks of a text, moving blanks at the end of a chunk to the start of the next chunk.

    Blanks at the end of the text are dropped.

    Args:
        blanks: the blank characters; None: white space as defined by ``str.isspace``.
    """
    characters = None if blanks is None else "".join(blanks)
    carried = ""
    for chunk in chunks:
        joined = carried + chunk
        stripped = joined.rstrip(characters)
        carried = joined[len(stripped) :]
        if stripped:
            yield stripped


def splits_words(description: str) -> bool:
    """Return True if the tokenizer first splits at spaces, like T5's, and then adds a space before each word."""
    return '"WhitespaceSplit"' in json.dumps(json.loads(description).get("pre_tokenizer"))


def split_first_word(text: str) -> tuple[str, str]:
    """Split a text that continues a word into (the end of this word, the text from the next space on)."""
    match = _FIRST_WORD.match(text)
    stop = match.end() if match else 0
    return text[:stop], text[stop:]
