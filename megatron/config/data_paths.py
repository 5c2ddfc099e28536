"""``--data-path`` weights and ``--mixture-schedule`` as text.

| text | means |
|---|---|
| "a" | one corpus |
| "0.7 a 0.3 b" | two corpora and their shares of the samples; what counts is the ratio of the weights |
| "1e9: 0.5 0.5; 2e9: 0.2 0.8" | a schedule: from so many tokens on these weights, in the order of the paths |

Words are split as a shell splits them, so a path with a space in it stands in quotes. A weight may be 0: nothing is
drawn from that corpus until a schedule says otherwise.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

DATA_FLAG = "--data-path"
SCHEDULE_FLAG = "--mixture-schedule"
LARGEST_TOKENS = 2**62
"""Tokens are counted in 64 bits."""
_PATHS_RULE = "must be one path, or weights and paths in turn, such as 0.7 a 0.3 b"
_SCHEDULE_RULE = 'must be steps "TOKENS: WEIGHTS" with semicolons between them, such as "1e9: 0.5 0.5; 2e9: 0.2 0.8"'


def parse_paths(text: str, flag: str = DATA_FLAG) -> tuple[tuple[float, str], ...]:
    """Return (weight, path) of each corpus; the weight of a single path without one is 1.

    Raises:
        ValueError: not such a text, or a path that stands there twice; ``flag`` is named in the message.
    """
    wrong = f"{flag} {_PATHS_RULE}; got {text!r}"
    words = _words(text, wrong)
    if len(words) == 1:
        return ((1.0, words[0]),)
    if len(words) % 2:
        raise ValueError(f"{wrong}, {len(words)} words. Give each path its weight; a path with a space needs quotes")
    weights = _weights(words[::2], wrong)
    paths = words[1::2]
    repeated = next((path for path in paths if paths.count(path) > 1), None)
    if repeated is not None:
        raise ValueError(f"{wrong}, where {repeated} stands more than once. Give it once, with the sum of its weights")
    return tuple(zip(weights, paths, strict=True))


def parse_schedule(text: str, num_corpora: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return (tokens, weights) of each step of a mixture schedule, by rising tokens.

    Raises:
        ValueError: not such a text, tokens that do not rise, or another number of weights than ``num_corpora``.
    """
    wrong = f"{SCHEDULE_FLAG} {_SCHEDULE_RULE}; got {text!r}"
    steps = [_step(part, num_corpora, wrong) for part in text.split(";") if part.strip()]
    if not steps:
        raise ValueError(f"{wrong}, without a step. Leave it out, or write one")
    for (before, _), (after, _) in zip(steps, steps[1:], strict=False):
        if before >= after:
            raise ValueError(f"{wrong}, where {after} tokens follow {before}. Let the tokens rise")
    return tuple(steps)


def join_words(words: Sequence[str]) -> str:
    """Return the text of what stands behind the flag: several words, or one that holds them all."""
    return one_word(words[0]) if len(words) == 1 else shlex.join(words)


def one_word(path: str) -> str:
    """Return ``path`` in quotes where it would not be read as one path, unless it is a mixture written as one word."""
    try:
        words = shlex.split(path)
    except ValueError:
        return shlex.quote(path)
    is_mixture = len(words) > 1 and _is_number(words[0])
    return path if words == [path] or is_mixture else shlex.quote(path)


def _step(part: str, num_corpora: int, wrong: str) -> tuple[int, tuple[float, ...]]:
    tokens, colon, weights = (piece.strip() for piece in part.partition(":"))
    if not colon:
        raise ValueError(f"{wrong}, where {part.strip()!r} has no colon")
    number = float(tokens) if _is_number(tokens) else math.nan
    if not 0 < number <= LARGEST_TOKENS or number != int(number):
        raise ValueError(f"{wrong}, where {tokens!r} is no whole number of tokens above 0")
    found = weights.split()
    if len(found) != num_corpora:
        raise ValueError(f"{wrong}, where {part.strip()!r} has {len(found)} weights for {num_corpora} corpora")
    return int(tokens) if tokens.isdigit() else int(number), _weights(found, wrong)


def _words(text: str, wrong: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{wrong}: {error}") from error
    if not words or not all(words):
        raise ValueError(f"{wrong}, where a path is empty")
    return words


def _weights(words: Sequence[str], wrong: str) -> tuple[float, ...]:
    for word in words:
        if not _is_number(word) or not 0 <= float(word) < math.inf:
            raise ValueError(f"{wrong}, where the weight {word!r} must be a finite number of at least 0")
    weights = tuple(float(word) for word in words)
    if not 0 < sum(weights) < math.inf:
        raise ValueError(f"{wrong}, where the weights must not all be 0, nor their sum infinite")
    return weights


def _is_number(word: str) -> bool:
    try:
        return not math.isnan(float(word))
    except ValueError:
        return False
