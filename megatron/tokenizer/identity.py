"""Identity of a tokenizer: files that produce the same ids with the same special tokens are the same tokenizer.

An identity consists of two SHA-256 digests in hexadecimal, ``IDS.FILES``:

| part | covers |
|---|---|
| IDS | vocabulary, merges, normalizer, pre-tokenizer, added tokens; no post-processor, decoder, padding, truncation |
| FILES | the bytes of the files; token files and checkpoints of earlier versions have only this part |

Two identities are the same if they share one of the parts. When transformers saves a tokenizer, it rewrites
tokenizer.json with a post-processor, default values and another order of keys. This changes FILES but not IDS.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_WITHOUT_EFFECT = ("trim_offsets", "dropout", "fuse_unk")
"""Keys that do not affect the ids: offsets, dropout (never applied), ``fuse_unk`` without an unknown token."""


def join(ids: str, files: str) -> str:
    """Join the parts ``ids`` and ``files`` to an identity."""
    return f"{ids}.{files}"


def parts(identity: str) -> tuple[str, ...]:
    """Split an identity into digests, (IDS, FILES) or (FILES,)."""
    return tuple(identity.split("."))


def is_same(first: str, second: str) -> bool:
    """Return True if both identities denote the same tokenizer."""
    first_parts, second_parts = parts(first), parts(second)
    return first_parts[-1] == second_parts[-1] or (
        len(first_parts) == len(second_parts) == 2 and first_parts[0] == second_parts[0]
    )


def digest(values: Iterable[Any]) -> str:
    """Hash JSON values: SHA-256 in hexadecimal."""
    result = hashlib.sha256()
    for value in values:
        text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        result.update(f"{len(text)}:{text}".encode())
    return result.hexdigest()


def library_identity_values(description: str, normalizer: Any, pre_tokenizer: Any) -> list[Any]:
    """Return the values that determine the ids for a tokenizer from the ``tokenizers`` library.

    Args:
        description: the tokenizer's JSON.
        normalizer: the normalizer as serialized by the installed library; None if absent.
        pre_tokenizer: the pre-tokenizer, likewise.
    """
    with without_collection():
        fields = json.loads(description)
        return _identity_values(fields, normalizer, pre_tokenizer)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector, which would repeatedly scan millions of new objects while parsing a vocabulary."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _identity_values(fields: Mapping[str, Any], normalizer: Any, pre_tokenizer: Any) -> list[Any]:
    return [
        *_model(fields["model"]),
        _steps(normalizer),
        _steps(pre_tokenizer),
        _added(fields.get("added_tokens") or []),
    ]


def _model(model: Mapping[str, Any]) -> list[Any]:
    """Extract [settings, pieces, merges] from a model, without settings that do not affect the ids."""
    vocab = model.get("vocab") or []
    vocab_items = sorted(vocab.items(), key=lambda item: (item[1], item[0])) if isinstance(vocab, Mapping) else vocab
    merges = [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in model.get("merges") or ()]
    settings = _without_defaults({key: value for key, value in model.items() if key not in ("vocab", "merges")})
    if isinstance(vocab, Mapping) and model.get("byte_fallback") and _has_all_bytes(vocab):
        settings.pop("unk_token", None)  # every character has bytes, so the unknown token never occurs
    elif settings.get("unk_token") is not None and model.get("fuse_unk"):
        settings["fuse_unk"] = True
    return [settings, list(map(list, vocab_items)), merges]


def _has_all_bytes(vocab: Mapping[str, int]) -> bool:
    return all(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _steps(component: Any) -> list[Any]:
    """List the steps in a normalizer or pre-tokenizer, with nested sequences flattened."""
    if component is None:
        return []
    if component.get("type") == "Sequence":
        steps = component.get("normalizers") or component.get("pretokenizers") or ()
        return [flat_step for step in steps for flat_step in _steps(step)]
    return [_without_defaults(component)]


def _without_defaults(node: Any) -> Any:
    """Remove keys that have no effect and default values (None, False, "")."""
    if isinstance(node, Mapping):
        effective = {key: _without_defaults(value) for key, value in node.items() if key not in _WITHOUT_EFFECT}
        return {
            key: value for key, value in effective.items() if value is not None and value is not False and value != ""
        }
    return [_without_defaults(value) for value in node] if isinstance(node, list) else node


def _added(tokens: Iterable[Mapping[str, Any]]) -> list[Any]:
    """List added tokens as [id, name, *matching rules]. Special tokens are never matched in normalized text."""
    entries = []
    for token in tokens:
        rules = [bool(token.get(rule)) for rule in ("special", "lstrip", "rstrip", "single_word")]
        is_normalized = bool(token.get("normalized")) and not token.get("special")
        entries.append([token["id"], token["content"], *rules, is_normalized])
    return sorted(entries)
