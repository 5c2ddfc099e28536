"""BlendPaths: the corpora given on the command line, and short names for them in logs and errors."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megatron import log
from megatron.config import data_paths
from megatron.config.data import is_text_corpus
from megatron.data import range_cache
from megatron.data.cache import IndexCache
from megatron.data.growing_tokens import GrowingTokens
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.split import SPLIT_NAMES, has_one_share
from megatron.data.text_corpus import TextCorpus, TextSettings
from megatron.errors import DataError

WeightedPath = tuple[float, str]
_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True, kw_only=True)
class BlendPaths:
    """Corpora for the three splits, and the options for splitting and reading them.

    The corpora in ``data_path`` are each divided by ``split``. The corpora in ``train_data_path``, ``valid_data_path``
    and ``test_data_path`` are not divided. Only one of the two forms may be used. A path is a single prefix, or
    alternating weights and prefixes: "0.7 a 0.3 b".

    Args:
        split_by: "range" (of documents) or "hash" (of their tokens).
        data_impl: "mmap" or "pread".
        cache_path: host-local folder for indices that can be recomputed; None: a subfolder of the system's temporary
            folder.
        objects_path: host-local folder for data read from object stores; None: a subfolder of ``cache_path``.
        objects_bytes: maximum data size in ``objects_path``.
        mixture_schedule: changes to the training weights, "1e9: 0.5 0.5; 2e9: 0.2 0.8" (tokens: weights).
        order: sample order, "native" or "megatron" (decoders only).
        surplus: fraction of samples by which Megatron's order exceeds each corpus's share in a blend.
        exclude: file with documents that have no loss (``megatron.data.exclusion``); decoders only.
        text: how text corpora are encoded; None: only token files are read.
        shuffle_window: samples per window within which samples are shuffled; 0: an epoch is shuffled.
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
    order: str = "native"
    surplus: float = 0.005
    exclude: str | None = None
    text: TextSettings | None = None
    shuffle_window: int = 0

    def open_token_file(self, prefix: str, cache: IndexCache) -> IndexedDataset:
        """Open the token files ``prefix``. If ``prefix`` is text, wait until it is encoded.

        Raises:
            DataError: the files are missing or damaged, or the text cannot be encoded.
        """
        if self.text is not None and is_text_corpus(prefix):
            return TextCorpus(prefix, self.text).open(self.data_impl, cache)
        return IndexedDataset(prefix, reader=self.data_impl, cache=cache)

    def open_growing_tokens(self, prefix: str, cache: IndexCache) -> GrowingTokens | None:
        """Open text whose samples can be read while it is encoded; None if ``prefix`` must be encoded first.

        The samples of a window must not depend on text that follows it: there is a shuffle window, and no --split by
        position, which needs the number of documents, as ``exclude`` and Megatron's order do.

        Raises:
            DataError: the text cannot be read.
        """
        needs_all_documents = self.exclude is not None or self.order != "native"
        if self.text is None or not self.shuffle_window or needs_all_documents or not is_text_corpus(prefix):
            return None
        if not (self.has_separate_splits or self.split_by == "hash" or has_one_share(self.split)):
            log.info(
                f"{prefix}: training starts when the text is encoded, because --split {self.split} by position needs "
                "the number of documents; --split-by hash, or separate paths (--train-data-path, --valid-data-path), "
                "let it start earlier"
            )
            return None
        return GrowingTokens(TextCorpus(prefix, self.text), self.data_impl, cache)

    @property
    def has_separate_splits(self) -> bool:
        """True if the splits have separate corpora, which are not divided."""
        return any(getattr(self, f"{name}_data_path") for name in SPLIT_NAMES)

    def corpora(self, needed: Sequence[bool]) -> list[tuple[WeightedPath, ...] | None]:
        """Parse (weight, prefix) for each training, validation and test corpus; None for a split that is not needed.

        Raises:
            DataError: a needed path is missing, --data-path is combined with other paths, or a path is invalid.
        """
        if self.data_path and self.has_separate_splits:
            raise DataError(
                f"--data-path {self.data_path} (divided by --split) cannot be combined with --train-data-path, "
                "--valid-data-path or --test-data-path (not divided). Remove --data-path or the other flags."
            )
        if not self.has_separate_splits:
            corpora = weighted_prefixes(_require_data_path(self.data_path))
            return [corpora if is_needed else None for is_needed in needed]
        return [
            self._split_corpora(name) if is_needed else None
            for name, is_needed in zip(SPLIT_NAMES, needed, strict=True)
        ]

    @property
    def is_blend(self) -> bool:
        """True if Megatron blends the corpora in --data-path: several, or a single corpus with a weight."""
        return self.data_path is not None and len(shlex.split(self.data_path)) > 1

    def schedule(self, tokens_per_sample: int) -> list[tuple[int, tuple[float, ...]]]:
        """Convert the training mixture to phases: (first sample, weights).

        The first phase has the path's weights; the phases in ``mixture_schedule`` follow. A phase starts with the
        first sample that begins at or after the phase's number of tokens.

        Raises:
            DataError: the schedule is malformed, or its weight count differs from the corpus count.
        """
        corpora = self.corpora((True, False, False))[0] or ()
        phases = [(0, tuple(weight for weight, _ in corpora))]
        if self.mixture_schedule:
            try:
                parsed = data_paths.parse_schedule(self.mixture_schedule, len(corpora))
            except ValueError as error:
                raise DataError(str(error)) from error
            phases += [(-(-tokens // tokens_per_sample), weights) for tokens, weights in parsed]
        return phases

    def _split_corpora(self, name: str) -> tuple[WeightedPath, ...]:
        """Parse the corpora for split ``name`` from its own flag, or raise DataError if the flag is not set."""
        flag = f"--{name}-data-path"
        text = getattr(self, f"{name}_data_path")
        if not text:
            fix = "Add it" if name == "train" else "Add it, or disable the evaluation that needs it (--eval-iters 0)"
            raise DataError(f"{flag} must name token files because other splits have their own, got none. {fix}.")
        return weighted_prefixes(text, flag)


def weighted_prefixes(text: str, flag: str = data_paths.DATA_FLAG) -> tuple[WeightedPath, ...]:
    """Parse (weight, prefix) for each corpus; prefixes have no .bin or .idx suffix.

    Raises:
        DataError: ``text`` is neither a path nor alternating weights and paths, or it contains a path twice.
    """
    try:
        parsed = data_paths.parse_paths(text, flag)
    except ValueError as error:
        raise DataError(str(error)) from error
    corpora = tuple((weight, _strip_suffix(path)) for weight, path in parsed)
    seen: dict[str, str] = {}
    for _, path in corpora:
        real_path = os.path.realpath(path)
        if real_path in seen:
            raise DataError(
                f"{flag} must name each corpus once, got {seen[real_path]} and {path}, which are the same files. Name "
                "the corpus once, with the sum of its weights."
            )
        seen[real_path] = path
    return corpora


def short_names(prefixes: Sequence[str]) -> list[str]:
    """Shorten each prefix to a unique path suffix: "a/x" and "b/x", but "y"."""
    paths = [PurePath(prefix).parts for prefix in prefixes]
    return [
        _shortest_suffix(path, [other for idx, other in enumerate(paths) if idx != path_idx])
        for path_idx, path in enumerate(paths)
    ]


def _shortest_suffix(path: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    """Find the shortest suffix of ``path`` that no path in ``others`` ends with."""
    for num_components in range(1, len(path) + 1):
        if all(other[-num_components:] != path[-num_components:] for other in others):
            return str(PurePath(*path[-num_components:]))
    return str(PurePath(*path))


def _require_data_path(data_path: str | None) -> str:
    """Return ``data_path``, or raise DataError if it is not set."""
    if not data_path:
        raise DataError(
            "--data-path must name token files (their path without .bin and .idx), got none. "
            "Create them with tools/preprocess_data.py, or a small sample with tools/make_sample_data.py."
        )
    return data_path


def _strip_suffix(path: str) -> str:
    for suffix in _SUFFIXES:
        path = path.removesuffix(suffix)
    return path
