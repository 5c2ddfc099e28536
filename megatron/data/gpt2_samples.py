"""GPT-2 samples from a token file, in an order that is computed rather than stored.

Each epoch permutes its documents, lays them end to end (T tokens), cuts floor((T - 1) / L) samples of L + 1 tokens of
which neighbours share one, drops the tail, and permutes the samples. Nothing crosses epochs. The order follows from
(seed, epoch) alone, so it is the same in every layout and needs no file.
"""

from __future__ import annotations

import hashlib

import numpy as np

from megatron.data.permutation import Permutation
from megatron.data.token_file import TokenFile
from megatron.errors import DataError

_EPOCHS_KEPT = 2


class _Epoch:
    """One epoch's order: which document follows which, where each starts, and where each sample goes."""

    def __init__(self, sizes: np.ndarray, first: int, seed: int, epoch: int, num_samples: int) -> None:
        order = Permutation(len(sizes), "documents", seed, epoch).array(np.arange(len(sizes)))
        self.documents = order + first
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order], dtype=np.int64)])
        self.samples = Permutation(num_samples, "samples", seed, epoch)


class GPT2Samples:
    """Sample i, for any i >= 0, is int64[L + 1]; i // samples_per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take.
        seq_length: L, tokens that a sample feeds to the model.
        seed: the same on all ranks.

    Raises:
        DataError: the documents hold fewer than L + 1 tokens.
    """

    def __init__(self, token_file: TokenFile, *, documents: tuple[int, int], seq_length: int, seed: int) -> None:
        self.token_file, self.documents, self.seq_length, self.seed = token_file, documents, seq_length, seed
        self._sizes = token_file.sizes[documents[0] : documents[1]]
        self.num_tokens = int(self._sizes.sum(dtype=np.int64))
        self.samples_per_epoch = max(self.num_tokens - 1, 0) // seq_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{token_file.prefix}: documents {documents[0]}:{documents[1]} hold {self.num_tokens} tokens; a sample "
                f"of --seq-length {seq_length} needs {seq_length + 1}. Shorten --seq-length or give more data."
            )
        self._epochs: dict[int, _Epoch] = {}

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
        if index < 0:
            raise IndexError(f"samples count from 0, got {index}")
        number, index_in_epoch = divmod(int(index), self.samples_per_epoch)
        epoch = self._epoch(number)
        sample = np.empty(self.seq_length + 1, np.int64)
        start = epoch.samples(index_in_epoch) * self.seq_length
        place, filled = int(np.searchsorted(epoch.starts, start, "right")) - 1, 0
        while filled < len(sample):
            offset = start + filled - int(epoch.starts[place])
            length = min(int(epoch.starts[place + 1]) - start - filled, len(sample) - filled)
            sample[filled : filled + length] = self._read(index, int(epoch.documents[place]), offset, length)
            place, filled = place + 1, filled + length
        return sample

    def _read(self, index: int, document: int, offset: int, length: int) -> np.ndarray:
        try:
            return self.token_file.read(document, offset, length)
        except Exception as error:
            raise DataError(
                f"sample {index} cannot be read: document {document}, tokens {offset}:{offset + length}, byte "
                f"{self.token_file.byte_offset(document, offset)} of {self.token_file.token_path}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _epoch(self, number: int) -> _Epoch:
        epoch = self._epochs.get(number)
        if epoch is None:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            epoch = _Epoch(self._sizes, self.documents[0], self.seed, number, self.samples_per_epoch)
            self._epochs[number] = epoch
        return epoch
