"""What is preprocessed: JSON lines of mixed Chinese, English and code, the same for the same seed and size.

Chinese and English are the repository's own sentences with part of their words replaced: by words of jieba's
dictionary as often as these occur, by words of the standard library's sources. So sentences are new throughout, and
what tokenizers remember of words helps them as with a corpus of that size, not as with a small text repeated. Code is
pages of the standard library.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

ROOT = Path(__file__).resolve().parents[2]
REPLACED = 0.3
SHARES = {"zh": 0.4, "en": 0.4, "code": 0.2}
_PARAGRAPHS = (2, 30)
_PAGE_LINES = (20, 400)
_MODULES = 80

Source = Callable[[random.Random], str]


def documents(num_bytes: int, seed: int) -> Iterator[str]:
    """Yield texts of one kind each, until their UTF-8 bytes reach ``num_bytes``."""
    rng = random.Random(seed)
    sources = [_chinese(), _english(), _code()]
    written = 0
    while written < num_bytes:
        text = rng.choices(sources, list(SHARES.values()))[0](rng)
        written += len(text.encode())
        yield text


def write(path: Path, num_bytes: int, seed: int) -> int:
    """Write such a corpus to ``path`` and return its bytes."""
    with open(path, "wb") as file:
        for text in documents(num_bytes, seed):
            file.write(orjson.dumps({"text": text}) + b"\n")
    return path.stat().st_size


@functools.cache
def _chinese() -> Source:
    import jieba
    import rjieba

    with jieba.dt.get_dict_file() as file:  # a line is: word, count, kind
        lines = [line.split(b" ", 2) for line in file]
    words = b"\n".join(line[0] for line in lines).decode().split("\n")
    totals = list(itertools.accumulate(int(line[1]) for line in lines))
    return _varied([rjieba.cut(text) for text in _paragraphs("zh")], words, totals)


@functools.cache
def _english() -> Source:
    found = sorted({word for page in _modules() for word in re.findall(r"[A-Za-z]{2,}", page)})
    return _varied([re.split(r"(\W+)", text) for text in _paragraphs("en")], found, None)


def _varied(paragraphs: list[list[str]], words: list[str], totals: list[int] | None) -> Source:
    """Return a source of paragraphs in which part of the words is drawn from ``words``, with weights or evenly."""

    def text(rng: random.Random) -> str:
        chosen = rng.choices(paragraphs, k=rng.randint(*_PARAGRAPHS))
        drawn = iter(rng.choices(words, cum_weights=totals, k=sum(map(len, chosen))))
        return "\n\n".join("".join(_replaced(rng, word, drawn) for word in part) for part in chosen)

    return text


def _replaced(rng: random.Random, word: str, drawn: Iterator[str]) -> str:
    return next(drawn) if word.isalpha() and rng.random() < REPLACED else word


@functools.cache
def _code() -> Source:
    pages = [page.splitlines(keepends=True) for page in _modules()]

    def text(rng: random.Random) -> str:
        page = rng.choice(pages)
        start = rng.randrange(len(page))
        return "".join(page[start : start + rng.randint(*_PAGE_LINES)])

    return text


@functools.cache
def _modules() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))[:_MODULES]
    return [text for path in paths if (text := path.read_text(encoding="utf-8", errors="ignore").replace("\0", ""))]


def _paragraphs(language: str) -> list[str]:
    paths = sorted((ROOT / "examples/corpus" / language).rglob("*.txt"))
    return [part for path in paths for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
