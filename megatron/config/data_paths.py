"""Parse the weights in ``--data-path``, and ``--mixture-schedule``.

| text | meaning |
|---|---|
| "a" | one corpus |
| "0.7 a 0.3 b" | two corpora and their sample shares; only the ratio of weights matters |
| "1e9: 0.5 0.5; 2e9: 0.2 0.8" | a schedule: new weights after 1e9 and 2e9 tokens, in the order of the paths |

Words are split as in a shell, so a path that contains a space must be quoted. A weight may be 0: the corpus is not
sampled until a schedule changes its weight.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

DATA_FLAG = "--data-path"
SCHEDULE_FLAG = "--mixture-schedule"
MAX_TOKENS = 2**62
"""Maximum number of tokens, which are counted in 64 bits."""
_PATHS_RULE = "must be one path, or alternating weights and paths, such as 0.7 a 0.3 b"
_SCHEDULE_RULE = 'must be entries "TOKENS: WEIGHTS" separated by semicolons, such as "1e9: 0.5 0.5; 2e9: 0.2 0.8"'


def parse_paths(text: str, flag: str = DATA_FLAG) -> tuple[tuple[float, str], ...]:
    """Parse (weight, path) for each corpus; a single path without a weight has weight 1.

    Raises:
        ValueError: the text has another form, or repeats a path; the message names ``flag``.
    """
    message = f"{flag} {_PATHS_RULE}; got {text!r}"
    words = _split_words(text, message)
    if len(words) == 1:
        return ((1.0, words[0]),)
    if len(words) % 2:
        raise ValueError(f"{message}, {len(words)} words. Add a weight before each path, and quote paths with spaces")
    weights = _parse_weights(words[::2], message)
    paths = words[1::2]
    repeated = next((path for path in paths if paths.count(path) > 1), None)
    if repeated is not None:
        raise ValueError(
            f"{message}, which contains {repeated} more than once. List it once, with the sum of its weights"
        )
    return tuple(zip(weights, paths, strict=True))


def parse_schedule(text: str, num_corpora: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Parse a mixture schedule into (tokens, weights) steps, in increasing order of tokens.

    Raises:
        ValueError: the text has another form, tokens do not increase, or the weight count is not ``num_corpora``.
    """
    message = f"{SCHEDULE_FLAG} {_SCHEDULE_RULE}; got {text!r}"
    steps = [_parse_entry(entry, num_corpora, message) for entry in text.split(";") if entry.strip()]
    if not steps:
        raise ValueError(f"{message}, which has no entry. Add one, or remove the flag")
    for (before, _), (after, _) in zip(steps, steps[1:], strict=False):
        if before >= after:
            raise ValueError(
                f"{message}, where {after} tokens follow {before}. List the entries in increasing order of tokens"
            )
    return tuple(steps)


def join_words(words: Sequence[str]) -> str:
    """Join the words after a flag into one text; a single word may already contain all of them."""
    return quote_path(words[0]) if len(words) == 1 else shlex.join(words)


def quote_path(path: str) -> str:
    """Quote ``path`` if it would not be parsed as one path. A text with weights and paths is returned unchanged."""
    try:
        words = shlex.split(path)
    except ValueError:
        return shlex.quote(path)
    is_mixture = len(words) > 1 and _is_number(words[0])
    return path if words == [path] or is_mixture else shlex.quote(path)


def _parse_entry(entry: str, num_corpora: int, message: str) -> tuple[int, tuple[float, ...]]:
    tokens, colon, weights = (text.strip() for text in entry.partition(":"))
    if not colon:
        raise ValueError(f"{message}, where {entry.strip()!r} has no colon")
    num_tokens = float(tokens) if _is_number(tokens) else math.nan
    if not 0 < num_tokens <= MAX_TOKENS or num_tokens != int(num_tokens):
        raise ValueError(f"{message}, where {tokens!r} is not a positive whole number of tokens")
    words = weights.split()
    if len(words) != num_corpora:
        raise ValueError(f"{message}, where {entry.strip()!r} has {len(words)} weights for {num_corpora} corpora")
    return int(tokens) if tokens.isdigit() else int(num_tokens), _parse_weights(words, message)


def _split_words(text: str, message: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{message}: {error}") from error
    if not words or not all(words):
        raise ValueError(f"{message}, which contains an empty path")
    return words


def _parse_weights(words: Sequence[str], message: str) -> tuple[float, ...]:
    for word in words:
        if not _is_number(word) or not 0 <= float(word) < math.inf:
            raise ValueError(f"{message}, where the weight {word!r} is not a finite number of at least 0")
    weights = tuple(float(word) for word in words)
    if not 0 < sum(weights) < math.inf:
        raise ValueError(f"{message}, where the weights are all 0 or their sum is infinite")
    return weights


def _is_number(word: str) -> bool:
    try:
        return not math.isnan(float(word))
    except ValueError:
        return False
