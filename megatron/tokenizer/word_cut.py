"""Chinese words as `jieba` cuts them, some twenty times as fast.

`rjieba` follows the same route through the same dictionary, but for four things: the words that it makes of runs of
unknown characters (its probabilities are rounded), the marks ``.``, ``-`` and ``_`` within such runs, Chinese
characters outside U+4E00 ... U+9FD5, which jieba takes for marks, and the sum of all frequencies, in which jieba counts
a word twice that its dictionary has twice. So rjieba, with that sum put right, does the route alone, on text without
such characters, and the runs that are left as single characters are joined here by jieba's own rules and tables.
jieba's dictionary is never loaded: no wait, no cache file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import rjieba
from jieba import finalseg

from megatron.tokenizer.viterbi import mark_chinese_words

MARK = "\ud800"
"""Stands between words: a lone surrogate, which no text that can be encoded has."""

NO_PIECE = "\ufffd"
"""Stands in a text for an id that the vocabulary does not have."""

_TEXT_END = "\ud801"
_HAN = "\u4e00-\u9fd5"
_UNIT = f"(?:[{_HAN}]|[a-zA-Z0-9]+|[-+#&._%])"
_RUN = re.compile(f"{MARK}({_UNIT}(?:{MARK}{_UNIT})+)(?={MARK})")
_OTHER_HAN = re.compile("([\u3400-\u4dbf\u9fd6-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
_MOST_KNOWN = 1 << 18

_known_runs: dict[str, str] = {}
_dictionary = rjieba.Jieba()
# No word of a text has it: its 3 make up for the second line of a word in jieba's list.
_dictionary.add_word("\0", 3, None)
_SPACE, _LINE_END = "\u2582", "\u2583"


def to_pieces(text: str) -> str:
    """Return ``text`` with the characters that stand for a space and a line end in CPM's vocabularies."""
    return text.replace(" ", _SPACE).replace("\n", _LINE_END)


def to_text(pieces: str) -> str:
    """Undo ``to_pieces``."""
    return pieces.replace(_SPACE, " ").replace(_LINE_END, "\n")


def mark_words(texts: Sequence[str]) -> list[str]:
    """Return each text with ``MARK`` between its words; they are those of ``jieba.cut(text)``."""
    if not texts:
        return []
    parts = _RUN.split(_TEXT_END.join(_route(text) for text in texts))  # what no run holds, a run, and so on
    _learn(parts[1::2])
    parts[1::2] = map(_known_runs.__getitem__, parts[1::2])
    return [marked[1:-1] for marked in "".join(parts).split(_TEXT_END)]


def _route(text: str) -> str:
    """Return jieba's route through the dictionary: a mark before and behind each word or character without one."""
    if _OTHER_HAN.search(text) is None:
        return f"{MARK}{MARK.join(_dictionary.cut(text, False))}{MARK}"
    words = (
        word
        for place, part in enumerate(_OTHER_HAN.split(text))
        for word in ([part] if place % 2 else _dictionary.cut(part, False))
    )
    return f"{MARK}{MARK.join(words)}{MARK}"


def _learn(runs: Iterable[str]) -> None:
    if len(_known_runs) > _MOST_KNOWN:
        _known_runs.clear()
    plain = {run: run.replace(MARK, "") for run in set(runs).difference(_known_runs)}
    marked = _mark_runs([text for text in plain.values() if not _dictionary.has_word(text)])
    for run, text in plain.items():  # a word of the dictionary that the route left in characters stays in characters
        _known_runs[run] = MARK + (marked.get(text) or MARK.join(text))


def _mark_runs(runs: Sequence[str]) -> dict[str, str]:
    """Cut runs of characters without a word: Chinese by probability, letters, digits and signs by jieba's pattern.

    The result holds ``runs`` and nothing else: a Chinese part of one of them may be a word of the dictionary.
    """
    mixed = {run: finalseg.re_han.split(run) for run in runs if finalseg.re_han.fullmatch(run) is None}
    chinese = {part for parts in mixed.values() for part in parts[1::2]}.union(run for run in runs if run not in mixed)
    marked = mark_chinese_words(sorted(chinese, key=len, reverse=True), MARK)
    return {run: MARK.join(_marked_parts(mixed[run], marked)) if run in mixed else marked[run] for run in runs}


def _marked_parts(parts: list[str], chinese: dict[str, str]) -> Iterator[str]:
    for place, part in enumerate(parts):  # other, Chinese, other, and so on
        yield from [chinese[part]] if place % 2 else filter(None, finalseg.re_skip.split(part))
