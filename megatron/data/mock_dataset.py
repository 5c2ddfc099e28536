"""A mock tokenizer and random tokens that are the same on every machine, for parity runs without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EOD_ID, EOD_NAME = 0, "<|endoftext|>"
NUM_DOCUMENTS = 400
LONGEST_DOCUMENT = 48


class MockTokens:
    """A random-token dataset; item i depends only on (seed, i). About one token in eight ends a document."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int = 0) -> None:
        self.vocab_size, self.seq_length, self.seed = vocab_size, seq_length, seed

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, index))
        tokens = generator.integers(1, self.vocab_size, self.seq_length + 1, dtype=np.int64)
        tokens[generator.random(self.seq_length + 1) < 0.125] = EOD_ID
        return tokens


class RandomDocuments:
    """A mock token file: random documents with different lengths, each with an end-of-document token.

    Args:
        vocab_size: exclusive upper bound for token ids.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.prefix, self.fingerprint = "random documents", f"random {vocab_size} {seed}"
        lengths = np.random.default_rng(seed).integers(2, LONGEST_DOCUMENT + 1, NUM_DOCUMENTS)
        self.document_lengths, self.num_documents = lengths.astype(np.int32), NUM_DOCUMENTS
        self.vocab_size, self.seed = vocab_size, seed

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` tokens of ``document``, starting at ``offset`` (None: up to the document's end)."""
        size = int(self.document_lengths[document])
        tokens = np.random.default_rng((self.seed, document)).integers(1, self.vocab_size, size)
        tokens[-1] = EOD_ID
        return tokens[offset : None if length is None else offset + length]


@dataclass(frozen=True)
class MockTokenizer:
    """The tokenizer attributes that training scripts read, for a vocabulary without text."""

    vocab_size: int
    eod_id: int = EOD_ID
    pad_id: int | None = None
    unk_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()
    control_tokens: Mapping[str, int] = field(default_factory=lambda: {EOD_NAME: EOD_ID})
    eod_name: str | None = EOD_NAME
    identity: str | None = None
    probe: Mapping[str, Any] | None = None
