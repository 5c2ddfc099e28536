"""T5 samples: special tokens, span corruption, and batch fields."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from megatron.config import Config
from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, documents_key
from megatron.data.permutation import random_words
from megatron.data.sample_index import SampleIndex, TokenSource, concatenate_ranges, prefetch_slices
from megatron.errors import DataError
from megatron.models.parts import DataParts
from megatron.models.t5.spans import (
    DENOISER_NAMES,
    Denoiser,
    has_modes,
    max_num_spans,
    max_target_length,
    noise_and_spans,
    raw_length,
)

if TYPE_CHECKING:
    from torch import Tensor

# T5's special tokens: end, start, padding, one sentinel per span, one mode token per denoiser.


class Vocabulary(Protocol):
    """The part of a tokenizer that T5 uses; implemented by ``megatron.tokenizer.Tokenizer``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def sentinel_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class T5Tokens:
    """Ids of T5's special tokens.

    Args:
        eos_id: ends inputs and targets, once per sample.
        start_id: the decoder's first input in each document.
        sentinels: the sentinels for a document's first span, second span, and so on.
        modes: mode token by denoiser name (R, X, S); empty with one denoiser.
        text_vocab_size: upper bound of text ids; 0 if unknown.
    """

    eos_id: int
    start_id: int
    pad_id: int
    sentinels: tuple[int, ...]
    modes: Mapping[str, int] = field(default_factory=dict)
    text_vocab_size: int = 0

    @classmethod
    def appended(cls, vocab_size: int, num_sentinels: int, eos_id: int, num_modes: int = 0) -> T5Tokens:
        """Append special tokens to a vocabulary.

        Sentinels are vocab_size + num_sentinels - 1 ... vocab_size, followed by the modes of R, X, S.
        """
        first_mode = vocab_size + num_sentinels
        return cls(
            eos_id=eos_id,
            start_id=eos_id,
            pad_id=eos_id,
            sentinels=tuple(range(first_mode - 1, vocab_size - 1, -1)),
            modes=dict(zip(DENOISER_NAMES[:num_modes], range(first_mode, first_mode + num_modes), strict=True)),
            text_vocab_size=vocab_size,
        )

    @property
    def vocab_size(self) -> int:
        """Minimum vocabulary size of the model."""
        used = (self.eos_id, self.start_id, self.pad_id, *self.sentinels, *self.modes.values())
        return max(self.text_vocab_size, max(used) + 1)

    @property
    def names(self) -> dict[int, str]:
        """Readable names: <1>, <2>, ... for sentinels in span order, <R>, <X>, <S> for modes."""
        sentinels = {token: f"<{idx}>" for idx, token in enumerate(self.sentinels, 1)}
        return sentinels | {token: f"<{name}>" for name, token in self.modes.items()}

    def require_sentinels(self, num_needed: int, source: str) -> None:
        """Check that there are at least ``num_needed`` sentinels, one per span.

        Args:
            source: name of the flag or sample that needs them, for the message.

        Raises:
            DataError: there are fewer than ``num_needed`` sentinels.
        """
        if num_needed <= len(self.sentinels):
            return
        is_appended = not self.sentinels or min(self.sentinels) >= self.text_vocab_size
        remedy = (
            f"Raise --vocab-extra-ids to {num_needed}"
            if is_appended
            else "Use a tokenizer with more sentinels, or one without sentinels (--vocab-extra-ids then appends them)"
        )
        raise DataError(
            f"{source} needs {num_needed} sentinel{'s' if num_needed != 1 else ''}, one for each span, "
            f"but {'--vocab-extra-ids' if is_appended else 'the tokenizer'} provides "
            f"{len(self.sentinels)}. {remedy}, raise --mean-span-length, or shorten --enc-seq-length."
        )


def t5_tokens(tokenizer: Vocabulary, vocab_extra_ids: int, denoisers: Sequence[Denoiser]) -> T5Tokens:
    """Find a tokenizer's special tokens; missing ones are appended to the vocabulary.

    If the tokenizer has no sentinels, ``vocab_extra_ids`` new ids are used, the highest of which is the first sentinel.
    With several denoisers, their mode tokens follow.

    Raises:
        DataError: the vocabulary has no end-of-document token.
    """
    sentinels, vocab_size = tokenizer.sentinel_ids, tokenizer.vocab_size
    num_new = 0 if sentinels else vocab_extra_ids
    pad_id = tokenizer.eod_id if tokenizer.pad_id is None else tokenizer.pad_id
    names = [denoiser.kind for denoiser in denoisers] if has_modes(denoisers) else []
    return T5Tokens(
        eos_id=tokenizer.eod_id,
        start_id=pad_id,
        pad_id=pad_id,
        sentinels=sentinels or tuple(range(vocab_size + num_new - 1, vocab_size - 1, -1)),
        modes={name: vocab_size + num_new + idx for idx, name in enumerate(names)},
        text_vocab_size=vocab_size,
    )


