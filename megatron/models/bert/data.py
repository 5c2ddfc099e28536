"""BERT samples: special tokens, masking, segment pairs, and the dataset builder."""

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
from megatron.data.dataset_builder import OpenCorpus, SplitDatasets, build_datasets
from megatron.data.documents import Documents, DocumentSlice, count_documents, documents_key, longest_document
from megatron.data.permutation import random_words
from megatron.data.sample_index import SampleIndex, TokenSource, prefetch_slices
from megatron.errors import DataError
from megatron.models.parts import DataParts

# BERT's special tokens, from the tokenizer or appended to its vocabulary.

TOKEN_NAMES = {
    "cls_id": ("[CLS]", "<cls>", "<|cls|>", "<s>"),
    "sep_id": ("[SEP]", "<sep>", "<|sep|>", "</s>"),
    "mask_id": ("[MASK]", "<mask>", "<|mask|>"),
    "pad_id": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
}
"""Candidate names of each special token; the first one in the vocabulary is used."""


class Vocabulary(Protocol):
    """The part of a tokenizer that BERT uses; implemented by ``megatron.tokenizer.Tokenizer``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    @property
    def unk_id(self) -> int | None: ...


@dataclass(frozen=True)
class BertTokens:
    """Ids of BERT's special tokens.

    Args:
        text_vocab_size: upper bound of text ids.
        control_ids: ids below ``text_vocab_size`` that are never masked and never substituted for a word, such as
            document separators, in ascending order. The token for unknown words is not one of them.
    """

    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    text_vocab_size: int
    control_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Minimum vocabulary size of the model."""
        return max(self.text_vocab_size, 1 + max(self.cls_id, self.sep_id, self.mask_id, self.pad_id))

    @cached_property
    def is_word(self) -> np.ndarray:
        """bool[text_vocab_size], True for ids of text that are not control tokens."""
        is_word = np.ones(self.text_vocab_size, bool)
        is_word[list(self.control_ids)] = False
        return is_word

    @cached_property
    def word_ids(self) -> np.ndarray:
        """int64, ids of text that are not control tokens."""
        return np.flatnonzero(self.is_word)


def bert_tokens(tokenizer: Vocabulary) -> BertTokens:
    """Find a tokenizer's special tokens; missing ones are appended to the vocabulary in the order of NAMES."""
    control_tokens, vocab_size = tokenizer.control_tokens, tokenizer.vocab_size
    ids: dict[str, int] = {}
    next_id = vocab_size
    for field_name, names in TOKEN_NAMES.items():
        token_id = next((control_tokens[name] for name in names if name in control_tokens), None)
        ids[field_name] = next_id if token_id is None else token_id
        next_id += token_id is None
    control_ids = sorted(
        {token for token in control_tokens.values() if token < vocab_size and token != tokenizer.unk_id}
    )
    return BertTokens(**ids, text_vocab_size=vocab_size, control_ids=tuple(control_ids))


# Masking; the computation is vectorised.
#
# | share of masked tokens | replaced by |
# |---|---|
# | 0.8 | the mask token |
# | 0.1 | a random token, uniform over the vocabulary without control tokens |
# | 0.1 | not replaced |
#
# Source: Devlin et al. 2019, "BERT", section 3.1; whole words: the authors' code of May 2019.

NOT_PREDICTED = -1
"""Label of a token that is not predicted."""
_MASKED, _MASKED_OR_RANDOM = np.uint64(0.8 * 2**64), np.uint64(0.9 * 2**64)
WORDS_PER_TOKEN = 3
"""Random words per token."""


class Masked(NamedTuple):
    """Tokens after masking, and labels: the original token where masked, ``NOT_PREDICTED`` elsewhere. Both int64."""

    tokens: np.ndarray
    labels: np.ndarray


def num_to_mask(length: int, probability: float) -> int:
    """Return the number of tokens to mask in a text of ``length`` tokens: the rounded share, at least 1."""
    return max(1, round(probability * length))


