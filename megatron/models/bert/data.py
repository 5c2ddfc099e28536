"""BertDataset: control tokens, masking, pairs, batch fields, builder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron import log
from megatron.config import Config
from megatron.data import dataset_checks
from megatron.data.blend_paths import BlendPaths
from megatron.data.cache import IndexCache
from megatron.data.dataset_builder import OpenCorpus, Three, build_datasets
from megatron.data.documents import Documents, Piece, count_of, documents_key, longest_of
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.permutation import random_words
from megatron.data.sample_index import SampleIndex, TokenSource, prefetch_pieces
from megatron.errors import DataError
from megatron.models.parts import DataParts

# The control tokens that BERT's samples are framed and masked with: the tokenizer's own, or appended ones.

NAMES = {
    "cls_id": ("[CLS]", "<cls>", "<|cls|>", "<s>"),
    "sep_id": ("[SEP]", "<sep>", "<|sep|>", "</s>"),
    "mask_id": ("[MASK]", "<mask>", "<|mask|>"),
    "pad_id": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
}
"""Which names each may have, the first that the vocabulary has counts."""


class Vocabulary(Protocol):
    """What BERT must know of a tokenizer: ``megatron.tokenizer.Tokenizer``, or what stands in for one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    @property
    def unk_id(self) -> int | None: ...


@dataclass(frozen=True)
class BertTokens:
    """Where BERT's control tokens lie.

    Args:
        text_vocab_size: ids of text are below it.
        control_ids: those below it that are never masked and never put in place of a word, ascending: separators of
            documents and the like. The token for unknown words is none of them.
    """

    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    text_vocab_size: int
    control_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """How many ids the model must have."""
        return max(self.text_vocab_size, 1 + max(self.cls_id, self.sep_id, self.mask_id, self.pad_id))

    @cached_property
    def is_word(self) -> np.ndarray:
        """bool[text_vocab_size], whether an id is of text and no control token."""
        found = np.ones(self.text_vocab_size, bool)
        found[list(self.control_ids)] = False
        return found

    @cached_property
    def word_ids(self) -> np.ndarray:
        """int64, the ids of text."""
        return np.flatnonzero(self.is_word)


def bert_tokens(tokenizer: Vocabulary) -> BertTokens:
    """Return the tokenizer's own control tokens, and behind its vocabulary, in the order of NAMES, what it lacks."""
    known, size = tokenizer.control_tokens, tokenizer.vocab_size
    found: dict[str, int] = {}
    top = size
    for field, names in NAMES.items():
        own = next((known[name] for name in names if name in known), None)
        found[field] = top if own is None else own
        top += own is None
    controls = sorted({token for token in known.values() if token < size and token != tokenizer.unk_id})
    return BertTokens(**found, text_vocab_size=size, control_ids=tuple(controls))


# Which tokens of a text are masked, and what stands in their place. All of it works on whole arrays.
#
# | share of what is masked | becomes |
# |---|---|
# | 0.8 | the mask token |
# | 0.1 | a token of the vocabulary, all alike but for control tokens |
# | 0.1 | what it was |
#
# Source: Devlin et al. 2019, "BERT", section 3.1; whole words: the authors' code of May 2019.

NOTHING = -1
"""Label of a token that is not to be predicted."""
_MASKED, _MASKED_OR_RANDOM = np.uint64(0.8 * 2**64), np.uint64(0.9 * 2**64)
DRAWS = 3
"""Random words that a token takes."""


class Masked(NamedTuple):
    """Tokens with some masked, and what these were; ``NOTHING`` elsewhere. int64 both."""

    tokens: np.ndarray
    labels: np.ndarray


def num_to_mask(length: int, probability: float) -> int:
    """Return how many of ``length`` tokens are masked: that share, rounded, and one at least."""
    return max(1, round(probability * length))


def mask(
    text: np.ndarray, count: int, words: np.ndarray, tokens: BertTokens, is_start: np.ndarray | None = None
) -> Masked:
    """Return ``text`` with ``count`` tokens masked, or all that may be where there are fewer.

    Args:
        words: uint64[3 n], random.
        is_start: bool[n], where a word begins; given, words are masked whole. One that has more tokens than are left to
            mask is passed over, so that a few tokens fewer may be masked.
    """
    by_place, by_kind, by_token = words.reshape(DRAWS, len(text))
    may = tokens.is_word[text]
    places = _tokens(may, count, by_place) if is_start is None else _whole_words(may, is_start, count, by_place)
    labels = np.full(len(text), NOTHING, np.int64)
    labels[places] = text[places]
    masked, kind = text.copy(), by_kind[places]
    random = tokens.word_ids[by_token[places] % np.uint64(len(tokens.word_ids))]
    masked[places] = np.where(kind < _MASKED, tokens.mask_id, np.where(kind < _MASKED_OR_RANDOM, random, text[places]))
    return Masked(masked, labels)


