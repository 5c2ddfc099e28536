"""GPTDataset: samples from a token file, as windows over concatenated documents or as packed documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, DocumentSlice, documents_key
from megatron.data.fim import Fim
from megatron.data.growing_tokens import GrowingTokens, StreamedSplit
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.megatron_order.epochs import EpochPlan
from megatron.data.megatron_order.sample_windows import MegatronWindows
from megatron.data.packing import PackedSampleIndex
from megatron.data.sample_index import SampleIndex, TokenSource, prefetch_slices, read_slices
from megatron.data.shuffle_window import WindowIndex

PACKINGS = ("concat", "best-fit")
_PADDING = 0


class GPTDataset:
    """Endless samples with L + 1 tokens; sample i belongs to epoch i // samples_per_epoch.

    | packing | sample | use of an epoch's T tokens |
    |---|---|---|
    | concat | int64[L + 1] | floor((T - 1) / L) samples; neighbours share one token, the tail is dropped |
    | best-fit | {"text": int64[L + 1], "segments": int32[L + 1]} | all tokens; only overlong documents are split |

    ``segments`` numbers the document slices within the sample from 0. Padding has segment -1 and token 0; no token
    attends to it, and it has no loss.

    Args:
        documents: (start, stop) range of documents to use, or their ascending indices; for text that is being encoded,
            a ``StreamedSplit``.
        seq_length: L, tokens per sample that are fed to the model.
        seed: sample order seed; the same on all ranks.
        fim: rearranges documents for fill-in-the-middle, keyed by (seed, i).
        cache: shares large corpora's document order between this host's processes; None: each process
            computes the order in its own memory.
        draws: additional key for random draws in ``fim``, so that the corpora of a mixture draw differently.
        megatron_samples: build the order of megatron-core's GPTDataset for a run that reads this many samples;
            None: this project's order, which has no end.
        has_extra_token: False: a sample in Megatron's order has L tokens, and the last token has no label. It is
            {"text": int64[L + 1], "loss_mask": int32[L + 1]} with an unused token 0 at the end.
        shuffle_window: shuffle samples within windows of this many samples; 0: within an epoch.

    Attributes:
        excluded: int64, ascending indices of documents whose tokens are replaced by 0; a sample then also has
            "excluded": int32[L + 1], 1 for these tokens. None: no document is excluded, and samples lack the key.

    Raises:
        DataError: the documents have fewer tokens than one sample.
    """

    def __init__(
        self,
        token_file: TokenSource | GrowingTokens,
        *,
        documents: Documents | StreamedSplit,
        seq_length: int,
        seed: int,
        packing: str = "concat",
        fim: Fim | None = None,
        cache: IndexCache | None = None,
        draws: str = "",
        megatron_samples: int | None = None,
        has_extra_token: bool = True,
        shuffle_window: int = 0,
    ) -> None:
        if packing not in PACKINGS:
            raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
        if not has_extra_token and megatron_samples is None:
            raise ValueError("has_extra_token=False needs megatron_samples, got None")
        self.token_file, self.documents, self.seq_length, self.seed = token_file, documents, seq_length, seed
        self.packing, self.fim, self.megatron_samples = packing, fim, megatron_samples
        self.has_extra_token, self.shuffle_window = has_extra_token, shuffle_window
        self.excluded: np.ndarray | None = None
        self._draw_key = (draws, seed) if draws else (seed,)
        self._windows = self._make_windows(cache)
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch

    def _make_windows(
        self, cache: IndexCache | None
    ) -> SampleIndex | PackedSampleIndex | MegatronWindows | WindowIndex:
        """Build the index that divides the documents into samples."""
        if self.shuffle_window:
            assert isinstance(self.token_file, (IndexedDataset, GrowingTokens))
            return WindowIndex(
                self.token_file,
                documents=self.documents,
                length=self.seq_length,
                overlap=1,
                seed=self.seed,
                window=self.shuffle_window,
                length_flag=f"--seq-length {self.seq_length}",
            )
        assert not isinstance(self.documents, StreamedSplit) and not isinstance(self.token_file, GrowingTokens)
        if self.megatron_samples is not None:
            assert isinstance(self.documents, tuple)
            return MegatronWindows(
                self.token_file,
                documents=self.documents,
                seq_length=self.seq_length,
                seed=self.seed,
                num_samples=self.megatron_samples,
                extra_tokens=int(self.has_extra_token),
                cache=cache,
            )
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
            length_flag=f"--seq-length {self.seq_length}",
            cache=cache,
        )

    @property
    def prefix(self) -> str:
        """Path of the token files without a suffix."""
        return self.token_file.prefix

    @property
    def plan(self) -> EpochPlan | None:
        """Epochs in Megatron's order; None in this project's order."""
        return self._windows.plan if isinstance(self._windows, MegatronWindows) else None

    @cached_property
    def fingerprint(self) -> str:
        """Short digest of all settings and data that determine the samples and their order."""
        if self.shuffle_window:
            return self._window_fingerprint(self.token_file.fingerprint)
        assert not isinstance(self.documents, StreamedSplit)
        key = f"{self.token_file.fingerprint}:{documents_key(self.documents)}:{self.seq_length}:{self.seed}"
        if self.packing != "concat":
            key += f":{self.packing}"
        if self.fim is not None:
            key += f":{self.fim.key}"
        if isinstance(self._windows, MegatronWindows):
            key += f":megatron:{tuple(self._windows.plan)}:{self._windows.extra_tokens}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def fingerprint_of_text(self) -> str | None:
        """The fingerprint of these samples if they are read while their text is encoded; None if it is unknown."""
        sidecar = self.token_file.sidecar if isinstance(self.token_file, IndexedDataset) else None
        if sidecar is None or not sidecar.source or not self.shuffle_window:
            return None
        return self._window_fingerprint(sidecar.source)

    def _window_fingerprint(self, content: str) -> str:
        """Digest the samples of --shuffle-window; ``content`` identifies the text or the tokens."""
        if isinstance(self.documents, StreamedSplit):
            documents = self.documents.key
        else:
            is_all = isinstance(self.documents, tuple) and self.documents == (0, len(self.token_file.document_lengths))
            documents = "all documents" if is_all else documents_key(self.documents)
        key = f"{content}:{documents}:{self.seq_length}:{self.seed}:window {self.shuffle_window}"
        if self.fim is not None:
            key += f":{self.fim.key}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def prefetch(self, index: int) -> None:
        """Start to fetch the tokens of sample ``index`` if the token file is in an object store."""
        prefetch_slices(self.token_file, self._windows.slices(index))

    def __getitem__(self, index: int) -> np.ndarray | dict[str, np.ndarray]:
        """Read sample ``index``.

        Raises:
            DataError: the sample cannot be read; the message names the sample, the document and the file position.
        """
        slices = self._windows.slices(index)
        sample = self._make_sample(index, slices)
        if self.excluded is None:
            return sample
        is_excluded = np.isin([doc_slice.document for doc_slice in slices], self.excluded)
        flags = np.zeros(self.seq_length + 1, np.int32)
        slice_flags = np.repeat(is_excluded, [doc_slice.length for doc_slice in slices])
        flags[: len(slice_flags)] = slice_flags
        named_sample = sample if isinstance(sample, dict) else {"text": sample}
        return {**named_sample, "text": np.where(flags > 0, _PADDING, named_sample["text"]), "excluded": flags}

    def slices(self, index: int) -> list[DocumentSlice]:
        """Find the document slices in sample ``index``, in their order in the sample."""
        return self._windows.slices(index)

    def samples_of(self, document: int, first: int, stop: int) -> list[int]:
        """Find the samples from ``first`` to ``stop`` - 1 with tokens of ``document``, in ascending order."""
        return self._windows.samples_of(document, first, stop)

    def _make_sample(self, index: int, slices: Sequence[DocumentSlice]) -> np.ndarray | dict[str, np.ndarray]:
        text, slice_lengths = read_slices(self.token_file, index, slices), [doc_slice.length for doc_slice in slices]
        if self.fim is not None:
            text = self.fim.apply(text, slice_lengths, *self._draw_key, int(index))
        if not self.has_extra_token:
            has_label = np.ones(self.seq_length + 1, np.int32)
            has_label[-1] = 0
            return {"text": np.append(text, _PADDING), "loss_mask": has_label}
        if self.packing == "concat":
            return text
        padded, segments = np.full(self.seq_length + 1, _PADDING, np.int64), np.full(self.seq_length + 1, -1, np.int32)
        padded[: len(text)] = text
        segments[: len(text)] = np.repeat(np.arange(len(slice_lengths)), slice_lengths)
        return {"text": padded, "segments": segments}
