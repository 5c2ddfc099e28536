"""Tokenizer fingerprint: ids of probe texts, stored with token files, checkpoints and exports, compared at every load.

An identity (``identity.py``) covers a tokenizer's files. The probe also detects different ids from equal files, for
example if another version of a library applies another pre-tokenizer. A probe is a JSON object:

| key | value |
|---|---|
| ``format`` | 1 |
| ``version`` | library, its version and the pre-tokenizer; only used in messages |
| ``ids`` | name of a probe text -> ids, separated by spaces |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

FORMAT = 1
FILE_NAME = "tokenizer_probe.json"
"""The probe's file next to a tokenizer in an exported folder."""
PROBE = "tokenizer_probe"
"""The probe's key in a checkpoint's metadata."""
TEXTS = {
    "words": "The quick brown fox jumps over lazy dogs. It's we'll I'VE don't",
    "digits": "7 42 2024 12345 3.14159 1,000,000 -0.5e10 0x1F",
    "whitespace": "  two  spaces \n\n\n\tand a tab \r\n end\u00a0of\u3000line   ",
    "code": "def f(x):\n    return {'a': x**2}  # y+=1; a_b->c != [0]\n\n\n\tif (a&&b) { c(); }",
    "Chinese": "从前，有一只狐狸住在森林里。「全角」１２３",
    "Japanese and Korean": "ひらがなカタカナ漢字 한국어 문장",
    "accents": "café cafe\u0301 naïve Straße ÅÄÖ ﬁ",
    "scripts": "Ωμέγα привет שלום مرحبا नमस्ते ไทย",
    "emoji": "🙂 👩‍👩‍👧🏽 🇩🇪 x",
    "punctuation": '"Yes," she said; (no)... --- ??? /path/to?q=1&r=2 user@mail.org',
}
"""Name -> text. Tokenizers with other pre-tokenizers, normalizers or byte fallbacks differ in at least one of them.

A text must never change, because stored probes would then differ; add a text under a new name instead.
"""
_MAX_SHOWN_IDS = 12


class Encoder(Protocol):
    """The part of a tokenizer that a probe needs."""

    @property
    def version_text(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...


def take(tokenizer: Encoder) -> dict[str, Any] | None:
    """Encode the probe texts; None if the tokenizer cannot encode text."""
    try:
        ids = {name: " ".join(map(str, map(int, tokenizer.encode(text)))) for name, text in TEXTS.items()}
    except Exception:  # a vocabulary without text, or the user's tokenizer
        return None
    return {"format": FORMAT, "version": tokenizer.version_text, "ids": ids}


def difference(saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> str | None:
    """Describe the difference between two probes with both versions; None if they agree or one of them is unknown.

    Probes of other formats, and texts that only one of them has, are not compared.
    """
    if not saved or not current or saved.get("format") != FORMAT or current.get("format") != FORMAT:
        return None
    saved_ids, current_ids = saved["ids"], current["ids"]
    differing = [name for name in saved_ids if name in current_ids and saved_ids[name] != current_ids[name]]
    if not differing:
        return None
    first = differing[0]
    return (
        f"the ids of the probe texts differ in {', '.join(differing)}: {TEXTS.get(first, first)[:24]!r}... is "
        f"{_show(saved_ids[first])} in {saved.get('version')}, and {_show(current_ids[first])} in "
        f"{current.get('version')}"
    )


def _show(text: str) -> str:
    ids = text.split()
    return f"[{', '.join(ids[:_MAX_SHOWN_IDS])}{', ...' if len(ids) > _MAX_SHOWN_IDS else ''}]"
