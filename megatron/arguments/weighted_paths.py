"""Corpora in the formats of other trainers: BigScience's weighted split paths, and Megatron's files of paths.

``--train-weighted-split-paths "NAME: 0.3 0:0.95 a, 0.7 0:0.95 b"`` uses the first 95 % of the documents of corpus a
with weight 0.3, and of b with weight 0.7. Two cases can be expressed by our flags: all corpora have the same range
(``--split``), or every range is 0:1 and each split has its own corpora (``--train-data-path`` and the like).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.data import SPLIT_PATH_FIELDS
from megatron.config.data_paths import join_words
from megatron.errors import ConfigError

SPLITS = ("train", "valid", "test")
_RULE = 'must be "NAME: WEIGHT START:END PATH, WEIGHT START:END PATH", such as "train: 0.3 0:0.95 a, 0.7 0:0.95 b"'
_FULL_RANGE = (Fraction(0), Fraction(1))


class WeightedCorpus(NamedTuple):
    """A split's corpus: weight as written, document range, and path."""

    weight: str
    range: tuple[Fraction, Fraction]
    path: str


def paths_of_file(path: str) -> str:
    """Read the words of --data-path from a file.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    words = _read_text("--data-args-path", path).split()
    if not words:
        raise ConfigError(f"--data-args-path must name a file with weights and paths, got {path}, which is empty")
    return join_words(words)


def with_weights(text: str, notes: list[str]) -> str:
    """Add a weight before each path in --data-path if there are several paths and no weights.

    As in Megatron-LM, the weights are proportional to the corpus sizes. If a size is unknown, all weights are
    equal. The weights are added to ``notes``.
    """
    try:
        paths = shlex.split(text)
    except ValueError:
        return text
    if len(paths) < 2 or any(_is_number(path) for path in paths):
        return text
    try:
        file_sizes = [Path(f"{path}.bin").stat().st_size for path in paths]
    except OSError:
        file_sizes = []
    is_known = bool(file_sizes) and all(file_sizes)
    weights = file_sizes if is_known else [1] * len(paths)
    words = [word for weight, path in zip(weights, paths, strict=True) for word in (str(weight), path)]
    shares = ", ".join(f"{path} {weight / sum(weights):.1%}" for weight, path in zip(weights, paths, strict=True))
    rule = "by the sizes of their .bin files" if is_known else "equally, since the size of a .bin file is unknown"
    notes.append(f"paths without weights are weighted {rule}: {shares}")
    return shlex.join(words)


def paths_of_json(path: str) -> dict[str, str]:
    """Read field -> text from a JSON file ``{"train": [...], "valid": [...], "test": [...]}``.

    Raises:
        ConfigError: the file cannot be read, or does not have this form.
    """
    flag = "--per-split-data-args-path"
    try:
        words_of_split = json.loads(_read_text(flag, path))
    except ValueError as error:
        raise ConfigError(f"{flag} must name a JSON file, got {path}: {error}") from error
    if not isinstance(words_of_split, dict) or set(words_of_split) - set(SPLITS):
        raise ConfigError(f"{flag} must name a JSON object with train, valid and test, got {path}")
    return {
        f"{split}_data_path": join_words([str(word) for word in (words if isinstance(words, list) else words.split())])
        for split, words in words_of_split.items()
        if words
    }


def weighted_paths(flag_values: Mapping[str, Any]) -> dict[str, str]:
    """Convert weighted split paths to field -> text: --data-path and --split, or a path for each split.

    Args:
        flag_values: flag -> value. A flag that ends in ``-path`` names a file with the text.

    Raises:
        ConfigError: a file or text cannot be parsed, a split has several groups, or --split cannot express the ranges.
    """
    splits: dict[str, list[WeightedCorpus]] = {}
    for split in SPLITS:
        flag = f"--{split}-weighted-split-paths"
        texts = list(flag_values.get(flag, []))
        if f"{flag}-path" in flag_values:
            texts += shlex.split(_read_text(f"{flag}-path", flag_values[f"{flag}-path"]).replace("'", '"'))
        if texts:
            splits[split] = _parse_corpora(flag, texts)
    if not splits:
        return {}
    if all(corpus.range == _FULL_RANGE for corpora in splits.values() for corpus in corpora):
        return {f"{split}_data_path": _mixture(corpora) for split, corpora in splits.items()}
    return _shared_mixture(splits)


def _parse_corpora(flag: str, texts: list[str]) -> list[WeightedCorpus]:
    text = " ".join(texts)
    message = f"{flag} {_RULE}; got {text!r}"
    name, colon, entries = text.partition(":")
    if not colon or " " in name.strip():
        raise ConfigError(message)
    corpora = []
    for entry in entries.split(","):
        words = entry.split()
        if len(words) != 3:
            is_group = any(word.endswith(":") for word in words)
            hint = ", which has a second group. Evaluate the others with --eval-only --test-data-path"
            raise ConfigError(message + (hint if is_group else ""))
        weight, bounds, path = words
        try:
            start, end = (Fraction(share) for share in bounds.split(":"))
            is_valid = Fraction(weight) >= 0 and 0 <= start < end <= 1
        except (ValueError, ZeroDivisionError):
            is_valid = False
        if not is_valid:
            raise ConfigError(f"{message}, where {entry.strip()!r} is invalid")
        corpora.append(WeightedCorpus(weight, (start, end), path))
    return corpora


def _shared_mixture(splits: Mapping[str, list[WeightedCorpus]]) -> dict[str, str]:
    """Express splits that are adjacent ranges of the same corpora by --data-path and --split."""
    flags = ", ".join(f"--{split}-weighted-split-paths" for split in splits)
    ranges = {split: {corpus.range for corpus in corpora} for split, corpora in splits.items()}
    mixtures = {_mixture(corpora) for corpora in splits.values()}
    bounds = [next(iter(values)) for values in ranges.values()]
    expected_starts = [Fraction(0), *(end for _, end in bounds)]
    is_consecutive = all(
        start == expected_start for (start, _), expected_start in zip(bounds, expected_starts, strict=False)
    )
    if any(len(values) > 1 for values in ranges.values()) or len(mixtures) > 1 or not is_consecutive:
        raise ConfigError(
            f"{flags} must use consecutive ranges, from 0 on, of the same corpora with the same weights, or all "
            "documents of each corpus (0:1), because --split divides all corpora equally. Use separate token files "
            f"with {', '.join('--' + name.replace('_', '-') for name in SPLIT_PATH_FIELDS)}"
        )
    shares = {split: end - start for split, (start, end) in zip(splits, bounds, strict=True)}
    remainder = 1 - bounds[-1][1]
    split_shares = [shares.get(split, Fraction(0)) for split in SPLITS]
    if remainder and "test" not in shares:
        split_shares[2] = remainder
    denominator = math.lcm(*(share.denominator for share in split_shares))
    return {
        "data_path": next(iter(mixtures)),
        "split": ",".join(str(int(share * denominator)) for share in split_shares),
    }


def _mixture(corpora: list[WeightedCorpus]) -> str:
    return join_words([word for corpus in corpora for word in (corpus.weight, corpus.path)])


def _read_text(flag: str, path: str) -> str:
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
