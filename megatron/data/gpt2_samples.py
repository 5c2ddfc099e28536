"""GPT-2 samples from a token file: floor((T - 1) / L) of an epoch's T tokens, neighbours share one token."""

from __future__ import annotations

import hashlib

import numpy as np

from megatron.data.windows import TokenSource, Windows


class GPT2Samples:
    """Sample i, for any i >= 0, is int64[L + 1]; i // samples_per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take.
        seq_length: L, tokens that a sample feeds to the model.
        seed: the same on all ranks.

    Raises:
        DataError: the documents hold fewer than L + 1 tokens.
    """

    def __init__(self, token_file: TokenSource, *, documents: tuple[int, int], seq_length: int, seed: int) -> None:
        self.token_file, self.documents, self.seq_length, self.seed = token_file, documents, seq_length, seed
        self._windows = Windows(
            token_file,
            documents=documents,
            length=seq_length,
            overlap=1,
            seed=seed,
            asked_by=f"--seq-length {seq_length}",
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch

    @property
    def fingerprint(self) -> str:
        """A short text that changes with the tokens, the documents, the length or the seed: with the order itself."""
        key = f"{self.token_file.fingerprint}:{self.documents}:{self.seq_length}:{self.seed}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of sample ``index``.

        Raises:
            DataError: it cannot be read; names the sample, the document and the place in the file.
        """
        return self._windows[index]
