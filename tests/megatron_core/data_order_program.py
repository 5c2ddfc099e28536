"""Writes the samples of megatron-core's dataset builder, in their order, for token files of a test."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

SPLITS = ("train", "valid", "test")
NUM_COMPLETE_SAMPLES = 5
"""Samples of each split that are also read in the form in which a training step uses them."""


def main(rank: int, folder: Path, runs: list[dict[str, Any]], max_samples: int) -> None:
    """Write ``RUN-SPLIT.npy``, the tokens of up to ``max_samples`` samples of each split.

    The arrays are int64 [samples, L + 1], or [samples, L] without an extra token.
    """
    for run_idx, run in enumerate(runs):
        datasets = build_datasets(folder / "cache", **run)
        for split, dataset in zip(SPLITS, datasets, strict=True):
            if dataset is not None:
                texts = np.stack([read_text(dataset, idx) for idx in range(min(len(dataset), max_samples))])
                for idx in range(min(len(texts), NUM_COMPLETE_SAMPLES)):
                    check_sample(dataset[idx], texts[idx])
                np.save(folder / f"{run_idx}-{split}.npy", texts)


def build_datasets(
    cache: Path,
    *,
    paths: str | dict[str, str],
    sizes: list[int],
    seq_length: int,
    seed: int,
    split: str | None,
    surplus: float,
    extra_token: bool = True,
) -> list[Any]:
    """Build the three datasets as pretrain_gpt.py of Megatron-LM does.

    Args:
        paths: the words of --data-path, or those of --train-data-path and the like by split.
    """
    is_shared = isinstance(paths, str)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blend_of(paths) if isinstance(paths, str) else None,
        blend_per_split=None if isinstance(paths, str) else [blend_of(paths.get(name)) for name in SPLITS],
        split=split if is_shared else None,
        path_to_cache=str(cache),
        mid_level_dataset_surplus=surplus,
        add_extra_token_to_sequence=extra_token,
        tokenizer=SimpleNamespace(
            vocab_size=None, pad=-1, eod=0, unique_identifiers=OrderedDict(), special_tokens_dict={}
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def blend_of(words: str | None) -> tuple[list[str], list[float] | None] | None:
    """Return (paths, weights) of alternating weights and paths, or of a single path."""
    if words is None:
        return None
    parts = words.split()
    return (parts, None) if len(parts) == 1 else (parts[1::2], [float(word) for word in parts[::2]])


def read_text(dataset: Any, idx: int) -> np.ndarray:
    """Return the tokens of a sample, without the torch operations that make inputs and labels of them."""
    if isinstance(dataset, BlendedDataset):
        dataset, idx = dataset.datasets[dataset.dataset_index[idx]], dataset.dataset_sample_index[idx]
    return dataset._query_document_sample_shuffle_indices(idx)[0]


def check_sample(sample: dict[str, Any], text: np.ndarray) -> None:
    """Check that inputs and labels consist of the tokens of ``text``, and that each token with a label has a loss."""
    tokens, labels, loss_mask = (sample[name].numpy() for name in ("tokens", "labels", "loss_mask"))
    assert np.array_equal(tokens, text[: len(tokens)])
    assert np.array_equal(labels[: len(text) - 1], text[1:])
    assert loss_mask.sum() == loss_mask[: len(text) - 1].sum() == len(text) - 1
