"""Strict JSON with places: duplicate keys, comments and trailing commas are refused with file, line and column."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')


@dataclass(frozen=True)
class JsonText:
    """An object that was read, and where each of its keys stands."""

    path: str
    values: dict[str, Any]
    places: dict[tuple[str, ...], tuple[int, int]]  # keys from the root -> line, column

    def where(self, *keys: str) -> str:
        """Return "file:line:column" of a key, given with the keys that enclose it."""
        line, column = self.places.get(keys, (1, 1))
        return f"{self.path}:{line}:{column}"


def read_json(path: str) -> JsonText:
    """Return the JSON object in ``path``; a byte order mark in front is accepted.

    Raises:
        ConfigError: missing, not readable, empty, not UTF-8, not JSON, a duplicate key, or not an object.
    """
    text = _text_of(path)
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        hint = _hint(text, error.pos)
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: must be JSON, got {error.msg}{hint}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: must be nested less deeply") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1:1: must hold one JSON object {{...}}, got {type(values).__name__}")
    return JsonText(path, values, _key_places(path, text))


def _text_of(path: str) -> str:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--deepspeed_config must name a file that can be read, got {path}: {error.strerror} "
            f"(looked in {Path.cwd()}). Correct the path"
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}:1: must be UTF-8, got byte {raw[error.start]:#x}. Save it as UTF-8"
        ) from error
    if not text.strip():
        raise ConfigError(
            f"{path}:1:1: must hold one JSON object {{...}}, got an empty file. Write {{}} for no settings"
        )
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"numbers must be finite, got {name}")


def _hint(text: str, position: int) -> str:
    before, after = text[:position].rstrip(), text[position:].lstrip()
    if after.startswith(("//", "/*", "#")):
        return "; a comment is not JSON: remove it"
    if before.endswith(",") and after[:1] in ("}", "]"):
        return "; remove the trailing comma"
    return ""


def _key_places(path: str, text: str) -> dict[tuple[str, ...], tuple[int, int]]:
    """Walk the words of valid JSON text and note where each key of each object is."""
    places: dict[tuple[str, ...], tuple[int, int]] = {}
    stack: list[str] = []  # enclosing keys; "" for the root and for array elements
    previous = ("", 0)
    for match in _WORD.finditer(text):
        word = match.group()
        if word == ":":
            keys = (*stack[1:], json.loads(previous[0]))
            place = _line_and_column(text, previous[1])
            if keys in places and "" not in keys:
                raise ConfigError(
                    f"{path}:{place[0]}:{place[1]}: a key may stand once, got {keys[-1]!r} again "
                    f"(first on line {places[keys][0]}). Remove one"
                )
            places[keys] = place
            pending = keys[-1]
        elif word in "{[":
            stack.append(pending if stack and previous[0] == ":" else "")
        elif word in "}]":
            stack.pop()
        previous = (word, match.start())
    return places


def _line_and_column(text: str, position: int) -> tuple[int, int]:
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
