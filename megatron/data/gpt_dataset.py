"""GPTDataset (windows or packed documents, fill-in-the-middle), its builder, gpt2_fields (get_ltor masks and
positions).
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron.config.data import FIM_TOKENS
from megatron.data import dataset_builder
from megatron.data.cache import IndexCache
from megatron.data.dataset_builder import BlendPaths, OpenCorpus, Three, build_datasets
from megatron.data.indexed_dataset import Documents, IndexedDataset, documents_key
from megatron.data.packing import PackedSampleIndex
from megatron.data.permutation import random_words
from megatron.data.sample_index import SampleIndex, TokenSource, prefetch_pieces, read_pieces, runs
from megatron.errors import ConfigError, DataError
from megatron.ops.attention import positions_in_segments

# Fill-in-the-middle: documents of a GPT-2 sample cut in three and put together with the middle last.
#
# | order | share | a document becomes |
# |---|---|---|
# | PSM | 1 - spm_rate | prefix_id PREFIX suffix_id SUFFIX middle_id MIDDLE |
# | SPM | spm_rate | prefix_id suffix_id SUFFIX middle_id PREFIX MIDDLE |
#
# SPM is the paper's second variant: its start is that of a PSM document without prefix, so that a model learns both
# orders at once. It works on tokens, when a sample is read: the control tokens push a document's last three tokens out
# of the sample, and its end-of-document token stays where it was, so no document moves and no length changes.
#
# Source: Bavarian et al. 2022, "Efficient training of language models to fill in the middle", section 3 and appendix D.

NAMES = FIM_TOKENS
_NUM_CONTROL_TOKENS = 3
_SHORTEST = 2 * _NUM_CONTROL_TOKENS
_WORDS_A_DOCUMENT = 4


class Vocabulary(Protocol):
    """What must be known of a tokenizer: ``megatron.tokenizer.Tokenizer``, or what stands in for one."""

    @property
    def has_eod(self) -> bool: ...

    @property
    def eod_id(self) -> int: ...

    def token_to_id(self, token: str) -> int | None: ...


@dataclass(frozen=True)
class Fim:
    """How often documents are rearranged, and by which control tokens.

    Args:
        rate: share of the documents, 0 ... 1.
        spm_rate: share of these that are put in SPM order.
        eod_id: ends a document in the text, besides what the index says; None where the vocabulary has none.
    """

    rate: float
    spm_rate: float
    prefix_id: int
    middle_id: int
    suffix_id: int
    eod_id: int | None = None

    @property
    def key(self) -> str:
        """A text that tells these settings from others; fingerprints in checkpoints hold it, so it never changes."""
        ids = (self.prefix_id, self.middle_id, self.suffix_id, self.eod_id)
        return f"fim {float(self.rate)} {float(self.spm_rate)} {' '.join(map(str, ids))}"

    def apply(self, text: np.ndarray, sizes: Sequence[int], *key: int | str) -> np.ndarray:
        """Return ``text``, int64[n], with some of its documents rearranged; the length stays.

        A document of fewer than six tokens stays as it is. The same ``key`` gives the same.

        Args:
            sizes: tokens of the parts of ``text`` that come from different documents, in order.
            key: the seed, the number of the sample, and what else is to change it.
        """
        starts, lengths, ended = self._documents(text, sizes)
        words = random_words(_WORDS_A_DOCUMENT * len(starts), "fim", *key).reshape(-1, _WORDS_A_DOCUMENT)
        shares = (words[:, :2] >> np.uint64(11)) * 2.0**-53  # in [0, 1), so that 0 is never and 1 always
        is_moved = (shares[:, 0] < self.rate) & (lengths >= _SHORTEST)
        if not is_moved.any():
            return text
        kept = np.where(is_moved, lengths - _NUM_CONTROL_TOKENS, lengths)
        cuts = _below(kept + 1, words[:, 2:])
        low, high = np.where(is_moved, cuts.min(axis=1), kept), np.where(is_moved, cuts.max(axis=1), kept)
        low[is_moved & (shares[:, 1] < self.spm_rate)] = 0  # SPM is PSM with the prefix as a part of the middle
        return self._gather(text, starts, (low, high, kept), is_moved.astype(np.int64), ended)

    def _documents(self, text: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return start, tokens before the end-of-document token, and number of such tokens (0, 1) of each document."""
        is_eod = np.zeros(len(text), np.bool_) if self.eod_id is None else text == self.eod_id
        is_last = is_eod.copy()
        is_last[np.cumsum(sizes) - 1] = True
        last = np.flatnonzero(is_last)
        starts = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])
        ended = is_eod[last].astype(np.int64)
        return starts, last + 1 - starts - ended, ended

    def _gather(
        self, text: np.ndarray, starts: np.ndarray, bounds: tuple[np.ndarray, ...], moved: np.ndarray, ended: np.ndarray
    ) -> np.ndarray:
        """Return the text with each document as prefix, suffix and middle; one that stays is all prefix.

        ``bounds`` are the ends of prefix, middle and suffix in the old order, ``moved`` and ``ended`` 0 or 1.
        """
        low, high, kept = bounds
        control = len(text) + np.zeros_like(starts)
        lengths = kept + moved * _NUM_CONTROL_TOKENS
        begins = (control, starts, control + 1, starts + high, control + 2, starts + low, starts + lengths)
        counts = (moved, low, moved, kept - high, moved, high - low, ended)
        source = np.concatenate([text, (self.prefix_id, self.suffix_id, self.middle_id)])
        return source[runs(np.array(begins).T.ravel(), np.array(counts).T.ravel())]