def mask_tokens(
    text: np.ndarray, count: int, words: np.ndarray, tokens: BertTokens, is_start: np.ndarray | None = None
) -> Masked:
    """Mask ``count`` tokens in ``text``, or all tokens that can be masked if there are fewer.

    Args:
        words: random 64-bit words, uint64[3 n].
        is_start: bool[n], True where a word starts; if given, words are masked as a whole. Words with more tokens than
            remain to be masked are skipped, so that slightly fewer tokens may be masked.
    """
    position_keys, action_keys, token_keys = words.reshape(WORDS_PER_TOKEN, len(text))
    is_maskable = tokens.is_word[text]
    positions = (
        _choose_tokens(is_maskable, count, position_keys)
        if is_start is None
        else _choose_whole_words(is_maskable, is_start, count, position_keys)
    )
    labels = np.full(len(text), NOT_PREDICTED, np.int64)
    labels[positions] = text[positions]
    masked_tokens, actions = text.copy(), action_keys[positions]
    random_tokens = tokens.word_ids[token_keys[positions] % np.uint64(len(tokens.word_ids))]
    masked_tokens[positions] = np.where(
        actions < _MASKED, tokens.mask_id, np.where(actions < _MASKED_OR_RANDOM, random_tokens, text[positions])
    )
    return Masked(masked_tokens, labels)


