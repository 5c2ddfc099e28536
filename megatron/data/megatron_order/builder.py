"""A run's training, validation and test datasets in the order of megatron-core's dataset builder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.blend_paths import BlendPaths, WeightedPath
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.cache import IndexCache
from megatron.data.dataset_builder import (
    OpenCorpus,
    SplitDatasets,
    describe_corpora,
    exclude_documents,
    read_excluded,
)
from megatron.data.documents import count_tokens
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.megatron_order.order import MegatronOrder, normalized_shares
from megatron.data.megatron_order.split_bounds import split_bounds
from megatron.data.split import SPLIT_NAMES
from megatron.errors import DataError

MakeDataset = Callable[[OpenCorpus, tuple[int, int], int, IndexCache], GPTDataset]
"""(corpus, documents, number of samples that the run reads, cache) -> the dataset of these documents."""
_LARGEST_INT32 = np.iinfo(np.int32).max


def build_in_megatron_order(
    paths: BlendPaths,
    num_samples: Sequence[int],
    needed: Sequence[bool],
    open_corpus: Callable[[str, IndexCache], OpenCorpus],
    make_dataset: MakeDataset,
    tokenizer_identity: str | None,
) -> SplitDatasets:
    """Build the training, validation and test datasets; None for a split that is not needed.

    | corpora in a split | samples that are built for each corpus |
    |---|---|
    | one | the run's samples |
    | a blend | its share of the samples, rounded up, plus ``paths.surplus`` |

    As in Megatron, a single corpus in --data-path with a weight is a blend, but a single corpus in --train-data-path is
    not.

    Args:
        num_samples: samples that the run reads from train, valid and test.

    Raises:
        DataError: a corpus cannot be opened or used, a split has no tokens, or a weight is 0.
    """
    cache = IndexCache(paths.cache_path, paths.objects_path, paths.objects_bytes)
    corpora_by_split = paths.corpora(needed)
    prefixes = dict.fromkeys(prefix for corpora in corpora_by_split for _, prefix in corpora or ())
    opened = {prefix: open_corpus(prefix, cache) for prefix in prefixes}
    for corpus in opened.values():
        _check_sequences(corpus)
    excluded = read_excluded(paths, opened)

    def build_split(split_idx: int) -> BlendedDataset | None:
        corpora = corpora_by_split[split_idx]
        if corpora is None:
            return None
        _check_weights(corpora)
        is_blend = len(corpora) > 1 or (paths.is_blend and not paths.has_separate_splits)
        shares = normalized_shares([weight for weight, _ in corpora])
        size, built = num_samples[split_idx], [num_samples[split_idx]]
        if is_blend:
            targets = [math.ceil(size * share) for share in shares]
            size, built = sum(targets), [math.ceil(target * (1 + paths.surplus)) for target in targets]
        open_corpora = [opened[prefix] for _, prefix in corpora]
        datasets = [
            make_dataset(corpus, _documents(corpus, paths, split_idx), count, cache)
            for corpus, count in zip(open_corpora, built, strict=True)
        ]
        plans = tuple(dataset.plan for dataset in datasets if dataset.plan is not None)
        described = describe_corpora([prefix for _, prefix in corpora], open_corpora, datasets, tokenizer_identity)
        order = MegatronOrder(
            corpora=tuple(described),
            plans=plans,
            shares=normalized_shares(shares) if is_blend else None,
            num_samples=size if is_blend else plans[0].num_samples,
            run_samples=num_samples[split_idx],
            cache_path=paths.cache_path,
        )
        _check_surplus(order, paths.surplus)
        exclusion = exclude_documents(datasets, [prefix for _, prefix in corpora], excluded)
        parts = {corpus.name: data for corpus, data in zip(described, datasets, strict=True)}
        return BlendedDataset(parts, order, exclusion)

    return build_split(0), build_split(1), build_split(2)


def _documents(corpus: OpenCorpus, paths: BlendPaths, split_idx: int) -> tuple[int, int]:
    """Find (start, stop) for the corpus's documents in a split; raise DataError if they have no tokens."""
    token_file = corpus.finished_file
    documents = (0, token_file.num_documents)
    flags = f"--{SPLIT_NAMES[split_idx]}-data-path"
    if not paths.has_separate_splits:
        documents = split_bounds(token_file.num_documents, paths.split)[split_idx]
        flags = f"--split {paths.split}"
    if count_tokens(token_file.document_lengths, documents) < 1:
        raise DataError(
            f"the {SPLIT_NAMES[split_idx]} split must have at least one token, got documents "
            f"{documents[0]}:{documents[1]} of {token_file.num_documents} without tokens ({flags}, "
            f"{token_file.prefix}). Increase the share of {SPLIT_NAMES[split_idx]} in --split, add more data, or "
            "disable evaluation (--eval-interval 0, --eval-iters 0)."
        )
    return documents


def _check_sequences(corpus: OpenCorpus) -> None:
    """Check that each document is one sequence, because Megatron's GPT dataset shuffles sequences.

    Raises:
        DataError: a document has several sequences, or there are too many documents for int32.
    """
    token_file = corpus.finished_file
    if token_file.num_sequences != token_file.num_documents:
        raise DataError(
            f"--data-order megatron needs token files with one sequence per document, got {token_file.prefix} with "
            f"{token_file.num_sequences} sequences in {token_file.num_documents} documents. Build the data again "
            "without --split-sentences, or use --data-order native."
        )
    if token_file.num_documents > _LARGEST_INT32:
        raise DataError(
            f"--data-order megatron supports up to {_LARGEST_INT32} documents, got {token_file.num_documents} in "
            f"{token_file.prefix}. Divide the corpus, or use --data-order native."
        )


def _check_weights(corpora: Sequence[WeightedPath]) -> None:
    """Raise DataError if a weight is 0, which Megatron rejects."""
    for weight, prefix in corpora:
        if not weight > 0:
            raise DataError(
                f"--data-order megatron needs weights above 0, got {weight:g} for {prefix}. Remove the corpus, or use "
                "--data-order native."
            )


def _check_surplus(order: MegatronOrder, surplus: float) -> None:
    """Raise DataError if a corpus has fewer samples than the blend takes from it."""
    for (name, count), plan in zip(order.cursors(order.num_samples).items(), order.plans, strict=True):
        if count > plan.num_samples:
            raise DataError(
                f"the blend takes {count} samples of corpus {name}, but Megatron's order has {plan.num_samples} for "
                f"its share. Increase --mid-level-dataset-surplus ({surplus:g}), as in Megatron."
            )