def _below(limits: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return a random number from 0 ... limits[i] - 1 for each of words[i]."""
    upper = words >> np.uint64(32)
    return (upper * limits.astype(np.uint64)[:, None] >> np.uint64(32)).view(np.int64)


def fim_from(tokenizer: Vocabulary, rate: float, spm_rate: float) -> Fim | None:
    """Return what ``--fim-rate`` and ``--fim-spm-rate`` ask for; None for a rate of 0.

    Raises:
        ConfigError: a rate is outside 0 ... 1.
        DataError: the vocabulary has none of the three sets of names in ``NAMES``.
    """
    for flag, value in (("--fim-rate", rate), ("--fim-spm-rate", spm_rate)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{flag} must be from 0 to 1, got {value}. Give a share of the documents, such as 0.5.")
    if not rate:
        return None
    eod_id = tokenizer.eod_id if tokenizer.has_eod else None
    for names in NAMES:
        ids = [tokenizer.token_to_id(name) for name in names]
        prefix_id, middle_id, suffix_id = ids
        if prefix_id is not None and middle_id is not None and suffix_id is not None:
            return Fim(rate, spm_rate, prefix_id, middle_id, suffix_id, eod_id)
    known = " or ".join(" ".join(names) for names in NAMES)
    raise DataError(
        f"--fim-rate {rate} needs a vocabulary with the tokens {known}; this one has none of these sets. Train one "
        f"with `python tools/train_tokenizer.py --special-tokens {shlex.join(NAMES[0])} ...` and preprocess the corpus "
        "with it, or leave --fim-rate out."
    )


# GPT-2 samples from a token file: windows over its documents laid end to end, or whole documents packed best-fit.

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


# From raw samples to what a model trains on: inputs, labels, loss mask, positions, documents within a sample.


def gpt2_fields(
    tokens: Tensor, *, segments: Tensor | None = None, loss_mask: Tensor | None = None, eod_id: int | None = None,
    reset_position_ids: bool = False, reset_attention_mask: bool = False, eod_mask_loss: bool = False,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Return tokens, labels, loss_mask, position_ids and segment_ids of a micro-batch.

    Shapes:
        tokens [b, L+1], int64; segments [b, L+1], int32, the document of each token, -1 for padding
        loss_mask [b, L+1], int32, 1 where a token is to be predicted; None: everywhere
        all results [b, L]; loss_mask is float32, segment_ids int32 or None without ``reset_attention_mask``

    An end-of-document token belongs to the document that it ends. ``eod_mask_loss`` leaves out the loss where the input
    is such a token: what follows it is another document, which nothing can predict.

    With ``segments`` documents are kept apart by these alone: positions count from 0 in each, segment_ids are given,
    and there is no loss where the label is of another document than the input, nor on padding. Padding sees padding.

    Raises:
        ValueError: one of the three options without ``eod_id``.
    """
    if eod_id is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
        raise ValueError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need an end-of-document token"
        )
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    is_eod = inputs == eod_id if eod_id is not None else torch.zeros_like(inputs, dtype=torch.bool)
    if segments is None:
        segment_ids, has_loss = _exclusive_cumsum(is_eod) if reset_attention_mask else None, torch.ones_like(is_eod)
        positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
        if reset_position_ids:
            positions = positions - _document_starts(is_eod, positions)
    else:
        segment_ids, label_segments = segments[:, :-1].contiguous(), segments[:, 1:]
        has_loss = (segment_ids == label_segments) & (label_segments >= 0)
        positions = positions_in_segments(segment_ids)
    if eod_mask_loss:
        has_loss &= ~is_eod
    if loss_mask is not None:
        has_loss = has_loss & (loss_mask[:, 1:] > 0)
    return {
        "tokens": inputs,
        "labels": labels,
        "loss_mask": has_loss.float(),
        "position_ids": positions.contiguous(),
        "segment_ids": segment_ids,
    }


