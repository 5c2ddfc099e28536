"""From the corpora that flags name to train/valid/test datasets, with all checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import PurePath

import numpy as np

from megatron import log
from megatron.config import data
from megatron.data import range_cache
from megatron.data.blended_dataset import BlendedDataset, BlendSchedule, Corpus, MegatronDataset, fingerprint_of
from megatron.data.cache import IndexCache
from megatron.data.indexed_dataset import Documents, IndexedDataset, count_of, num_tokens_of
from megatron.data.split import NAMES, split_by_hash, split_documents
from megatron.errors import DataError
from megatron.tokenizer.identity import is_same, parts

# The corpora that a run reads, as its flags name them, and short names to tell them apart in logs and checkpoints.

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
                parsed = data.parse_schedule(self.mixture_schedule, len(corpora))
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


def weighted_prefixes(text: str, flag: str = data.DATA_FLAG) -> tuple[WeightedPath, ...]:
    """Return (weight, prefix) of each corpus; prefixes without .bin and .idx.

    Raises:
        DataError: not one path nor weights and paths in turn, or a path that stands there twice.
    """
    try:
        parsed = data.parse_paths(text, flag)
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


# What can be checked of token files before training starts: rows D02 and D09-D14 of the list of faults.
#
# Each raises ``DataError`` where it fails.

_ENDS_LOOKED_AT = 1000
_REMEMBERED_TOKENS = 1 << 26


def check_one_sample(token_file: IndexedDataset, sample_tokens: int, asked_by: str) -> None:
    """All documents together must hold one sample.

    Args:
        sample_tokens: tokens that a sample takes from the file.
        asked_by: the flag with its value that asks for them, such as "--seq-length 512".
    """
    if token_file.num_tokens < sample_tokens:
        raise DataError(
            f"{token_file.prefix}: all data together is {token_file.num_tokens} tokens; one sample of {asked_by} needs "
            f"{sample_tokens}. Shorten {asked_by.split()[0]} or give more data."
        )


def check_splits(
    token_file: IndexedDataset,
    splits: Sequence[Documents],
    needed: Sequence[bool],
    flags: str,
    sample_tokens: int,
    asked_by: str,
) -> None:
    """Each split that is needed must hold one sample.

    Args:
        splits: the documents of train, valid and test.
        flags: what cut them, such as "--split 949,50,1".
        others: as ``check_one_sample``.
    """
    for name, documents, is_needed in zip(NAMES, splits, needed, strict=True):
        if not is_needed:
            continue
        num_tokens = num_tokens_of(token_file.sizes, documents)
        if num_tokens < sample_tokens:
            raise DataError(
                f"the {name} split must have at least one sample of {sample_tokens} tokens, got "
                f"{count_of(documents)} of {token_file.num_documents} documents with {num_tokens} tokens ({flags}, "
                f"{asked_by}, {token_file.prefix}). Give {name} a larger part of --split, shorten "
                f"{asked_by.split()[0]}, give more data, or turn off what uses it (--eval-interval 0, --eval-iters 0)."
            )


def check_tokenizer(token_file: IndexedDataset, identity: str | None) -> None:
    """The data must have been built with the tokenizer of this ``identity``, where both are known."""
    built_with = token_file.sidecar.tokenizer if token_file.sidecar else None
    if built_with and identity and not is_same(built_with, identity):
        log.debug(f"tokenizer identity of {token_file.prefix}: {built_with}; now: {identity}")
        raise DataError(
            f"{token_file.prefix} was built with another tokenizer than the one given. Name the tokenizer of the data, "
            "or build the data again with tools/preprocess_data.py."
        )


def check_token_ids(token_file: IndexedDataset, vocab_size: int, cache: IndexCache) -> None:
    """Every token id must be in the vocabulary. ``cache`` keeps that those of a large file without sidecar are."""
    highest = token_file.max_token_id
    if highest is not None and highest < vocab_size:
        return
    if highest is None and _are_known_to_fit(token_file, vocab_size, cache):
        return
    found = token_file.first_outside(vocab_size)
    if found is None:
        return
    document, offset, token = found
    raise DataError(
        f"token ids must be in 0 ... {vocab_size - 1} (the vocabulary), got {token} in document {document} at token "
        f"{offset}, byte {token_file.byte_offset(document, offset)} of {token_file.token_path}. "
        "The data was built with another tokenizer: give that one, or build the data again."
    )


def _are_known_to_fit(token_file: IndexedDataset, vocab_size: int, cache: IndexCache) -> bool:
    """Return whether all ids of a file without sidecar are in the vocabulary; a large one is read once on a host."""

    def look() -> np.ndarray:
        log.info(f"{token_file.prefix} has no .meta.json: looking once at all {token_file.num_tokens} token ids")
        return np.array([token_file.first_outside(vocab_size) is None], np.uint8)

    if token_file.num_tokens < _REMEMBERED_TOKENS:
        return bool(look()[0])
    changed_ns = token_file.changed_ns  # the fingerprint of a large file is that of parts of it
    name = f"ids-{token_file.fingerprint}-{changed_ns}-{vocab_size}"
    return bool(cache.array(name, look, outlives_boot=True)[0])


def check_same_eod(token_file: IndexedDataset, eod_id: int | None) -> None:
    """Check that documents end with the tokenizer's end-of-document token, as far as the sidecar says.

    Raises:
        DataError: If they end with another token.
    """
    sidecar = token_file.sidecar
    if sidecar is None or not sidecar.has_eod or sidecar.eod_id is None or eod_id is None or sidecar.eod_id == eod_id:
        return
    raise DataError(
        f"the documents of {token_file.prefix} end with the token of id {sidecar.eod_id}, but the end-of-document "
        f"token of the tokenizer has id {eod_id}. Name the token of id {sidecar.eod_id} with --eod-token, or build "
        "the data again."
    )


def check_eod(token_file: IndexedDataset, eod_id: int | None, flags: str) -> None:
    """Check that documents end with the end-of-document token, which ``flags`` need.

    Raises:
        DataError: If they do not, or end with another token.
    """
    check_same_eod(token_file, eod_id)
    if eod_id is None:
        raise DataError(f"{flags} need an end-of-document token, the tokenizer has none")
    has_eod = token_file.has_eod
    if has_eod is None:
        filled = np.flatnonzero(token_file.sizes)[:_ENDS_LOOKED_AT]
        ends = (token_file.read(int(document))[-1] for document in filled)
        has_eod = all(int(end) == eod_id for end in ends)
    if not has_eod:
        raise DataError(
            f"{flags} need documents that end with the end-of-document token (id {eod_id}); those of "
            f"{token_file.prefix} do not. Build the data again without --no-append-eod, or leave the flags out."
        )


# From the corpora that flags name to the samples of training, validation and test: what both models share.

Three = tuple[BlendedDataset | None, BlendedDataset | None, BlendedDataset | None]


@dataclass(frozen=True)
class OpenCorpus:
    """A corpus whose files are open and checked.

    ``content`` is the fingerprint of its files. ``make`` returns the samples of some of its documents; its second
    argument are the ``draws`` of ``T5Dataset``, "" for a corpus that is alone. A sample takes ``sample_tokens`` tokens
    of ``token_file``, as ``asked_by`` (a flag with its value) wants it. ``is_drawn`` as in ``Corpus``.
    """

    token_file: IndexedDataset
    content: str
    make: Callable[[Documents, str], MegatronDataset]
    sample_tokens: int
    asked_by: str
    is_drawn: bool


def build_datasets(
    paths: BlendPaths,
    needed: Sequence[bool],
    open_corpus: Callable[[str, IndexCache], OpenCorpus],
    tokenizer_identity: str | None,
    tokens_per_sample: Callable[[Sequence[MegatronDataset]], int],
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    A corpus of weight 0 is left out of an evaluation. In training it stays: its cursor goes on, and a schedule or a
    resumed run may give it weight.

    Args:
        open_corpus: from a prefix, and what keeps its order for the other processes of this host.
        tokens_per_sample: those that a schedule of the mixture counts, from the samples of the corpora.

    Raises:
        DataError: a corpus cannot be opened, is listed twice, or holds less than one sample in a needed split.
    """
    train, *evaluated = paths.corpora(needed)
    wanted, cache = (
        [train, *map(_with_weight, evaluated)],
        IndexCache(paths.cache_path, paths.objects_path, paths.objects_bytes),
    )
    opened = {
        prefix: open_corpus(prefix, cache)
        for prefix in dict.fromkeys(prefix for corpora in wanted for _, prefix in corpora or ())
    }
    documents = {
        prefix: _documents(corpus, paths, [prefix in map(itemgetter(1), corpora or ()) for corpora in wanted], cache)
        for prefix, corpus in opened.items()
    }

    def split(number: int) -> BlendedDataset | None:
        corpora = wanted[number]
        if corpora is None:
            return None
        files = [opened[prefix] for _, prefix in corpora]
        parts = [
            corpus.make(documents[prefix][number], corpus.content if len(corpora) > 1 else "")
            for corpus, (_, prefix) in zip(files, corpora, strict=True)
        ]
        length = tokens_per_sample(parts)
        schedule = paths.schedule(length) if number == 0 else [(0, tuple(weight for weight, _ in corpora))]
        return _mixed(corpora, files, parts, schedule, tokenizer_identity)

    return split(0), split(1), split(2)


