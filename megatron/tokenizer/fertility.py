"""Fertility of a vocabulary: the number of tokens and the rate of unknown tokens for a text, by language.

The language of a document is determined from its characters except white space:

1. ``code or other`` if more than 4 % of them are signs typical of programs, or less than half are letters of the
   scripts below;
2. ``Kana`` if at least a tenth of the Han and Kana letters are Kana;
3. otherwise the script with the most letters: ``Han``, ``Kana``, ``Hangul``, ``Cyrillic``, ``Latin``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.tokenizer.tokenizer import Tokenizer

OTHER = "code or other"
_SIGNS = re.compile(r"[{}()\[\]<>=;_#*+&|\\/$@]")
_BLANKS = re.compile(r"\s+")
_LETTERS = {
    "Han": re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "Kana": re.compile("[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d]"),
    "Hangul": re.compile("[\uac00-\ud7af\u1100-\u11ff\u3130-\u318f]"),
    "Cyrillic": re.compile("[\u0400-\u052f]"),
    "Latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]"),
}
_MAX_SIGN_SHARE = 0.04
_MIN_LETTER_SHARE = 0.5
_MIN_KANA_SHARE = 0.1
_BATCH = 64


@dataclass(frozen=True)
class Fertility:
    """Counts over one language or file."""

    name: str
    num_documents: int = 0
    num_bytes: int = 0
    num_chars: int = 0
    num_words: int = 0
    num_tokens: int = 0
    num_unknown: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Mean number of UTF-8 bytes per token."""
        return self.num_bytes / max(self.num_tokens, 1)

    @property
    def tokens_per_char(self) -> float:
        """Mean number of tokens per character."""
        return self.num_tokens / max(self.num_chars, 1)

    @property
    def tokens_per_word(self) -> float:
        """Mean number of tokens per white-space-separated word; not meaningful for scripts without spaces."""
        return self.num_tokens / max(self.num_words, 1)

    @property
    def unknown_rate(self) -> float:
        """Share of unknown tokens."""
        return self.num_unknown / max(self.num_tokens, 1)


def language_of(text: str) -> str:
    """Classify a document's language by the rules at the top of this file."""
    characters = _BLANKS.sub("", text)
    counts = {name: len(letters.findall(characters)) for name, letters in _LETTERS.items()}
    if len(_SIGNS.findall(characters)) > _MAX_SIGN_SHARE * len(characters) or sum(
        counts.values()
    ) < _MIN_LETTER_SHARE * len(characters):
        return OTHER
    if counts["Kana"] and counts["Kana"] >= _MIN_KANA_SHARE * (counts["Han"] + counts["Kana"]):
        counts["Kana"] += counts["Han"]
    return max(counts, key=lambda name: counts[name]) if characters else OTHER


def measure(tokenizer: Tokenizer, groups: Mapping[str, Sequence[str]]) -> list[Fertility]:
    """Measure each nonempty group, then all documents together if there are several groups."""
    rows = [_measure_group(tokenizer, name, texts) for name, texts in groups.items() if texts]
    return [*rows, _sum(rows)] if len(rows) != 1 else rows


def _measure_group(tokenizer: Tokenizer, name: str, texts: Sequence[str]) -> Fertility:
    num_tokens = num_unknown = 0
    for start in range(0, len(texts), _BATCH):
        tokens, _ = tokenizer.encode_arrays(texts[start : start + _BATCH])
        num_tokens += len(tokens)
        if tokenizer.unk_id is not None:
            num_unknown += int((tokens == tokenizer.unk_id).sum())
    return Fertility(
        name,
        num_documents=len(texts),
        num_bytes=sum(len(text.encode()) for text in texts),
        num_chars=sum(map(len, texts)),
        num_words=sum(len(text.split()) for text in texts),
        num_tokens=num_tokens,
        num_unknown=num_unknown,
    )


def _sum(rows: Sequence[Fertility]) -> Fertility:
    return Fertility(
        "all",
        *(
            sum(getattr(row, name) for row in rows)
            for name in ("num_documents", "num_bytes", "num_chars", "num_words", "num_tokens", "num_unknown")
        ),
    )
