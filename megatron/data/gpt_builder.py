"""A GPT run's training, validation and test datasets, checked before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.data import dataset_checks
from megatron.data.blend_paths import BlendPaths
from megatron.data.cache import IndexCache
from megatron.data.dataset_builder import OpenCorpus, SplitDatasets, build_datasets
from megatron.data.documents import Documents
from megatron.data.fim import Fim
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.growing_tokens import StreamedSplit
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.megatron_order.builder import build_in_megatron_order
from megatron.data.megatron_order.order import ORDER
from megatron.errors import DataError

MIN_PACKED_TOKENS = 2
"""Tokens of the shortest useful document (one input and one label); best-fit packing pads the rest of its sample."""


def build_train_valid_test(
    paths: BlendPaths,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    needed: Sequence[bool] = (True, True, True),
    tokenizer_identity: str | None = None,
    tokenizer_probe: Mapping[str, Any] | None = None,
    eod_id: int | None = None,
    flags_needing_eod: Sequence[str] = (),
    packing: str = "concat",
    fim: Fim | None = None,
    num_samples: Sequence[int] | None = None,
    has_extra_token: bool = True,
) -> SplitDatasets:
    """Build the training, validation and test datasets; None for a split that is not needed.

    Args:
        vocab_size: the model tokenizer's vocabulary size; every token id must be smaller.
        tokenizer_identity, tokenizer_probe: the model tokenizer's identity and probe; compared with the sidecar's if
            there are any.
        flags_needing_eod: flags in use that require every document to end with the end-of-document token.
        packing, fim: see ``GPTDataset``.
        num_samples: samples that the run reads from train, valid and test, as passed to the script's dataset
            provider; required for ``paths.order`` "megatron", which depends on them.
        has_extra_token: see ``GPTDataset``.

    Raises:
        DataError: a fault in row D02, D09-D12 or D14 of docs/reliability.md, or unusable paths or weights.
    """
    if paths.order == ORDER and (num_samples is None or packing != "concat" or fim is not None):
        raise DataError(
            "--data-order megatron needs the lengths of the splits, and has neither packing nor fill-in-the-middle. "
            "Pass num_samples=train_val_test_num_samples to build_train_valid_test, or use --data-order native."
        )

    def open_corpus(prefix: str, cache: IndexCache) -> OpenCorpus:
        token_file = paths.open_growing_tokens(prefix, cache) or paths.open_token_file(prefix, cache)
        if isinstance(token_file, IndexedDataset):
            check_tokens(token_file, cache)

        def make_dataset(documents: Documents | StreamedSplit, draws: str) -> GPTDataset:
            return GPTDataset(
                token_file,
                documents=documents,
                seq_length=seq_length,
                seed=seed,
                packing=packing,
                fim=fim,
                cache=cache,
                draws=draws,
                shuffle_window=paths.shuffle_window,
            )

        sample_tokens = MIN_PACKED_TOKENS if packing == "best-fit" else seq_length + 1
        length_flag = f"--seq-length {seq_length}"
        return OpenCorpus(
            token_file,
            token_file.fingerprint,
            make_dataset,
            sample_tokens,
            length_flag,
            has_random_draws=fim is not None,
        )

    def check_tokens(token_file: IndexedDataset, cache: IndexCache) -> None:
        dataset_checks.check_tokenizer(token_file, tokenizer_identity, tokenizer_probe)
        dataset_checks.check_token_ids(token_file, vocab_size, cache)
        dataset_checks.check_same_eod(token_file, eod_id)
        if flags_needing_eod:
            dataset_checks.check_eod(token_file, eod_id, " ".join(flags_needing_eod))

    def make_megatron_dataset(
        corpus: OpenCorpus, documents: tuple[int, int], count: int, cache: IndexCache
    ) -> GPTDataset:
        return GPTDataset(
            corpus.token_file,
            documents=documents,
            seq_length=seq_length,
            seed=seed,
            cache=cache,
            megatron_samples=count,
            has_extra_token=has_extra_token,
        )

    if paths.order == ORDER and num_samples is not None:
        return build_in_megatron_order(
            paths, num_samples, needed, open_corpus, make_megatron_dataset, tokenizer_identity
        )
    return build_datasets(paths, needed, open_corpus, tokenizer_identity, lambda parts: seq_length)