def _with_weight(corpora: tuple[WeightedPath, ...] | None) -> tuple[WeightedPath, ...] | None:
    return corpora and tuple((weight, prefix) for weight, prefix in corpora if weight)


def _documents(corpus: OpenCorpus, paths: BlendPaths, needed: Sequence[bool], cache: IndexCache) -> list[Documents]:
    """Return the documents of the three splits; ``needed`` are those that read this corpus."""
    token_file = corpus.token_file
    check_one_sample(token_file, corpus.sample_tokens, corpus.asked_by)
    if paths.are_apart:
        return [(0, token_file.num_documents)] * 3
    flags, documents = f"--split {paths.split}", list[Documents]()
    if paths.split_by == "hash":
        flags += " --split-by hash"
        documents += split_by_hash(token_file, paths.split, cache)
    else:
        documents += split_documents(token_file.num_documents, paths.split)
    check_splits(token_file, documents, needed, flags, corpus.sample_tokens, corpus.asked_by)
    return documents


def _mixed(
    corpora: Sequence[WeightedPath],
    opened: Sequence[OpenCorpus],
    parts: Sequence[MegatronDataset],
    schedule: Sequence[tuple[int, tuple[float, ...]]],
    tokenizer_identity: str | None,
) -> BlendedDataset:
    names = short_names([prefix for _, prefix in corpora])
    known = [
        Corpus(
            name,
            fingerprint_of(corpus.content, _tokenizer(corpus, tokenizer_identity), part.fingerprint),
            part.samples_per_epoch,
            corpus.is_drawn,
            corpus.token_file.num_documents,
            corpus.token_file.num_tokens,
            tuple(
                fingerprint_of(corpus.content, identity, part.fingerprint)
                for identity in _tokenizer_parts(corpus, tokenizer_identity)
            ),
        )
        for name, corpus, part in zip(names, opened, parts, strict=True)
    ]
    return BlendedDataset(dict(zip(names, parts, strict=True)), BlendSchedule(known, schedule))


def _tokenizer(corpus: OpenCorpus, given: str | None) -> str | None:
    sidecar = corpus.token_file.sidecar
    return given or (sidecar.tokenizer if sidecar else None)


def _tokenizer_parts(corpus: OpenCorpus, given: str | None) -> list[str]:
    """Return the digests by which a checkpoint may know the tokenizer of a corpus."""
    sidecar = corpus.token_file.sidecar
    known = (given, sidecar.tokenizer if sidecar else None)
    return [part for identity in known if identity for part in parts(identity)]