def _document_starts(is_eod: Tensor, positions: Tensor) -> Tensor:
    """Return, for each position, where its document starts in the sample."""
    starts = torch.zeros_like(positions)
    starts[:, 1:] = torch.where(is_eod[:, :-1], positions[:, 1:], 0)
    return starts.cummax(dim=1).values


def _exclusive_cumsum(is_eod: Tensor) -> Tensor:
    ended = is_eod.to(torch.int32)
    return ended.cumsum(dim=1, dtype=torch.int32) - ended


# The three data sets of a GPT-2 run, with every check that can be made before training starts.

SHORTEST_PACKED = 2
"""Tokens of a document that gives one label; best-fit packing pads what is left of its sample."""


def build_train_valid_test(
    paths: BlendPaths,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    needed: Sequence[bool] = (True, True, True),
    tokenizer_identity: str | None = None,
    eod_id: int | None = None,
    flags_needing_eod: Sequence[str] = (),
    packing: str = "concat",
    fim: Fim | None = None,
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Args:
        vocab_size: of the model's tokenizer; every token id must be below it.
        tokenizer_identity: compared with the one in the sidecar where there is one.
        flags_needing_eod: flags in use that work only where documents end with the end-of-document token.
        packing, fim: as ``GPTDataset``.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults; paths and weights that cannot be used.
    """

    def open_corpus(prefix: str, cache: IndexCache) -> OpenCorpus:
        token_file = IndexedDataset(prefix, reader=paths.data_impl, cache=cache)
        dataset_builder.check_tokenizer(token_file, tokenizer_identity)
        dataset_builder.check_token_ids(token_file, vocab_size, cache)
        dataset_builder.check_same_eod(token_file, eod_id)
        if flags_needing_eod:
            dataset_builder.check_eod(token_file, eod_id, " ".join(flags_needing_eod))

        def make(documents: Documents, draws: str) -> GPTDataset:
            return GPTDataset(
                token_file,
                documents=documents,
                seq_length=seq_length,
                seed=seed,
                packing=packing,
                fim=fim,
                cache=cache,
                draws=draws,
            )

        sample_tokens = SHORTEST_PACKED if packing == "best-fit" else seq_length + 1
        asked_by = f"--seq-length {seq_length}"
        return OpenCorpus(token_file, token_file.fingerprint, make, sample_tokens, asked_by, is_drawn=fim is not None)

    return build_datasets(paths, needed, open_corpus, tokenizer_identity, lambda parts: seq_length)
