"""T5Dataset: control tokens, span corruption, batch fields."""

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
from megatron.data.sample_index import SampleIndex, TokenSource, prefetch_pieces, runs
from megatron.errors import DataError
from megatron.models.parts import DataParts
from megatron.models.t5.spans import KINDS, Denoiser, has_modes, longest_target, most_spans, noise_and_spans, raw_length

if TYPE_CHECKING:
    from torch import Tensor

# The ids beyond those of text that T5 needs: ends, starts, padding, one sentinel per span, one mode per denoiser.


class Vocabulary(Protocol):
    """What T5 must know of a tokenizer: ``megatron.tokenizer.Tokenizer``, or what stands in for one."""

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
    """Where T5's control tokens lie.

    Args:
        eos_id: ends inputs and targets, once a sample.
        start_id: what the decoder reads first in each document.
        sentinels: the id that stands for the first span of a document, for the second, and so on.
        modes: the id that opens the inputs, by the kind of the denoiser; empty with one denoiser.
        text_vocab_size: ids of text are below it; 0 where nobody knows.
    """

    eos_id: int
    start_id: int
    pad_id: int
    sentinels: tuple[int, ...]
    modes: Mapping[str, int] = field(default_factory=dict)
    text_vocab_size: int = 0

    @classmethod
    def appended(cls, vocab_size: int, num_sentinels: int, eos_id: int, num_modes: int = 0) -> T5Tokens:
        """Return sentinels vocab_size + num_sentinels - 1 ... vocab_size, and modes behind them for R, X, S."""
        top = vocab_size + num_sentinels
        return cls(
            eos_id=eos_id,
            start_id=eos_id,
            pad_id=eos_id,
            sentinels=tuple(range(top - 1, vocab_size - 1, -1)),
            modes=dict(zip(KINDS[:num_modes], range(top, top + num_modes), strict=True)),
            text_vocab_size=vocab_size,
        )

    @property
    def vocab_size(self) -> int:
        """How many ids the model must have."""
        used = (self.eos_id, self.start_id, self.pad_id, *self.sentinels, *self.modes.values())
        return max(self.text_vocab_size, max(used) + 1)

    @property
    def names(self) -> dict[int, str]:
        """Return what a person reads: sentinels are <1>, <2>, ... in the order of their spans, modes <R>, <X>, <S>."""
        sentinels = {token: f"<{number}>" for number, token in enumerate(self.sentinels, 1)}
        return sentinels | {token: f"<{kind}>" for kind, token in self.modes.items()}

    def require_sentinels(self, needed: int, asked_by: str) -> None:
        """Check that there is a sentinel for each of ``needed`` spans.

        Raises:
            DataError: there are too few.
        """
        if needed <= len(self.sentinels):
            return
        is_appended = not self.sentinels or min(self.sentinels) >= self.text_vocab_size
        cure = (
            f"Raise --vocab-extra-ids to {needed}"
            if is_appended
            else "Take a tokenizer with more of them, or one with none (then --vocab-extra-ids appends them)"
        )
        raise DataError(
            f"there must be a sentinel for each span, {needed} for {asked_by}; too few sentinels: "
            f"{'--vocab-extra-ids' if is_appended else 'the tokenizer'} gives {len(self.sentinels)}. "
            f"{cure}, raise --mean-span-length, or shorten --enc-seq-length."
        )


def t5_tokens(tokenizer: Vocabulary, vocab_extra_ids: int, denoisers: Sequence[Denoiser]) -> T5Tokens:
    """Return the tokenizer's own control tokens, and behind its vocabulary those that it lacks.

    Sentinels are the tokenizer's where it has any, else ``vocab_extra_ids`` new ids of which the highest is the first;
    behind them comes a mode token for each of several denoisers.

    Raises:
        DataError: the vocabulary has no end-of-document token.
    """
    own, size = tokenizer.sentinel_ids, tokenizer.vocab_size
    new = 0 if own else vocab_extra_ids
    pad_id = tokenizer.eod_id if tokenizer.pad_id is None else tokenizer.pad_id
    kinds = [denoiser.kind for denoiser in denoisers] if has_modes(denoisers) else []
    return T5Tokens(
        eos_id=tokenizer.eod_id,
        start_id=pad_id,
        pad_id=pad_id,
        sentinels=own or tuple(range(size + new - 1, size - 1, -1)),
        modes={kind: size + new + place for place, kind in enumerate(kinds)},
        text_vocab_size=size,
    )


