"""GPTDataset: windows or packed documents of a token file.

positions).
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, documents_key
from megatron.data.fim import Fim
from megatron.data.packing import PackedSampleIndex
from megatron.data.sample_index import SampleIndex, TokenSource, prefetch_pieces, read_pieces

PACKINGS = ("concat", "best-fit")
_PADDING = 0


class GPTDataset:
    """Sample i, for any i >= 0, is L + 1 tokens; i // samples_per_epoch is its epoch.

    | packing | sample | of an epoch's T tokens |
    |---|---|---|
    | concat | int64[L + 1] | floor((T - 1) / L) samples; neighbours share one token, the tail is left out |
    | best-fit | {"text": int64[L + 1], "segments": int32[L + 1]} | every token; documents are cut only where too long |

    ``segments`` counts the pieces of documents within the sample from 0, and is -1 where it is padded (with token 0,
    which nothing sees and which has no loss).

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        seq_length: L, tokens that a sample feeds to the model.
        seed: the same on all ranks.
        fim: rearranges documents for fill-in-the-middle, keyed by (seed, i).
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.
        draws: changes what ``fim`` draws, so that corpora that are mixed do not draw alike.

    Raises:
        DataError: the documents hold less than one sample.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        seq_length: int,
        seed: int,
        packing: str = "concat",
        fim: Fim | None = None,
        cache: IndexCache | None = None,
        draws: str = "",
    ) -> None:
        if packing not in PACKINGS:
            raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
        self.token_file, self.documents, self.seq_length, self.seed = token_file, documents, seq_length, seed
        self.packing, self.fim = packing, fim
        self._draws = (draws, seed) if draws else (seed,)
        self._windows = self._cut(cache)
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch

    def _cut(self, cache: IndexCache | None) -> SampleIndex | PackedSampleIndex:
        if self.packing == "best-fit":
            return PackedSampleIndex(
                self.token_file,
                documents=self.documents,
                capacity=self.seq_length + 1,
                seed=self.seed,
                cache=cache,
            )
        return SampleIndex(
            self.token_file,
            documents=self.documents,
            length=self.seq_length,
            overlap=1,
            seed=self.seed,
            asked_by=f"--seq-length {self.seq_length}",
            cache=cache,
        )

    @property
    def prefix(self) -> str:
        """The path of the token files without their suffix."""
        return self.token_file.prefix

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with all that changes a sample or the order of samples."""
        key = f"{self.token_file.fingerprint}:{documents_key(self.documents)}:{self.seq_length}:{self.seed}"
        if self.packing != "concat":
            key += f":{self.packing}"
        if self.fim is not None:
            key += f":{self.fim.key}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def prefetch(self, index: int) -> None:
        """Have what sample ``index`` is made of fetched, where the tokens lie in an object store."""
        prefetch_pieces(self.token_file, self._windows.pieces(index))

    def __getitem__(self, index: int) -> np.ndarray | dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            DataError: it cannot be read; names the sample, the document and the place in the file.
        """
        pieces = self._windows.pieces(index)
        text, sizes = read_pieces(self.token_file, index, pieces), [piece.length for piece in pieces]
        if self.fim is not None:
            text = self.fim.apply(text, sizes, *self._draws, int(index))
        if self.packing == "concat":
            return text
        padded, segments = np.full(self.seq_length + 1, _PADDING, np.int64), np.full(self.seq_length + 1, -1, np.int32)
        padded[: len(text)] = text
        segments[: len(text)] = np.repeat(np.arange(len(sizes)), sizes)
        return {"text": padded, "segments": segments}
