"""BlendPaths: the corpora that the flags name, with short names for logs and errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megatron.config import data_paths
from megatron.data import range_cache
from megatron.data.split import NAMES
from megatron.errors import DataError

WeightedPath = tuple[float, str]
_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True, kw_only=True)
class BlendPaths:
    """Where the three splits are read, how a corpus is cut into them, and how files are read.

    Either ``data_path`` is given, whose corpora are each cut by ``split``, or some of the three others, whose corpora
    are read whole. A path is one prefix, or weights and prefixes in turn: "0.7 a 0.3 b".

    Args:
        split_by: "range" of documents, or "hash" of their tokens.
        data_impl: "mmap" or "pread".
        cache_path: folder of this host for what can be computed again; None: one below the system's temporary folder.
        objects_path: folder of this host for what is read from object stores; None: below ``cache_path``.
        objects_bytes: how much of that is kept at most.
        mixture_schedule: weights of training that change, "1e9: 0.5 0.5; 2e9: 0.2 0.8" (tokens: weights).
    """

    data_path: str | None = None
    train_data_path: str | None = None
    valid_data_path: str | None = None
    test_data_path: str | None = None
    split: str = "949,50,1"
    split_by: str = "range"
    data_impl: str = "mmap"
    cache_path: str | None = None
    objects_path: str | None = None
    objects_bytes: int = range_cache.DEFAULT_BYTES
    mixture_schedule: str | None = None

    @property
    def are_apart(self) -> bool:
        """Whether each split has corpora of its own, which are read whole."""
        return any(getattr(self, f"{name}_data_path") for name in NAMES)

    def corpora(self, needed: Sequence[bool]) -> list[tuple[WeightedPath, ...] | None]:
        """Return (weight, prefix) of the corpora of train, valid and test; None for a split that is not needed.

        Raises:
            DataError: none given where one is needed, --data-path beside the others, or a path that cannot be used.
        """
        if self.data_path and self.are_apart:
            raise DataError(
                f"--data-path (cut by --split) and --train-data-path, --valid-data-path, --test-data-path (each read "
                f"whole) exclude each other, got --data-path {self.data_path} beside one of them. Leave out one kind."
            )
        if not self.are_apart:
            corpora = weighted_prefixes(_given(self.data_path))
            return [corpora if is_needed else None for is_needed in needed]
        return [self._own(name) if is_needed else None for name, is_needed in zip(NAMES, needed, strict=True)]

    def schedule(self, tokens_per_sample: int) -> list[tuple[int, tuple[float, ...]]]:
        """Return (first sample, weights) of each step of training's mixture: those of the path, then the schedule's.

        A step starts with the first sample that begins after so many tokens.

        Raises:
            DataError: not such a text, or another number of weights than corpora.
        """
        corpora = self.corpora((True, False, False))[0] or ()
        steps = [(0, tuple(weight for weight, _ in corpora))]
        if self.mixture_schedule:
            try:
                parsed = data_paths.parse_schedule(self.mixture_schedule, len(corpora))
            except ValueError as error:
                raise DataError(str(error)) from error
            steps += [(-(-tokens // tokens_per_sample), weights) for tokens, weights in parsed]
        return steps

    def _own(self, name: str) -> tuple[WeightedPath, ...]:
        flag = f"--{name}-data-path"
        text = getattr(self, f"{name}_data_path")
        if not text:
            off = "Give it too" if name == "train" else "Give it too, or turn off what uses it (--eval-iters 0)"
            raise DataError(f"{flag} must name token files where others of its kind are given, got none. {off}.")
        return weighted_prefixes(text, flag)


def weighted_prefixes(text: str, flag: str = data_paths.DATA_FLAG) -> tuple[WeightedPath, ...]:
    """Return (weight, prefix) of each corpus; prefixes without .bin and .idx.

    Raises:
        DataError: not one path nor weights and paths in turn, or a path that stands there twice.
    """
    try:
        parsed = data_paths.parse_paths(text, flag)
    except ValueError as error:
        raise DataError(str(error)) from error
    corpora = tuple((weight, _without_suffix(path)) for weight, path in parsed)
    seen: dict[str, str] = {}
    for _, path in corpora:
        place = os.path.realpath(path)
        if place in seen:
            raise DataError(
                f"{flag} must name each corpus once, got {seen[place]} and {path}, which are one. Give it once, with "
                "the sum of its weights."
            )
        seen[place] = path
    return corpora


def short_names(prefixes: Sequence[str]) -> list[str]:
    """Return for each prefix the last parts of its path that no other one ends with: "a/x" and "b/x", but "y"."""
    parts = [PurePath(prefix).parts for prefix in prefixes]
    return [_shortest(own, [other for place, other in enumerate(parts) if place != at]) for at, own in enumerate(parts)]


def _shortest(own: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    for count in range(1, len(own) + 1):
        if all(other[-count:] != own[-count:] for other in others):
            return str(PurePath(*own[-count:]))
    return str(PurePath(*own))


def _given(data_path: str | None) -> str:
    if not data_path:
        raise DataError(
            "--data-path must name token files (their path without .bin and .idx), got none. "
            "tools/preprocess_data.py makes them; tools/make_sample_data.py makes a small set to try."
        )
    return data_path


def _without_suffix(path: str) -> str:
    for suffix in _SUFFIXES:
        path = path.removesuffix(suffix)
    return path