# How many spans and how much noise each document of a window gets, so that the window's totals stay exact.
#
# A window's lengths follow from its totals, so documents that are kept apart must share these: on average each gets its
# part by length, and what rounding leaves over falls by chance (systematic sampling). A document in which a span of the
# mean length has no room gets none and is only read by the encoder. Where so many are that short that the others cannot
# hold all spans, the shortest join their neighbours, and count as one document with them, until there is room.
#
# Source: Madow 1949, "On the theory of systematic sampling, II", section 2.


def split_noise(
    sizes: Sequence[int], noise: int, spans: int, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, tokens to cut out, spans) of each document that stays apart, int64[number of documents] each.

    Args:
        sizes: tokens of the documents of one window, in order.
        noise, spans: totals of the window. They leave at least one token in front of each span.
        words: two random words.
    """
    tokens_per_span = -(-noise // spans) + 1
    sizes, shortest = list(sizes), 1
    while len(sizes) > 1 and sum(size // tokens_per_span for size in sizes) < spans:
        shortest *= 2
        sizes = _join(sizes, shortest)
    tokens = np.array(sizes, np.int64)
    if len(sizes) == 1:
        return tokens, np.array([noise]), np.array([spans])
    counts = _share(spans, tokens, tokens // tokens_per_span, int(words[0]))
    more = _share(noise - spans, counts, np.where(counts > 0, tokens - 2 * counts, 0), int(words[1]))
    return tokens, counts + more, counts


def _join(sizes: Sequence[int], shortest: int) -> list[int]:
    """Return the sizes after each below ``shortest`` has joined the one behind it, or the last the one before."""
    joined = [sizes[0]]
    for size in sizes[1:]:
        if joined[-1] < shortest:
            joined[-1] += size
        else:
            joined.append(size)
    if len(joined) > 1 and joined[-1] < shortest:
        joined[-2:] = [sum(joined[-2:])]
    return joined


def _share(total: int, weights: np.ndarray, room: np.ndarray, word: int) -> np.ndarray:
    """Return counts that sum to ``total``, on average proportional to ``weights`` and nowhere above ``room``."""
    weights = np.where(room > 0, weights, 0)
    whole = int(weights.sum())
    if not total:
        return np.zeros_like(weights)
    bounds = (np.cumsum(weights) * total + word % whole) // whole
    counts = np.minimum(np.diff(bounds, prepend=0), room)
    free = room - counts
    left_over = total - int(counts.sum())
    return counts + np.clip(left_over - (np.cumsum(free) - free), 0, free)


# Cutting spans out of a text: which ones, and what inputs and targets then are.
#
# All of it works on whole arrays. Splitting n tokens into k parts of at least one token, all ways equally likely, is
# choosing k - 1 of the n - 1 places between them: those with the smallest random keys. The same sort does it for
# several documents at once.

_WORDS_OF_DOCUMENTS = 2


class Spans(NamedTuple):
    """A text as pieces that stay, each with the number of tokens cut out behind it.

    ``kept`` >= 1 and ``cut`` are int64[P]; ``cut`` is 0 only behind the one piece of a document without spans.
    ``documents`` int64[P] is the number, within the text, of the document that a piece belongs to.
    """

    kept: np.ndarray
    cut: np.ndarray
    documents: np.ndarray


class Pair(NamedTuple):
    """Inputs and targets without what frames them, and the document of each token; int64 all."""

    inputs: np.ndarray
    targets: np.ndarray
    input_documents: np.ndarray
    target_documents: np.ndarray


def num_words(length: int) -> int:
    """Return how many random words the spans of a text of ``length`` take."""
    return length + _WORDS_OF_DOCUMENTS


def draw_spans(sizes: Sequence[int], denoiser: Denoiser, words: np.ndarray) -> Spans:
    """Return spans of a text whose documents have ``sizes`` tokens; none crosses the end of a document.

    Their number and the tokens in them are those of a text without documents (``spans.noise_and_spans``).
    """
    length = sum(sizes)
    noise, spans = noise_and_spans(length, denoiser)
    tokens, noises, counts = split_noise(sizes, noise, spans, words)
    words = words[_WORDS_OF_DOCUMENTS:]
    pieces = np.maximum(counts, 1)
    has_span = np.repeat(counts > 0, pieces)
    kept = compositions(tokens - noises, pieces, words[noise:length])
    cut = np.zeros_like(kept)
    cut[has_span] = compositions(noises, counts, words[:noise])
    return Spans(kept, cut, np.repeat(np.arange(len(pieces)), pieces))


def compositions(totals: np.ndarray, parts: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return ``parts[i]`` numbers >= 1 that sum to ``totals[i]``, for one i after the other; each way equally likely.

    Args:
        totals: int64[n], 0 only where ``parts`` is 0, else at least ``parts``.
        words: uint64[sum(totals)], random.
    """
    num_words, num_groups = len(words), len(totals)
    place_bits, group_bits = num_words.bit_length(), num_groups.bit_length()
    place_mask = np.uint64((1 << place_bits) - 1)
    # A key is group, random bits, place: no two are equal, so that any way to sort gives the same.
    keys = words >> np.uint64(group_bits)
    keys &= ~place_mask
    if num_groups == 1:
        keys[:1] = 0  # a group's first token always starts a part
        chosen: slice | np.ndarray = slice(int(parts[0]))
    else:
        firsts = totals.cumsum() - totals
        keys[firsts[totals > 0]] = 0
        keys |= (np.arange(num_groups, dtype=np.uint64) << np.uint64(64 - group_bits)).repeat(totals)
        chosen = runs(firsts, parts)
    keys |= np.arange(num_words, dtype=np.uint64)
    keys.sort()
    starts = keys[chosen] & place_mask
    starts.sort()
    bounds = np.append(starts.view(np.int64), num_words)
    return bounds[1:] - bounds[:-1]


