"""A vocabulary and token files of a few documents, for the tests of tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron import tokenizer
from megatron.data import IndexedDatasetBuilder
from megatron.tokenizer import Tokenizer, train

TEXTS = ["the lamp stood in the window\n", "of the house\n", "灯在窗前\n", "x = [1]\n"]


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write ``folder/t.json``, a BPE with a few merges, and return it."""
    path = folder / "t.json"
    path.write_bytes(train.train_bpe(TEXTS, 300))
    return tokenizer.build(tokenizer_path=path)


def write_token_files(prefix: Path, texts: list[str], vocab: Tokenizer, *, append_eod: bool = True) -> None:
    """Write a pair of token files as preprocessing does."""
    end_ids = [vocab.eod_id] if append_eod else []
    eod_id = vocab.eod_id if append_eod else None
    identity = vocab.identity
    with IndexedDatasetBuilder(prefix, vocab_size=vocab.vocab_size, tokenizer=identity, eod_id=eod_id) as writer:
        for text in texts:
            writer.add(np.array([*vocab.encode(text), *end_ids]))