def _tokens(may: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    places = np.flatnonzero(may)
    return places[keys[places].argsort(kind="stable")[:count]]


def _whole_words(may: np.ndarray, is_start: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return the places of words in a random order, each taken if it still fits. A control token is a word."""
    is_start = is_start | ~may
    is_start[0] = True
    is_start[1:] |= ~may[:-1]
    firsts = np.flatnonzero(is_start)
    sizes = np.diff(firsts, append=len(may))
    free = np.flatnonzero(may[firsts])
    order = free[keys[firsts[free]].argsort(kind="stable")]
    taken = order[_fitting(sizes[order], count)]
    places: np.ndarray = np.repeat(firsts[taken] - (sizes[taken].cumsum() - sizes[taken]), sizes[taken])
    return places + np.arange(len(places))


def _fitting(sizes: np.ndarray, room: int) -> np.ndarray:
    """Return which of ``sizes``, tried one after the other, find room."""
    found, start = [], 0
    while room > 0 and start < len(sizes):
        ends = sizes[start:].cumsum()
        number = int(ends.searchsorted(room, "right"))
        found.append(np.arange(start, start + number))
        room -= int(ends[number - 1]) if number else 0
        start += number
        smaller = np.flatnonzero(sizes[start:] <= room)
        start = start + int(smaller[0]) if len(smaller) else len(sizes)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


# A BERT sample as the arrays that travel, and what the model takes of a micro-batch of them.
#
# | key | type | holds |
# |---|---|---|
# | text | int64[s] | cls, first segment, sep[, second segment, sep], padding |
# | labels | int64[s] | what a token to predict was; -1 elsewhere |
# | parts | int32[s] | 0 for the first segment, 1 for the second, each with its sep; -1: padding |
# | is_random | int64[] | 1 where the second segment is from elsewhere |

PADDING = -1


def sample(
    masked: Masked, seam: int, is_random: bool, tokens: BertTokens, length: int, has_pairs: bool
) -> dict[str, np.ndarray]:
    """Return the arrays of the table above for a text whose second segment begins at ``seam``."""
    first, second = 1, len(masked.tokens) + (2 if has_pairs else 1)  # places of the text, and of the last sep
    text, labels = np.full(length, tokens.pad_id, np.int64), np.full(length, NOTHING, np.int64)
    parts = np.full(length, PADDING, np.int32)
    for row, values in ((text, masked.tokens), (labels, masked.labels)):
        row[first : first + seam] = values[:seam]
        row[first + seam + 1 : second] = values[seam:]
    text[0], text[first + seam], text[second] = tokens.cls_id, tokens.sep_id, tokens.sep_id
    parts[: first + seam + 1], parts[first + seam + 1 : second + 1] = 0, 1
    return {"text": text, "labels": labels, "parts": parts, "is_random": np.array(int(is_random), np.int64)}


# BERT's samples from the token file that GPT-2 reads too: a text is paired and masked when it is read.
#
# A text is a window of the documents laid end to end, as RoBERTa's FULL-SENTENCES. Token files know documents and no
# sentences, so the seam of a pair is drawn within the document that has most of the window, as a segment of RoBERTa's
# SEGMENT-PAIR may be any run of sentences. Half of the time the second segment is a run of as many tokens from
# elsewhere, which begins within a document that the window does not touch. Everything follows from (seed, index of the
# sample), so it is new in each epoch and the same in every layout, worker and resumed run.
#
# Source: Devlin et al. 2019, "BERT", section 3.1 and appendix A.2; Liu et al. 2019, "RoBERTa", section 4.2.

SHORTEST = 2
"""Tokens of the shortest text: one for each segment."""
_TRIES = 8
_IS_SHORT, _LENGTH, _IS_RANDOM, _SEAM, _PLACES, _HEAD = 0, 1, 2, 3, 4, 4 + _TRIES  # which random word is for what


class BertDataset:
    """Sample i, for any i >= 0, is the dictionary of ``bert_layout``; i // samples_per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        seq_length: tokens of a sample, with what frames it.
        has_pairs: two segments; else one run of text.
        mask_prob: share of the text that is masked.
        short_seq_prob: share of the samples that have a text of any length from 2 on, and are padded.
        word_starts: bool[vocabulary], whether a token begins a word; given, words are masked whole.
        seed: the same on all ranks.
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.
        draws: as ``T5Dataset``.

    Raises:
        DataError: fewer tokens than one text, or for pairs fewer than two documents.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        seq_length: int,
        tokens: BertTokens,
        seed: int,
        has_pairs: bool = True,
        mask_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        word_starts: np.ndarray | None = None,
        cache: IndexCache | None = None,
        draws: str = "",
    ) -> None:
        self.token_file, self.documents, self.seq_length = token_file, documents, seq_length
        self.tokens, self.seed, self.has_pairs = tokens, seed, has_pairs
        self.mask_prob, self.short_seq_prob, self.word_starts = mask_prob, short_seq_prob, word_starts
        self.text_length = text_length(seq_length, has_pairs)
        self._key = (draws, seed) if draws else (seed,)
        self._windows = SampleIndex(
            token_file,
            documents=documents,
            length=self.text_length,
            overlap=0,
            seed=seed,
            asked_by=f"--seq-length {seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        if has_pairs and count_of(documents) < 2:
            raise DataError(
                f"{token_file.prefix}: pairs need two documents, for a second segment from elsewhere, got "
                f"{count_of(documents)}. Give more documents to this split, or use --bert-no-binary-head."
            )

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with all that changes a sample or the order of samples."""
        starts = None if self.word_starts is None else hashlib.sha256(self.word_starts.tobytes()).hexdigest()
        parts = (
            "bert",
            self.token_file.fingerprint,
            documents_key(self.documents),
            self.seq_length,
            self.has_pairs,
            self.mask_prob,
            self.short_seq_prob,
            starts,
            self.tokens,
            self.seed,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def share_of_random(self) -> float:
        """About how many of the pairs have a second segment from elsewhere: half of them, or fewer where one document
        is nearly all of the text, in which places that are drawn mostly fall.
        """
        longest = longest_of(self.token_file.sizes, self.documents)
        beside = min((longest + self.text_length) / self.num_tokens, 1.0)
        return 0.5 * (1.0 - beside * beside**_TRIES)

    def num_predicted(self, index: int) -> int:
        """Return how many tokens of sample ``index`` are to be predicted, without reading it."""
        return num_to_mask(self._length(self._words(index, _LENGTH + 1)), self.mask_prob)

    def prefetch(self, index: int) -> None:
        """Have what sample ``index`` is made of fetched, where the tokens lie in an object store."""
        prefetch_pieces(self.token_file, self._windows.pieces(index))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            DataError: it cannot be read; names the sample, the document and the place in the file.
        """
        words = self._words(index, _HEAD + DRAWS * self.text_length)
        length = self._length(words)
        pieces = _first(self._windows.pieces(index), length)
        seam, is_random = length, False
        if self.has_pairs:
            seam, is_random, pieces = self._paired(index, pieces, words)
        text = self._windows.read(index, pieces)
        is_start = None
        if self.word_starts is not None:
            is_start = self.word_starts[text]
            is_start[seam : seam + 1] = True  # no word goes on in the second segment
        draws = words[_HEAD : _HEAD + DRAWS * length]
        masked = mask(text, num_to_mask(length, self.mask_prob), draws, self.tokens, is_start)
        return sample(masked, seam, is_random, self.tokens, self.seq_length, self.has_pairs)

    def _words(self, index: int, count: int) -> np.ndarray:
        return random_words(count, "bert", *self._key, int(index))

    def _length(self, words: np.ndarray) -> int:
        if _unit(words[_IS_SHORT]) >= self.short_seq_prob:
            return self.text_length
        return SHORTEST + int(words[_LENGTH]) % (self.text_length - SHORTEST + 1)

    def _paired(self, index: int, pieces: list[Piece], words: np.ndarray) -> tuple[int, bool, list[Piece]]:
        """Return where the second segment begins, whether it is from elsewhere, and what both are made of."""
        length = sum(piece.length for piece in pieces)
        start, stop = _longest(pieces)
        if stop - start < 2:  # nothing but documents of one token: any seam parts two
            return length // 2, True, pieces
        seam = start + 1 + int(words[_SEAM]) % (stop - start - 1)
        if _unit(words[_IS_RANDOM]) < 0.5:
            epoch, beside = int(index) // self.samples_per_epoch, {piece.document for piece in pieces}
            for word in words[_PLACES : _PLACES + _TRIES].tolist():
                place = word % (self.num_tokens - (length - seam) + 1)
                found = self._windows.run(epoch, place, length - seam)
                if found[0].offset and found[0].document not in beside:
                    return seam, True, _first(pieces, seam) + found
        return seam, False, pieces  # also where nearly all text is of one document


def text_length(seq_length: int, has_pairs: bool) -> int:
    """Return the tokens of text in a sample of ``seq_length``."""
    return seq_length - (3 if has_pairs else 2)


def _unit(word: np.uint64) -> float:
    return float(word) / 2.0**64


def _first(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """Return the pieces of the first ``length`` tokens."""
    found = []
    for piece in pieces:
        if length <= 0:
            break
        found.append(piece._replace(length=min(piece.length, length)))
        length -= piece.length
    return found


def _longest(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Return where the longest piece, the first of several, begins and ends in the text."""
    start, stop, end = 0, 0, 0
    for piece in pieces:
        if piece.length > stop - start:
            start, stop = end, end + piece.length
        end += piece.length
    return start, stop


# What BERT's samples hold beside the text, and random ones.


def special_tokens(tokenizer: Any, config: Config) -> BertTokens:
    """Return the ids that frame texts and stand for masked tokens."""
    return bert_tokens(tokenizer)


def random_dataset(config: Config, texts: Any, tokens: BertTokens, seed: int) -> BertDataset:
    """Return samples of ``texts``, as a token file has them; ``texts.vocab_size``: ids of text are below it."""
    own, every_third = config.own, np.arange(texts.vocab_size) % 3 != 0
    return BertDataset(
        texts,
        documents=(0, texts.num_documents),
        seq_length=config.batch.seq_length,
        tokens=tokens,
        seed=seed,
        has_pairs=own.binary_head,
        mask_prob=own.mask_prob,
        short_seq_prob=own.short_seq_prob,
        word_starts=every_third if own.whole_word_masking else None,
    )


DATA = DataParts(special_tokens=special_tokens, random_dataset=random_dataset)


# The three data sets of a BERT run, with every check that can be made before training starts.

FEW = 0.25
"""Share of pairs from elsewhere below which the start tells: half of what it should be."""


def build_bert_train_valid_test(
    paths: BlendPaths,
    *,
    seq_length: int,
    tokens: BertTokens,
    seed: int,
    has_pairs: bool = True,
    mask_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    word_starts: np.ndarray | None = None,
    needed: Sequence[bool] = (True, True, True),
    tokenizer_identity: str | None = None,
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Args:
        seq_length, seed, has_pairs, mask_prob, short_seq_prob, word_starts: as ``BertDataset``.
        tokens: every token id of a text must be below its ``text_vocab_size``.
        tokenizer_identity: compared with the one in the sidecar where there is one.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults; paths and weights that cannot be used; a split of one
            document, for pairs.
    """

    def open_corpus(prefix: str, cache: IndexCache) -> OpenCorpus:
        token_file = IndexedDataset(prefix, reader=paths.data_impl, cache=cache)
        dataset_checks.check_tokenizer(token_file, tokenizer_identity)
        dataset_checks.check_token_ids(token_file, tokens.text_vocab_size, cache)

        def make(documents: Documents, draws: str) -> BertDataset:
            samples = BertDataset(
                token_file,
                documents=documents,
                seq_length=seq_length,
                tokens=tokens,
                seed=seed,
                has_pairs=has_pairs,
                mask_prob=mask_prob,
                short_seq_prob=short_seq_prob,
                word_starts=word_starts,
                cache=cache,
                draws=draws,
            )
            if has_pairs and samples.share_of_random < FEW:
                log.info(
                    f"warning: {prefix}: nearly all text of a split is of one document, so that only about "
                    f"{samples.share_of_random:.0%} of its pairs are of two. Give it more documents, or use "
                    "--bert-no-binary-head"
                )
            return samples

        sample_tokens, asked_by = text_length(seq_length, has_pairs), f"--seq-length {seq_length}"
        return OpenCorpus(token_file, token_file.fingerprint, make, sample_tokens, asked_by, is_drawn=True)

    return build_datasets(paths, needed, open_corpus, tokenizer_identity, lambda parts: seq_length)