def cut_out(text: np.ndarray, spans: Spans, sentinels: np.ndarray) -> Pair:
    """Return the text with a sentinel for each span, and the spans with their sentinel in front of each.

    Sentinels count from the first one in each document.
    """
    kept, cut, documents = spans
    has_span, length = (cut > 0).astype(np.int64), len(text)
    num_cut = int(cut.sum())
    number = has_span.cumsum() - has_span
    in_document = number - number[documents.searchsorted(documents)]
    # Both are runs out of the text and the names behind it: (piece, name) of each piece, then (name, span).
    names = length + np.arange(len(cut))
    ends = (kept + cut).cumsum()
    starts = np.array([[ends - cut - kept, names], [names, ends - cut]])
    lengths = np.array([[kept, has_span], [has_span, cut]])
    source = np.concatenate([text, sentinels[in_document]])
    both = source[runs(starts.transpose(0, 2, 1).ravel(), lengths.transpose(0, 2, 1).ravel())]
    num_inputs = length - num_cut + int(has_span.sum())
    return Pair(
        both[:num_inputs],
        both[num_inputs:],
        documents.repeat(kept + has_span),
        documents.repeat(cut + has_span),
    )


# A T5 sample as the arrays that travel: framed, padded, each token with its document.
#
# | key | type | holds |
# |---|---|---|
# | inputs | int64[s_e] | [mode,] text with sentinels, end, padding |
# | targets | int64[s_d] | sentinels with spans, end, padding |
# | enc_segments, dec_segments | int32[s_e], int32[s_d] | number of the document in the sample, from 0; -1: padding |
#
# The mode token belongs to the first document, both ends to the last.

PADDING = -1


