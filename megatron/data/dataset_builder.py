"""Build the training, validation and test datasets from corpora."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from megatron.data.blend_paths import BlendPaths, WeightedPath, short_names
from megatron.data.blend_resume import make_fingerprint
from megatron.data.blend_schedule import BlendSchedule, Corpus
from megatron.data.blended_dataset import BlendedDataset, MegatronDataset
from megatron.data.cache import IndexCache
from megatron.data.dataset_checks import check_one_sample, check_splits
from megatron.data.documents import Documents
from megatron.data.exclusion import Exclusion, digest_of
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.growing_tokens import GrowingTokens, StreamedSplit
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.split import split_by_hash, split_documents
from megatron.errors import DataError
from megatron.tokenizer.identity import parts

SplitDatasets = tuple[BlendedDataset | None, BlendedDataset | None, BlendedDataset | None]


@dataclass(frozen=True)
class OpenCorpus:
    """A corpus whose files are open and checked.

    Args:
        content: file fingerprint.
        make_dataset: (documents or streamed split, draws) -> the dataset of these documents; ``draws`` is as in
            ``GPTDataset``, and "" if the split has only one corpus.
        sample_tokens: ``token_file`` tokens that one sample needs.
        length_flag: the flag and value that determine ``sample_tokens``, for error messages.
        has_random_draws: see ``Corpus``.
    """

    token_file: IndexedDataset | GrowingTokens
    content: str
    make_dataset: Callable[[Any, str], MegatronDataset]
    sample_tokens: int
    length_flag: str
    has_random_draws: bool

    @property
    def finished_file(self) -> IndexedDataset:
        """``token_file``, which is not text that is still being encoded."""
        assert not isinstance(self.token_file, GrowingTokens)
        return self.token_file


def build_datasets(
    paths: BlendPaths,
    needed: Sequence[bool],
    open_corpus: Callable[[str, IndexCache], OpenCorpus],
    tokenizer_identity: str | None,
    tokens_per_sample: Callable[[Sequence[MegatronDataset]], int],
) -> SplitDatasets:
    """Build the training, validation and test datasets; None for a split that is not needed.

    Evaluation splits skip corpora with weight 0. The training split retains them, together with their cursors, because
    a mixture schedule or a resumed run may assign them a weight later.

    Args:
        open_corpus: (prefix, cache) -> the opened corpus; ``cache`` shares the corpus's index with the other processes
            on this host.
        tokens_per_sample: computes the tokens per sample from the corpora's datasets; a mixture schedule, which
            is given in tokens, is converted to samples with it.

    Raises:
        DataError: a corpus cannot be opened, is listed twice, or has less than one sample in a needed split.
    """
    train, *evaluation = paths.corpora(needed)
    corpora_by_split, cache = (
        [train, *map(_drop_zero_weights, evaluation)],
        IndexCache(paths.cache_path, paths.objects_path, paths.objects_bytes),
    )
    opened = {
        prefix: open_corpus(prefix, cache)
        for prefix in dict.fromkeys(prefix for corpora in corpora_by_split for _, prefix in corpora or ())
    }
    documents = {
        prefix: _split_corpus(
            corpus, paths, [prefix in map(itemgetter(1), corpora or ()) for corpora in corpora_by_split], cache
        )
        for prefix, corpus in opened.items()
    }

    excluded = read_excluded(paths, opened)

    def build_split(split_idx: int) -> BlendedDataset | None:
        corpora = corpora_by_split[split_idx]
        if corpora is None:
            return None
        open_corpora = [opened[prefix] for _, prefix in corpora]
        datasets = [
            corpus.make_dataset(documents[prefix][split_idx], corpus.content if len(corpora) > 1 else "")
            for corpus, (_, prefix) in zip(open_corpora, corpora, strict=True)
        ]
        num_sample_tokens = tokens_per_sample(datasets)
        schedule = (
            paths.schedule(num_sample_tokens) if split_idx == 0 else [(0, tuple(weight for weight, _ in corpora))]
        )
        exclusion = exclude_documents(datasets, [prefix for _, prefix in corpora], excluded)
        return _blend(corpora, open_corpora, datasets, schedule, tokenizer_identity, exclusion)

    return build_split(0), build_split(1), build_split(2)


def read_excluded(paths: BlendPaths, opened: Mapping[str, OpenCorpus]) -> dict[str, np.ndarray] | None:
    """Read the documents that --exclude lists: prefix -> ascending document indices; None without the flag.

    Raises:
        DataError: the list cannot be read, or names a corpus or document that does not exist.
    """
    if paths.exclude is None:
        return None
    num_documents = [corpus.finished_file.num_documents for corpus in opened.values()]
    return Exclusion.read(paths.exclude).by_prefix(list(opened), num_documents)


def exclude_documents(
    datasets: Sequence[MegatronDataset], prefixes: Sequence[str], excluded: Mapping[str, np.ndarray] | None
) -> str | None:
    """Set the excluded documents of the datasets of ``prefixes``; return their digest, or None without --exclude.

    Raises:
        DataError: a dataset cannot exclude documents.
    """
    if excluded is None:
        return None
    for dataset, prefix in zip(datasets, prefixes, strict=True):
        if not hasattr(dataset, "excluded"):
            raise DataError(f"--exclude is supported in samples of decoders only, got {type(dataset).__name__}")
        dataset.excluded = excluded[prefix]
    return digest_of(list(excluded.values()))


def _drop_zero_weights(corpora: tuple[WeightedPath, ...] | None) -> tuple[WeightedPath, ...] | None:
    return corpora and tuple((weight, prefix) for weight, prefix in corpora if weight)


def _split_corpus(
    corpus: OpenCorpus, paths: BlendPaths, needed: Sequence[bool], cache: IndexCache
) -> Sequence[Documents | StreamedSplit]:
    """Split the documents into the three splits; ``needed`` marks the splits that read this corpus."""
    token_file = corpus.token_file
    if isinstance(token_file, GrowingTokens):
        is_hashed = not paths.has_separate_splits and paths.split_by == "hash"
        return [StreamedSplit(paths.split if is_hashed else None, split_idx) for split_idx in range(3)]
    check_one_sample(token_file, corpus.sample_tokens, corpus.length_flag)
    if paths.has_separate_splits:
        return [(0, token_file.num_documents)] * 3
    flags, documents = f"--split {paths.split}", list[Documents]()
    if paths.split_by == "hash":
        flags += " --split-by hash"
        documents += split_by_hash(token_file, paths.split, cache)
    else:
        documents += split_documents(token_file.num_documents, paths.split)
    check_splits(token_file, documents, needed, flags, corpus.sample_tokens, corpus.length_flag)
    return documents


def _blend(
    corpora: Sequence[WeightedPath],
    open_corpora: Sequence[OpenCorpus],
    datasets: Sequence[MegatronDataset],
    schedule: Sequence[tuple[int, tuple[float, ...]]],
    tokenizer_identity: str | None,
    exclusion: str | None,
) -> BlendedDataset:
    blend_corpora = describe_corpora([prefix for _, prefix in corpora], open_corpora, datasets, tokenizer_identity)
    parts = {corpus.name: dataset for corpus, dataset in zip(blend_corpora, datasets, strict=True)}
    return BlendedDataset(parts, BlendSchedule(blend_corpora, schedule), exclusion)


def describe_corpora(
    prefixes: Sequence[str],
    open_corpora: Sequence[OpenCorpus],
    datasets: Sequence[MegatronDataset],
    tokenizer_identity: str | None,
) -> list[Corpus]:
    """Describe a split's corpora: names, fingerprints and counts."""
    return [
        Corpus(
            name,
            make_fingerprint(corpus.content, _tokenizer_identity(corpus, tokenizer_identity), dataset.fingerprint),
            dataset.samples_per_epoch,
            corpus.has_random_draws,
            corpus.token_file.num_documents,
            corpus.token_file.num_tokens,
            tuple(
                make_fingerprint(content, identity, samples)
                for identity in _tokenizer_digests(corpus, tokenizer_identity)
                for content, samples in _contents(corpus, dataset)
            ),
        )
        for name, corpus, dataset in zip(short_names(prefixes), open_corpora, datasets, strict=True)
    ]


def _contents(corpus: OpenCorpus, dataset: MegatronDataset) -> Iterator[tuple[str, str]]:
    """Yield (content, samples digest) of the tokens, and of the text that they were encoded from, if it is known."""
    yield corpus.content, dataset.fingerprint
    sidecar = corpus.token_file.sidecar
    if sidecar is not None and sidecar.source and isinstance(dataset, GPTDataset):
        samples = dataset.fingerprint_of_text()
        if samples is not None:
            yield sidecar.source, samples


def _tokenizer_identity(corpus: OpenCorpus, run_identity: str | None) -> str | None:
    sidecar = corpus.token_file.sidecar
    return run_identity or (sidecar.tokenizer if sidecar else None)


def _tokenizer_digests(corpus: OpenCorpus, run_identity: str | None) -> list[str]:
    """List the digests that may identify the corpus's tokenizer in a checkpoint."""
    sidecar = corpus.token_file.sidecar
    identities = (run_identity, sidecar.tokenizer if sidecar else None)
    return [digest for identity in identities if identity for digest in parts(identity)]
