"""Corpora in the forms of other trainers: BigScience's weighted split paths, and Megatron's files of paths.

``--train-weighted-split-paths "NAME: 0.3 0:0.95 a, 0.7 0:0.95 b"`` takes of each corpus the documents between two
shares. Here ``--split`` cuts all corpora alike, so the ranges of a split must be the same for all of its corpora; or
each range is 0:1, and the splits have corpora of their own.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.data import EACH
from megatron.config.data_paths import join_words
from megatron.errors import ConfigError

SPLITS = ("train", "valid", "test")
_RULE = 'must be "NAME: WEIGHT START:END PATH, WEIGHT START:END PATH", such as "train: 0.3 0:0.95 a, 0.7 0:0.95 b"'
_WHOLE = (Fraction(0), Fraction(1))


class Part(NamedTuple):
    """One corpus of a split: its weight as it was written, the range of its documents, and its path."""

    weight: str
    range: tuple[Fraction, Fraction]
    path: str


def paths_of_file(path: str) -> str:
    """Return the text of --data-path from a file that holds its words.

    Raises:
        ConfigError: the file cannot be read, or holds nothing.
    """
    words = _text("--data-args-path", path).split()
    if not words:
        raise ConfigError(f"--data-args-path must name a file with weights and paths, got {path}, which is empty")
    return join_words(words)


def with_weights(text: str, notes: list[str]) -> str:
    """Return the text of --data-path with a weight before each path if it contains several paths and no weights.

    As in Megatron-LM, the weights are proportional to the sizes of the corpora. Paths are weighted equally if the size
    of one of them is unknown; ``notes`` states the weights.
    """
    try:
        paths = shlex.split(text)
    except ValueError:
        return text
    if len(paths) < 2 or any(_is_number(path) for path in paths):
        return text
    try:
        sizes = [Path(f"{path}.bin").stat().st_size for path in paths]
    except OSError:
        sizes = []
    is_known = bool(sizes) and all(sizes)
    weights = sizes if is_known else [1] * len(paths)
    words = [word for weight, path in zip(weights, paths, strict=True) for word in (str(weight), path)]
    shares = ", ".join(f"{path} {weight / sum(weights):.1%}" for weight, path in zip(weights, paths, strict=True))
    rule = "by the sizes of their .bin files" if is_known else "equally, since the size of a .bin file is unknown"
    notes.append(f"paths without weights are mixed {rule}: {shares}")
    return shlex.join(words)


def paths_of_json(path: str) -> dict[str, str]:
    """Return field -> text from a JSON file ``{"train": [...], "valid": [...], "test": [...]}``.

    Raises:
        ConfigError: the file cannot be read, or is no such JSON.
    """
    flag = "--per-split-data-args-path"
    try:
        parts = json.loads(_text(flag, path))
    except ValueError as error:
        raise ConfigError(f"{flag} must name a JSON file, got {path}: {error}") from error
    if not isinstance(parts, dict) or set(parts) - set(SPLITS):
        raise ConfigError(f"{flag} must name a JSON object with train, valid and test, got {path}")
    return {
        f"{split}_data_path": join_words([str(word) for word in (words if isinstance(words, list) else words.split())])
        for split, words in parts.items()
        if words
    }


def weighted_paths(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return field -> text for the flags of weighted split paths: --data-path and --split, or a path for each split.

    Args:
        asked: flag -> value; of those with ``-path`` behind, the name of a file that holds the text.

    Raises:
        ConfigError: a file or a text cannot be read, several groups of a split, or ranges that --split cannot say.
    """
    splits: dict[str, list[Part]] = {}
    for split in SPLITS:
        flag = f"--{split}-weighted-split-paths"
        texts = list(asked.get(flag, []))
        if f"{flag}-path" in asked:
            texts += shlex.split(_text(f"{flag}-path", asked[f"{flag}-path"]).replace("'", '"'))
        if texts:
            splits[split] = _parts(flag, texts)
    if not splits:
        return {}
    if all(part.range == _WHOLE for parts in splits.values() for part in parts):
        return {f"{split}_data_path": _mixture(parts) for split, parts in splits.items()}
    return _one_mixture(splits)


def _parts(flag: str, texts: list[str]) -> list[Part]:
    text = " ".join(texts)
    wrong = f"{flag} {_RULE}; got {text!r}"
    name, colon, rest = text.partition(":")
    if not colon or " " in name.strip():
        raise ConfigError(wrong)
    parts = []
    for piece in rest.split(","):
        words = piece.split()
        if len(words) != 3:
            is_group = any(word.endswith(":") for word in words)
            several = ", where a second group begins. Evaluate the others by --eval-only --test-data-path"
            raise ConfigError(wrong + (several if is_group else ""))
        weight, between, path = words
        try:
            start, end = (Fraction(share) for share in between.split(":"))
            good = Fraction(weight) >= 0 and 0 <= start < end <= 1
        except (ValueError, ZeroDivisionError):
            good = False
        if not good:
            raise ConfigError(f"{wrong}, where {piece.strip()!r} is none of these")
        parts.append(Part(weight, (start, end), path))
    return parts


def _one_mixture(splits: Mapping[str, list[Part]]) -> dict[str, str]:
    """Return --data-path and --split where the splits are neighbouring ranges of the same corpora."""
    flags = ", ".join(f"--{split}-weighted-split-paths" for split in splits)
    ranges = {split: {part.range for part in parts} for split, parts in splits.items()}
    mixtures = {_mixture(parts) for parts in splits.values()}
    bounds = [next(iter(found)) for found in ranges.values()]
    follow = [Fraction(0), *(end for _, end in bounds)]
    is_row = all(start == before for (start, _), before in zip(bounds, follow, strict=False))
    if any(len(found) > 1 for found in ranges.values()) or len(mixtures) > 1 or not is_row:
        raise ConfigError(
            f"{flags} must take the same ranges of the same corpora with the same weights, one behind the other from "
            "0 on, or all documents of each (0:1), got others: --split cuts all corpora alike. Give "
            f"{', '.join('--' + name.replace('_', '-') for name in EACH)} token files of their own"
        )
    shares = {split: end - start for split, (start, end) in zip(splits, bounds, strict=True)}
    rest = 1 - bounds[-1][1]
    each = [shares.get(split, Fraction(0)) for split in SPLITS]
    if rest and "test" not in shares:
        each[2] = rest
    whole = math.lcm(*(share.denominator for share in each))
    return {"data_path": next(iter(mixtures)), "split": ",".join(str(int(share * whole)) for share in each)}


def _mixture(parts: list[Part]) -> str:
    return join_words([word for part in parts for word in (part.weight, part.path)])


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} must name a text file that can be read, got {path} ({error}). Correct the path"
        ) from error


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