def _choose_tokens(is_maskable: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    positions = np.flatnonzero(is_maskable)
    return positions[keys[positions].argsort(kind="stable")[:count]]


def _choose_whole_words(is_maskable: np.ndarray, is_start: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return the token positions of randomly chosen words, skipping words that no longer fit into ``count`` tokens.

    A control token counts as a separate word and is never chosen.
    """
    is_start = is_start | ~is_maskable
    is_start[0] = True
    is_start[1:] |= ~is_maskable[:-1]
    word_starts = np.flatnonzero(is_start)
    word_lengths = np.diff(word_starts, append=len(is_maskable))
    maskable_words = np.flatnonzero(is_maskable[word_starts])
    order = maskable_words[keys[word_starts[maskable_words]].argsort(kind="stable")]
    chosen_words = order[_select_fitting(word_lengths[order], count)]
    positions: np.ndarray = np.repeat(
        word_starts[chosen_words] - (word_lengths[chosen_words].cumsum() - word_lengths[chosen_words]),
        word_lengths[chosen_words],
    )
    return positions + np.arange(len(positions))


def _select_fitting(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Select indices of ``lengths`` that fit into ``capacity`` when added in order."""
    chosen_ranges, start = [], 0
    while capacity > 0 and start < len(lengths):
        ends = lengths[start:].cumsum()
        num_fitting = int(ends.searchsorted(capacity, "right"))
        chosen_ranges.append(np.arange(start, start + num_fitting))
        capacity -= int(ends[num_fitting - 1]) if num_fitting else 0
        start += num_fitting
        fitting = np.flatnonzero(lengths[start:] <= capacity)
        start = start + int(fitting[0]) if len(fitting) else len(lengths)
    return np.concatenate(chosen_ranges) if chosen_ranges else np.zeros(0, np.int64)


# The arrays of a BERT sample.
#
# | key | type | contents |
# |---|---|---|
# | text | int64[s] | cls, first segment, sep[, second segment, sep], padding |
# | labels | int64[s] | the original token at predicted positions; -1 elsewhere |
# | parts | int32[s] | 0 for the first segment, 1 for the second, each with its sep; -1: padding |
# | is_random | int64[] | 1 if the second segment does not follow the first (a random segment) |

PADDING = -1


def build_sample(
    masked: Masked, boundary: int, is_random: bool, tokens: BertTokens, length: int, has_pairs: bool
) -> dict[str, np.ndarray]:
    """Build the arrays in the table above for a text whose second segment starts at ``boundary``."""
    first, second = 1, len(masked.tokens) + (2 if has_pairs else 1)  # positions of the text and of the last sep
    text, labels = np.full(length, tokens.pad_id, np.int64), np.full(length, NOT_PREDICTED, np.int64)
    segment_ids = np.full(length, PADDING, np.int32)
    for row, values in ((text, masked.tokens), (labels, masked.labels)):
        row[first : first + boundary] = values[:boundary]
        row[first + boundary + 1 : second] = values[boundary:]
    text[0], text[first + boundary], text[second] = tokens.cls_id, tokens.sep_id, tokens.sep_id
    segment_ids[: first + boundary + 1], segment_ids[first + boundary + 1 : second + 1] = 0, 1
    return {"text": text, "labels": labels, "parts": segment_ids, "is_random": np.array(int(is_random), np.int64)}


# BERT samples from ordinary token files; texts are paired and masked when they are read.
#
# A text is a window of the concatenated documents, as in RoBERTa's FULL-SENTENCES. Token files have documents but no
# sentences. The boundary between the segments of a pair is therefore drawn within the document that has the largest
# part of the window; in RoBERTa's SEGMENT-PAIR, too, a segment may be any run of sentences. For half of the samples,
# the second segment is replaced by a random segment: a run of equal length that starts inside a document outside of the
# window. All draws depend on (seed, sample index), so samples differ between epochs and are the same in every layout,
# worker and resumed run.
#
# Source: Devlin et al. 2019, "BERT", section 3.1 and appendix A.2; Liu et al. 2019, "RoBERTa", section 4.2.

MIN_TEXT_LENGTH = 2
"""Tokens of the shortest text: one per segment."""
_MAX_TRIES = 8
_IS_SHORT, _LENGTH, _IS_RANDOM, _BOUNDARY, _POSITIONS, _NUM_SAMPLE_WORDS = (
    0,
    1,
    2,
    3,
    4,
    4 + _MAX_TRIES,
)  # indices of a sample's random words, named by their use, and the number of words


class BertDataset:
    """BERT samples from a token file; sample i is the dictionary that ``build_sample`` returns.

    Any i >= 0 is valid; its epoch is i // samples_per_epoch.

    Args:
        documents: (start, stop) of the documents to use, or their indices in ascending order.
        seq_length: tokens per sample, including special tokens.
        has_pairs: samples have two segments; otherwise one.
        mask_prob: masked share of the text.
        short_seq_prob: share of samples with a text of random length, at least 2 tokens; these samples are padded.
        word_starts: bool[vocabulary], True for tokens that start a word; if given, words are masked as a whole.
        seed: the same on all ranks.
        cache: stores long document orders in files shared by all processes on this host; None: each process keeps them
            in memory.
        draws: as in ``T5Dataset``.

    Raises:
        DataError: the file has fewer tokens than one text or, for pairs, fewer than two documents.
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
            length_flag=f"--seq-length {seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        if has_pairs and count_documents(documents) < 2:
            raise DataError(
                f"{token_file.prefix}: pairs with a random second segment require at least two documents, got "
                f"{count_documents(documents)}. Add documents to this split, or use --bert-no-binary-head."
            )

    @cached_property
    def fingerprint(self) -> str:
        """Short hash that changes with anything that affects samples or their order."""
        starts = None if self.word_starts is None else hashlib.sha256(self.word_starts.tobytes()).hexdigest()
        identity = (
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
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    @cached_property
    def random_share(self) -> float:
        """Approximate share of pairs with a random second segment.

        It is 0.5, or lower if one document makes up nearly all text, because random positions in that document are
        rejected.
        """
        max_document_length = longest_document(self.token_file.document_lengths, self.documents)
        rejected_share = min((max_document_length + self.text_length) / self.num_tokens, 1.0)
        return 0.5 * (1.0 - rejected_share * rejected_share**_MAX_TRIES)

    def num_predicted(self, index: int) -> int:
        """Count the tokens to predict in sample ``index``, without reading it."""
        return num_to_mask(self._text_length(self._random_words(index, _LENGTH + 1)), self.mask_prob)

    def prefetch(self, index: int) -> None:
        """Prefetch the tokens of sample ``index`` if they are in an object store."""
        prefetch_slices(self.token_file, self._windows.slices(index))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            SampleError: the sample cannot be read. The message names sample, document and position in the file.
        """
        words = self._random_words(index, _NUM_SAMPLE_WORDS + WORDS_PER_TOKEN * self.text_length)
        length = self._text_length(words)
        slices = _truncate_slices(self._windows.slices(index), length)
        boundary, is_random = length, False
        if self.has_pairs:
            boundary, is_random, slices = self._draw_pair(index, slices, words)
        text = self._windows.read(index, slices)
        is_start = None
        if self.word_starts is not None:
            is_start = self.word_starts[text]
            is_start[boundary : boundary + 1] = True  # words do not continue in the second segment
        mask_words = words[_NUM_SAMPLE_WORDS : _NUM_SAMPLE_WORDS + WORDS_PER_TOKEN * length]
        masked = mask_tokens(text, num_to_mask(length, self.mask_prob), mask_words, self.tokens, is_start)
        return build_sample(masked, boundary, is_random, self.tokens, self.seq_length, self.has_pairs)

    def _random_words(self, index: int, count: int) -> np.ndarray:
        return random_words(count, "bert", *self._key, int(index))

    def _text_length(self, words: np.ndarray) -> int:
        if _to_unit_interval(words[_IS_SHORT]) >= self.short_seq_prob:
            return self.text_length
        return MIN_TEXT_LENGTH + int(words[_LENGTH]) % (self.text_length - MIN_TEXT_LENGTH + 1)

    def _draw_pair(
        self, index: int, slices: list[DocumentSlice], words: np.ndarray
    ) -> tuple[int, bool, list[DocumentSlice]]:
        """Return (start of the second segment, True if that segment is random, slices of both segments)."""
        length = sum(doc_slice.length for doc_slice in slices)
        start, stop = _longest_slice(slices)
        if stop - start < 2:  # each document has one token, so that any boundary separates two documents
            return length // 2, True, slices
        boundary = start + 1 + int(words[_BOUNDARY]) % (stop - start - 1)
        if _to_unit_interval(words[_IS_RANDOM]) < 0.5:
            epoch, window_documents = int(index) // self.samples_per_epoch, {doc_slice.document for doc_slice in slices}
            for word in words[_POSITIONS : _POSITIONS + _MAX_TRIES].tolist():
                position = word % (self.num_tokens - (length - boundary) + 1)
                random_slices = self._windows.slices_in_epoch(epoch, position, length - boundary)
                if random_slices[0].offset and random_slices[0].document not in window_documents:
                    return boundary, True, _truncate_slices(slices, boundary) + random_slices
        return boundary, False, slices  # also if every try failed because one document has nearly all text


def text_length(seq_length: int, has_pairs: bool) -> int:
    """Return the number of text tokens in a sample of ``seq_length`` tokens."""
    return seq_length - (3 if has_pairs else 2)


def _to_unit_interval(word: np.uint64) -> float:
    return float(word) / 2.0**64


def _truncate_slices(slices: Sequence[DocumentSlice], length: int) -> list[DocumentSlice]:
    """Keep the first ``length`` tokens."""
    truncated_slices = []
    for doc_slice in slices:
        if length <= 0:
            break
        truncated_slices.append(doc_slice._replace(length=min(doc_slice.length, length)))
        length -= doc_slice.length
    return truncated_slices


def _longest_slice(slices: Sequence[DocumentSlice]) -> tuple[int, int]:
    """Find the start and end of the longest slice in the text, the first one if there are several."""
    start, stop, end = 0, 0, 0
    for doc_slice in slices:
        if doc_slice.length > stop - start:
            start, stop = end, end + doc_slice.length
        end += doc_slice.length
    return start, stop


# Functions that ``DATA`` provides: special tokens and random samples.


def special_tokens(tokenizer: Any, config: Config) -> BertTokens:
    """Return a run's special tokens."""
    return bert_tokens(tokenizer)


def random_dataset(config: Config, texts: Any, tokens: BertTokens, seed: int) -> BertDataset:
    """Build samples from the random documents ``texts``, whose ids are below ``texts.vocab_size``."""
    bert_config, word_starts = config.family_config, np.arange(texts.vocab_size) % 3 != 0
    return BertDataset(
        texts,
        documents=(0, texts.num_documents),
        seq_length=config.batch.seq_length,
        tokens=tokens,
        seed=seed,
        has_pairs=bert_config.binary_head,
        mask_prob=bert_config.mask_prob,
        short_seq_prob=bert_config.short_seq_prob,
        word_starts=word_starts if bert_config.whole_word_masking else None,
    )


DATA = DataParts(special_tokens=special_tokens, random_dataset=random_dataset)


# The datasets of a BERT run, with all checks that are possible before training starts.

MIN_RANDOM_SHARE = 0.25
"""Share of random pairs below which a warning is logged: half of the intended share."""


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
    tokenizer_probe: Mapping[str, Any] | None = None,
) -> SplitDatasets:
    """Build training, validation and test samples; None for a split that is not needed.

    Args:
        seq_length, seed, has_pairs, mask_prob, short_seq_prob, word_starts: as in ``BertDataset``.
        tokens: all token ids in a text must be below its ``text_vocab_size``.
        tokenizer_identity, tokenizer_probe: the tokenizer's identity and probe, compared with those in the corpus's
            sidecar file, if any.

    Raises:
        DataError: the data fail a check (D02, D09-D14 in docs/reliability.md), paths or weights are invalid, or, for
            pairs, a split has only one document.
    """

    def open_corpus(prefix: str, cache: IndexCache) -> OpenCorpus:
        token_file = paths.open_token_file(prefix, cache)
        dataset_checks.check_tokenizer(token_file, tokenizer_identity, tokenizer_probe)
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
            if has_pairs and samples.random_share < MIN_RANDOM_SHARE:
                log.info(
                    f"warning: {prefix}: one document contains nearly all text of a split, so only about "
                    f"{samples.random_share:.0%} of its pairs have a random second segment. Add documents to it, "
                    "or use --bert-no-binary-head"
                )
            return samples

        sample_tokens, length_flag = text_length(seq_length, has_pairs), f"--seq-length {seq_length}"
        return OpenCorpus(token_file, token_file.fingerprint, make, sample_tokens, length_flag, has_random_draws=True)

    return build_datasets(paths, needed, open_corpus, tokenizer_identity, lambda parts: seq_length)