# Distribution of a window's spans and noise over its documents.
#
# The totals of a window are fixed, because its lengths depend on them. If documents are kept apart, each receives a
# share that is proportional to its length on average; remainders are assigned at random (systematic sampling). A
# document that is too short for a span of the mean length receives none and is only read by the encoder. If the other
# documents cannot hold all spans, the shortest documents are merged with their neighbours until there is room.
#
# Source: Madow 1949, "On the theory of systematic sampling, II", section 2.


def split_noise(
    document_lengths: Sequence[int], num_noise: int, num_spans: int, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge short documents; return the tokens, noise tokens and spans of each merged document, int64[documents] each.

    Args:
        document_lengths: tokens per document in a window, in order.
        num_noise, num_spans: total noise tokens and spans in the window, small enough to keep at least one token before
            each span.
        words: random 64-bit words, uint64[2].
    """
    tokens_per_span = -(-num_noise // num_spans) + 1
    document_lengths, min_length = list(document_lengths), 1
    while len(document_lengths) > 1 and sum(length // tokens_per_span for length in document_lengths) < num_spans:
        min_length *= 2
        document_lengths = _merge_short_documents(document_lengths, min_length)
    tokens = np.array(document_lengths, np.int64)
    if len(document_lengths) == 1:
        return tokens, np.array([num_noise]), np.array([num_spans])
    counts = _distribute(num_spans, tokens, tokens // tokens_per_span, int(words[0]))
    extra_noise = _distribute(
        num_noise - num_spans, counts, np.where(counts > 0, tokens - 2 * counts, 0), int(words[1])
    )
    return tokens, counts + extra_noise, counts


def _merge_short_documents(lengths: Sequence[int], min_length: int) -> list[int]:
    """Merge each document below ``min_length`` with the next one, and the last one with the previous one."""
    merged = [lengths[0]]
    for length in lengths[1:]:
        if merged[-1] < min_length:
            merged[-1] += length
        else:
            merged.append(length)
    if len(merged) > 1 and merged[-1] < min_length:
        merged[-2:] = [sum(merged[-2:])]
    return merged


def _distribute(total: int, weights: np.ndarray, capacity: np.ndarray, random_word: int) -> np.ndarray:
    """Draw counts that sum to ``total``, proportional to ``weights`` on average and at most ``capacity``."""
    weights = np.where(capacity > 0, weights, 0)
    total_weight = int(weights.sum())
    if not total:
        return np.zeros_like(weights)
    bounds = (np.cumsum(weights) * total + random_word % total_weight) // total_weight
    counts = np.minimum(np.diff(bounds, prepend=0), capacity)
    free_capacity = capacity - counts
    remainder = total - int(counts.sum())
    return counts + np.clip(remainder - (np.cumsum(free_capacity) - free_capacity), 0, free_capacity)


# Span corruption: choosing spans, and building inputs and targets.
#
# The computation is vectorised. A random split of n tokens into k non-empty parts, with equal probability for each
# split, corresponds to choosing k - 1 of the n - 1 positions between tokens: those with the smallest random keys. One
# sort does this for several documents at once.

_NUM_DOCUMENT_WORDS = 2


class Spans(NamedTuple):
    """A text as alternating kept slices and removed spans.

    ``text_lengths`` int64[P] counts tokens per slice, at least 1. ``span_lengths`` int64[P] counts tokens removed after
    each slice; it is 0 only for the single slice in a document without spans. ``documents`` int64[P] is the index of
    each slice's document in the text.
    """

    text_lengths: np.ndarray
    span_lengths: np.ndarray
    documents: np.ndarray


class InputsAndTargets(NamedTuple):
    """Inputs and targets without start, end and padding, and document indices by token; all int64."""

    inputs: np.ndarray
    targets: np.ndarray
    input_documents: np.ndarray
    target_documents: np.ndarray


def num_random_words(length: int) -> int:
    """Return the number of random 64-bit words that ``draw_spans`` needs for a text of ``length`` tokens."""
    return length + _NUM_DOCUMENT_WORDS


def draw_spans(document_lengths: Sequence[int], denoiser: Denoiser, words: np.ndarray) -> Spans:
    """Draw spans for a text whose documents have ``document_lengths`` tokens; spans do not cross document ends.

    Span and noise-token counts do not depend on the documents; see ``noise_and_spans``.
    """
    length = sum(document_lengths)
    num_noise, num_spans = noise_and_spans(length, denoiser)
    tokens, noise_counts, counts = split_noise(document_lengths, num_noise, num_spans, words)
    words = words[_NUM_DOCUMENT_WORDS:]
    num_runs = np.maximum(counts, 1)
    has_span = np.repeat(counts > 0, num_runs)
    text_lengths = random_compositions(tokens - noise_counts, num_runs, words[num_noise:length])
    span_lengths = np.zeros_like(text_lengths)
    span_lengths[has_span] = random_compositions(noise_counts, counts, words[:num_noise])
    return Spans(text_lengths, span_lengths, np.repeat(np.arange(len(num_runs)), num_runs))


def random_compositions(totals: np.ndarray, num_parts: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Split each ``totals[i]`` into ``num_parts[i]`` integers >= 1, uniformly at random; return them concatenated.

    Args:
        totals: int64[n]; 0 only where ``num_parts`` is 0, otherwise at least ``num_parts``.
        words: random 64-bit words, uint64[sum(totals)].
    """
    num_words, num_groups = len(words), len(totals)
    position_bits, group_bits = num_words.bit_length(), num_groups.bit_length()
    position_mask = np.uint64((1 << position_bits) - 1)
    # A key consists of group, random bits and position. Keys are unique, so the result does not depend on the sort.
    keys = words >> np.uint64(group_bits)
    keys &= ~position_mask
    if num_groups == 1:
        keys[:1] = 0  # the first token of a group always starts a part
        chosen: slice | np.ndarray = slice(int(num_parts[0]))
    else:
        firsts = totals.cumsum() - totals
        keys[firsts[totals > 0]] = 0
        keys |= (np.arange(num_groups, dtype=np.uint64) << np.uint64(64 - group_bits)).repeat(totals)
        chosen = concatenate_ranges(firsts, num_parts)
    keys |= np.arange(num_words, dtype=np.uint64)
    keys.sort()
    starts = keys[chosen] & position_mask
    starts.sort()
    bounds = np.append(starts.view(np.int64), num_words)
    return bounds[1:] - bounds[:-1]


def corrupt_spans(text: np.ndarray, spans: Spans, sentinels: np.ndarray) -> InputsAndTargets:
    """Build inputs (each span replaced by a sentinel) and targets (each span after its sentinel).

    Sentinels restart in each document.
    """
    text_lengths, span_lengths, documents = spans
    has_span, length = (span_lengths > 0).astype(np.int64), len(text)
    num_removed = int(span_lengths.sum())
    span_idx = has_span.cumsum() - has_span
    idx_in_document = span_idx - span_idx[documents.searchsorted(documents)]
    # Inputs and targets are runs of ``source``, the text followed by the sentinels: for inputs (slice, sentinel) per
    # slice, for targets (sentinel, span).
    sentinel_positions = length + np.arange(len(span_lengths))
    ends = (text_lengths + span_lengths).cumsum()
    starts = np.array(
        [[ends - span_lengths - text_lengths, sentinel_positions], [sentinel_positions, ends - span_lengths]]
    )
    lengths = np.array([[text_lengths, has_span], [has_span, span_lengths]])
    source = np.concatenate([text, sentinels[idx_in_document]])
    inputs_and_targets = source[
        concatenate_ranges(starts.transpose(0, 2, 1).ravel(), lengths.transpose(0, 2, 1).ravel())
    ]
    num_inputs = length - num_removed + int(has_span.sum())
    return InputsAndTargets(
        inputs_and_targets[:num_inputs],
        inputs_and_targets[num_inputs:],
        documents.repeat(text_lengths + has_span),
        documents.repeat(span_lengths + has_span),
    )


# The arrays of a T5 sample.
#
# | key | type | contents |
# |---|---|---|
# | inputs | int64[s_e] | [mode,] text with sentinels, end, padding |
# | targets | int64[s_d] | sentinels with spans, end, padding |
# | enc_segments, dec_segments | int32[s_e], int32[s_d] | index of the document in the sample; -1: padding |
#
# The mode token belongs to the first document, the end tokens to the last.

PADDING = -1


def build_sample(
    pair: InputsAndTargets, tokens: T5Tokens, enc_seq_length: int, dec_seq_length: int, mode: str | None = None
) -> dict[str, np.ndarray]:
    """Build the arrays in the table above. Targets longer than ``dec_seq_length`` are truncated."""
    prefix = [] if mode is None else [tokens.modes[mode]]
    prefix_documents, last_document = [0] * len(prefix), int(pair.input_documents[-1])
    return {
        "inputs": _pad_row(prefix, pair.inputs, tokens.eos_id, enc_seq_length, tokens.pad_id),
        "targets": _pad_row([], pair.targets, tokens.eos_id, dec_seq_length, tokens.pad_id),
        "enc_segments": _pad_row(prefix_documents, pair.input_documents, last_document, enc_seq_length, PADDING).astype(
            np.int32
        ),
        "dec_segments": _pad_row([], pair.target_documents, last_document, dec_seq_length, PADDING).astype(np.int32),
    }


def _pad_row(prefix: list[int], values: np.ndarray, end_token: int, length: int, padding: int) -> np.ndarray:
    row = np.concatenate([np.array(prefix, np.int64), values, np.array([end_token], np.int64)])[:length]
    padded = np.full(length, padding, np.int64)
    padded[: len(row)] = row
    return padded


# T5 samples from ordinary token files; spans are cut out when a text is read.
#
# A text is a window of ``raw_length`` tokens, whose inputs fill ``enc_seq_length``. Denoiser and spans depend on (seed,
# sample index), so they differ between epochs and are the same in every layout, worker and resumed run.


class T5Dataset:
    """T5 samples from a token file; sample i is the dictionary that ``build_sample`` returns.

    Any i >= 0 is valid; its epoch is i // samples_per_epoch.

    Args:
        documents: (start, stop) of the documents to use, or their indices in ascending order.
        dec_seq_length: padded target length; 0: the longest target over the denoisers.
        denoisers: each sample's denoiser is drawn by weight.
        seed: the same on all ranks.
        reset_attention_mask: keep documents in a text apart: no span crosses a document end, and segments identify
            documents. Otherwise a text is one document.
        cache: stores long document orders in files shared by all processes on this host; None: each process keeps them
            in memory.
        draws: corpus fingerprint if the corpus belongs to a mixture, otherwise empty. It contributes to the random
            seed, so that sample i has different spans in each corpus. It does not contribute to this dataset's
            fingerprint: when the corpus joins a mixture, training continues after the texts that have been read.

    Raises:
        DataError: the file has fewer tokens than one text, there are too few sentinels, or ``dec_seq_length`` is below
            the longest target.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        enc_seq_length: int,
        dec_seq_length: int = 0,
        denoisers: Sequence[Denoiser],
        tokens: T5Tokens,
        seed: int,
        reset_attention_mask: bool = False,
        cache: IndexCache | None = None,
        draws: str = "",
    ) -> None:
        self.token_file, self.documents, self.seed, self.tokens = token_file, documents, seed, tokens
        self.denoisers, self.reset_attention_mask = tuple(denoisers), reset_attention_mask
        self.raw_length = raw_length(enc_seq_length, denoisers)
        self.enc_seq_length = enc_seq_length
        self.dec_seq_length = dec_seq_length or max_target_length(self.raw_length, denoisers)
        self._check_lengths()
        self._windows = SampleIndex(
            token_file,
            documents=documents,
            length=self.raw_length,
            overlap=0,
            seed=seed,
            length_flag=f"--enc-seq-length {enc_seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        self._key = (draws, seed) if draws else (seed,)
        self._sentinels = np.array(tokens.sentinels, np.int64)
        weights = np.array([denoiser.weight for denoiser in denoisers])
        self._cumulative_shares = np.cumsum(weights / weights.sum())[:-1]

    def _check_lengths(self) -> None:
        length_flag = f"--enc-seq-length {self.enc_seq_length}"
        self.tokens.require_sentinels(max_num_spans(self.raw_length, self.denoisers), length_flag)
        max_target = max_target_length(self.raw_length, self.denoisers)
        if self.dec_seq_length < max_target:
            raise DataError(
                f"--dec-seq-length must be at least {max_target}, the longest target of {length_flag}, got "
                f"{self.dec_seq_length}. Raise it, or remove it."
            )
        missing = [
            denoiser.kind
            for denoiser in self.denoisers
            if has_modes(self.denoisers) and denoiser.kind not in self.tokens.modes
        ]
        if missing:
            raise DataError(f"each of several denoisers must have a mode token, missing for {', '.join(missing)}")

    @cached_property
    def fingerprint(self) -> str:
        """Short hash that changes with anything that affects samples or their order."""
        identity = (
            "t5",
            self.token_file.fingerprint,
            self.documents if isinstance(self.documents, tuple) else documents_key(self.documents),
            self.enc_seq_length,
            self.dec_seq_length,
            self.raw_length,
            self.denoisers,
            self.reset_attention_mask,
            self.tokens,
            self.seed,
        )
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    def prefetch(self, index: int) -> None:
        """Prefetch the tokens of sample ``index`` if they are in an object store."""
        prefetch_slices(self.token_file, self._windows.slices(index))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            SampleError: the sample cannot be read. The message names sample, document and position in the file.
        """
        slices = self._windows.slices(index)
        text = self._windows.read(index, slices)
        words = random_words(num_random_words(self.raw_length) + 1, "spans", *self._key, int(index))
        denoiser = self.denoisers[int(np.searchsorted(self._cumulative_shares, words[-1] / 2.0**64, "right"))]
        document_lengths = (
            [doc_slice.length for doc_slice in slices] if self.reset_attention_mask else [self.raw_length]
        )
        pair = corrupt_spans(text, draw_spans(document_lengths, denoiser, words), self._sentinels)
        mode = denoiser.kind if has_modes(self.denoisers) else None
        return build_sample(pair, self.tokens, self.enc_seq_length, self.dec_seq_length, mode)


# Functions that ``DATA`` provides: special tokens and random samples.


def special_tokens(tokenizer: Any, config: Config) -> T5Tokens:
    """Return a run's special tokens: sentinels, modes, start."""
    return t5_tokens(tokenizer, config.family_config.vocab_extra_ids, config.family_config.parsed_denoisers)


def random_dataset(config: Config, texts: Any, tokens: T5Tokens, seed: int) -> T5Dataset:
    """Build samples from the random documents ``texts``."""
    t5_config = config.family_config
    return T5Dataset(
        texts,
        documents=(0, texts.num_documents),
        enc_seq_length=t5_config.enc_seq_length,
        dec_seq_length=t5_config.dec_seq_length,
        denoisers=t5_config.parsed_denoisers,
        tokens=tokens,
        seed=seed,
        reset_attention_mask=config.data.reset_attention_mask,
    )


DATA = DataParts(special_tokens=special_tokens, random_dataset=random_dataset)


# From samples to the inputs of the model.


def t5_fields(
    inputs: Tensor,
    targets: Tensor,
    enc_segments: Tensor,
    dec_segments: Tensor,
    *,
    tokens: T5Tokens,
    has_segments: bool,
) -> dict[str, Tensor | None]:
    """Return a micro-batch's enc_tokens, dec_tokens, labels, loss_mask, enc_segments and dec_segments.

    Shapes:
        inputs, enc_segments [b, s_e]; targets, dec_segments [b, s_d]
        results [b, s_e] and [b, s_d]; loss_mask is float32, both segments are None without ``has_segments``

    The decoder's inputs are the targets shifted right by one, with ``start_id`` at the start of each document. Padding
    (segment -1) is excluded from the loss. Padding at the targets' end needs no segments, because no earlier token
    attends to it.
    """
    is_start = dec_segments != dec_segments.roll(1, dims=1)
    is_start[:, 0] = True
    shifted = targets.roll(1, dims=1).masked_fill(is_start, tokens.start_id)
    is_padding = dec_segments < 0
    return {
        "enc_tokens": inputs,
        "dec_tokens": shifted.masked_fill(is_padding, tokens.pad_id),
        "labels": targets,
        "loss_mask": (~is_padding).float(),
        "enc_segments": enc_segments if has_segments else None,
        "dec_segments": dec_segments if has_segments else None,
    }