def sample(
    pair: Pair, tokens: T5Tokens, enc_seq_length: int, dec_seq_length: int, mode: str | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays of the table above; targets that are too long lose their last tokens."""
    head = [] if mode is None else [tokens.modes[mode]]
    first, last = [0] * len(head), int(pair.input_documents[-1])
    return {
        "inputs": _framed(head, pair.inputs, tokens.eos_id, enc_seq_length, tokens.pad_id),
        "targets": _framed([], pair.targets, tokens.eos_id, dec_seq_length, tokens.pad_id),
        "enc_segments": _framed(first, pair.input_documents, last, enc_seq_length, PADDING).astype(np.int32),
        "dec_segments": _framed([], pair.target_documents, last, dec_seq_length, PADDING).astype(np.int32),
    }


def _framed(head: list[int], values: np.ndarray, end: int, length: int, padding: int) -> np.ndarray:
    row = np.concatenate([np.array(head, np.int64), values, np.array([end], np.int64)])[:length]
    framed = np.full(length, padding, np.int64)
    framed[: len(row)] = row
    return framed


# T5 samples from the token file that GPT-2 reads too: spans are cut out of a text when it is read.
#
# A text is a window of ``raw_length`` tokens, whose inputs fill ``enc_seq_length``. Denoiser and spans follow from
# (seed, index of the sample), so they are new in each epoch and the same in every layout, worker and resumed run.


class T5Dataset:
    """Sample i, for any i >= 0, is the dictionary of ``t5_layout``; i // samples_per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        dec_seq_length: targets are padded to it; 0: the longest that a denoiser gives.
        denoisers: each sample's is drawn by their weights.
        seed: the same on all ranks.
        reset_attention_mask: keep the documents of a text apart: no span crosses the end of one, segments tell them
            apart. Without it a text is one document.
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.
        draws: what corpora of a mixture differ in, so that sample i of one is not cut as sample i of the other. Not
            part of the fingerprint: a corpus that gets company stays the same corpus, whose texts go on.

    Raises:
        DataError: fewer tokens than one text, too few sentinels, ``dec_seq_length`` below the longest target.
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
        self.dec_seq_length = dec_seq_length or longest_target(self.raw_length, denoisers)
        self._check()
        self._windows = SampleIndex(
            token_file,
            documents=documents,
            length=self.raw_length,
            overlap=0,
            seed=seed,
            asked_by=f"--enc-seq-length {enc_seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        self._key = (draws, seed) if draws else (seed,)
        self._sentinels = np.array(tokens.sentinels, np.int64)
        weights = np.array([denoiser.weight for denoiser in denoisers])
        self._shares = np.cumsum(weights / weights.sum())[:-1]

    def _check(self) -> None:
        asked_by = f"--enc-seq-length {self.enc_seq_length}"
        self.tokens.require_sentinels(most_spans(self.raw_length, self.denoisers), asked_by)
        longest = longest_target(self.raw_length, self.denoisers)
        if self.dec_seq_length < longest:
            raise DataError(
                f"--dec-seq-length must be at least {longest}, the longest target of {asked_by}, got "
                f"{self.dec_seq_length}. Raise it, or leave it out."
            )
        missing = [d.kind for d in self.denoisers if has_modes(self.denoisers) and d.kind not in self.tokens.modes]
        if missing:
            raise DataError(f"each of several denoisers must have a mode token, {', '.join(missing)} has none")

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with all that changes a sample or the order of samples."""
        parts = (
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
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def prefetch(self, index: int) -> None:
        """Have what sample ``index`` is made of fetched, where the tokens lie in an object store."""
        prefetch_pieces(self.token_file, self._windows.pieces(index))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            DataError: it cannot be read; names the sample, the document and the place in the file.
        """
        pieces = self._windows.pieces(index)
        text = self._windows.read(index, pieces)
        words = random_words(num_words(self.raw_length) + 1, "spans", *self._key, int(index))
        denoiser = self.denoisers[int(np.searchsorted(self._shares, words[-1] / 2.0**64, "right"))]
        sizes = [piece.length for piece in pieces] if self.reset_attention_mask else [self.raw_length]
        pair = cut_out(text, draw_spans(sizes, denoiser, words), self._sentinels)
        mode = denoiser.kind if has_modes(self.denoisers) else None
        return sample(pair, self.tokens, self.enc_seq_length, self.dec_seq_length, mode)


# What T5's samples hold beside the text, and random ones.


def special_tokens(tokenizer: Any, config: Config) -> T5Tokens:
    """Return the ids that stand behind those of the text: sentinels, modes, start."""
    return t5_tokens(tokenizer, config.own.vocab_extra_ids, config.own.kinds)


def random_dataset(config: Config, texts: Any, tokens: T5Tokens, seed: int) -> T5Dataset:
    """Return samples of ``texts``, as a token file has them."""
    own = config.own
    return T5Dataset(
        texts,
        documents=(0, texts.num_documents),
        enc_seq_length=own.enc_seq_length,
        dec_seq_length=own.dec_seq_length,
        denoisers=own.kinds,
        tokens=tokens,
        seed=seed,
        reset_attention_mask=config.data.reset_attention_mask,
    )


DATA = DataParts(special_tokens=special_tokens, random_dataset=random_dataset)


# What the model takes of a sample.


def t5_fields(
    inputs: Tensor,
    targets: Tensor,
    enc_segments: Tensor,
    dec_segments: Tensor,
    *,
    tokens: T5Tokens,
    has_segments: bool,
) -> dict[str, Tensor | None]:
    """Return enc_tokens, dec_tokens, labels, loss_mask, enc_segments and dec_segments of a micro-batch.

    Shapes:
        inputs, enc_segments [b, s_e]; targets, dec_segments [b, s_d]
        results [b, s_e] and [b, s_d]; loss_mask is float32, both segments are None without ``has_segments``

    The decoder reads its targets one place late, behind ``start_id`` at the start of each document. Padding, whose
    segment is -1, has no loss; behind the last target it needs no segments, for nothing before it sees it.
    """
    is_start = dec_segments != dec_segments.roll(1, dims=1)
    is_start[:, 0] = True
    late = targets.roll(1, dims=1).masked_fill(is_start, tokens.start_id)
    is_padding = dec_segments < 0
    return {
        "enc_tokens": inputs,
        "dec_tokens": late.masked_fill(is_padding, tokens.pad_id),
        "labels": targets,
        "loss_mask": (~is_padding).float(),
        "enc_segments": enc_segments if has_segments else None,
        "dec_segments": dec_segments if has_segments else None,
    }
