"""Settings in the files next to a vocabulary: eos and bos token, chat template, special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError

SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


@dataclass(frozen=True)
class SiblingFiles:
    """The settings of a vocabulary's folder, interpreted as in transformers.

    Attributes:
        named: role (such as ``"eos_token"``) -> token.
        special: names that the files declare as special tokens.
        has_chat_template: True if the folder has a chat template.
        add_bos_token: value in tokenizer_config.json; None if it is absent.
    """

    named: Mapping[str, str]
    special: frozenset[str]
    has_chat_template: bool
    add_bos_token: bool | None


def read_siblings(paths: Sequence[Path]) -> SiblingFiles:
    """Read the settings next to ``paths[0]``; they are empty without paths or files.

    Raises:
        DataError: a file is not a JSON object.
    """
    if not paths:
        return SiblingFiles({}, frozenset(), False, None)
    folder = paths[0].parent
    settings, special = read_object(folder / SETTINGS), read_object(folder / SPECIAL)
    contents = (
        (special, settings) if "added_tokens_decoder" in settings else (settings, special)
    )  # later files override
    roles = [(role, _content(token)) for content in contents for role, token in content.items()]
    token_by_role = {role: token for role, token in roles if role.endswith("_token") and token is not None}
    names = {*token_by_role.values(), *_listed(special), *_listed(settings)}
    has_template = bool(settings.get("chat_template")) or any((folder / name).exists() for name in _TEMPLATES)
    add_bos = settings.get("add_bos_token")
    return SiblingFiles(token_by_role, frozenset(names), has_template, add_bos if isinstance(add_bos, bool) else None)


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _listed(settings: Mapping[str, Any]) -> set[str]:
    """Find special tokens that a file lists without a role."""
    names: set[str] = set()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = settings.get(key) or ()
        tokens = tokens.values() if isinstance(tokens, Mapping) else tokens
        names |= {name for name in map(_content, tokens) if name is not None}
    added = settings.get("added_tokens_decoder")
    for token in added.values() if isinstance(added, Mapping) else ():
        if isinstance(token, Mapping) and token.get("special") and (name := _content(token)) is not None:
            names.add(name)
    return names


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``; empty if the file does not exist.

    Raises:
        DataError: the file cannot be read or is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be a JSON object; reading it failed: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must be a JSON object, got {type(content).__name__}")
    return content
