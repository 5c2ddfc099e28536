"""Train a vocabulary: byte-level BPE or WordPiece (``tokenizers``), or unigram (``sentencepiece``).

| model | file | text outside the vocabulary | memory in addition to the text being read |
|---|---|---|---|
| bpe | JSON | none: the vocabulary has all bytes | the distinct words of the text, up to a bound |
| wordpiece | JSON | ``[UNK]`` | the same; a Chinese character is a word |
| unigram | .model | encoded as bytes | about 20 times the text |

In scripts without spaces, nearly every word is distinct, and the trainer needs about 80 bytes per byte of these words.
If this would exceed the bound, the words are sampled: frequent words are retained and counted, and a random part of the
rare words represents all of them.

The same texts in the same order produce the same file, given the same version of the library and the same bound.
"""

from __future__ import annotations

import io
import json
import random
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megatron import log
from megatron.errors import DataError
from megatron.tokenizer.known_words import SPACE
from megatron.tokenizer.train_progress import TrainingProgress

EOD = "<|endoftext|>"
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUM_BYTES = 256
_MAX_SENTENCE_BYTES = 1 << 14
_MAX_WORD_CHARS = 100
_MAX_UNKNOWN_SHARE = 1 / 4000
"""Share of a text's characters that may be missing in a WordPiece vocabulary that has room for them."""
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
BYTE_WORD = re.compile(f"'(?:[sdmt]|ll|ve|re)| ?[^\\W_]+| ?(?:[^{SPACE}\\w]|_)+|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+")
"""GPT-2's words, except that adjacent letters and digits form one word, which the library splits later."""
_BERT_WORD = re.compile(f"[{_HAN}]|[^{_HAN}\\t\\n\\r \\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+")
_BYTES_FOR_A_BYTE = 80
_BYTES_FOR_A_WORD = 150
_BYTES_FOR_A_TOKEN = 10_000
_MIN_MEMORY_BYTES = 80e6
_MEMORY_FOR_A_BYTE = 2.7
_UNIGRAM_MEMORY_FOR_A_BYTE = 20
_UNIGRAM_TOKEN_LENGTH = 16
"""SentencePiece's default."""
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""The memory limit, the used memory and the reclaimable part of it, for control groups of version 2 and 1."""
_KEEP_PROBABILITY = 0.9
_MAX_REPEATED = 1000


def special_names(special_tokens: Sequence[str] = (), num_sentinels: int = 0) -> list[str]:
    """List all control tokens by name: end of document, ``special_tokens``, and T5's ``<extra_id_0>``, ...

    Raises:
        DataError: a name is empty, contains white space, or occurs twice.
    """
    names = [EOD, *(name for name in special_tokens if name != EOD)]
    names += [f"<extra_id_{idx}>" for idx in range(num_sentinels)]
    for name in names:
        if not name or name.split() != [name]:
            raise DataError(f"--special-tokens must be names without blanks, got {name!r}")
        if names.count(name) > 1:
            raise DataError(f"--special-tokens must differ from each other and from the sentinels, got {name!r} twice")
    return names


class WordCounts:
    """Occurrence counts by word, in bounded memory.

    While all words fit, the counts are exact. Otherwise, each occurrence of a new word is added with the probability
    ``rate``, which is lowered as needed, and further occurrences are counted. A word with the count c then represents
    ``c + 1 / rate - 1`` occurrences; the expected sum over any set of words is exact.

    Args:
        pattern: regular expression for a word. A match may contain several of the library's words, but not vice versa.
        most_bytes: bound on the estimated memory that a trainer needs for the words.
        least_bytes, bytes_for_a_byte: the bound is further limited to ``bytes_for_a_byte`` per byte read so far, but at
            least ``least_bytes``.

    Source: Gibbons and Matias 1998, "New sampling-based summary statistics", section 3 (counting samples).
    """

    def __init__(
        self, pattern: re.Pattern[str], most_bytes: float, least_bytes: float, bytes_for_a_byte: float
    ) -> None:
        self._pattern, self._most_bytes = pattern, most_bytes
        self._least_bytes, self._bytes_for_a_byte = least_bytes, bytes_for_a_byte
        self._counts: dict[str, int] = {}
        self._random, self._draws = random.Random(0), np.random.default_rng(0)
        self._seen_bytes = 0
        self.rate = 1.0
        self.held_bytes = 0
        """Estimated memory that a trainer needs for the stored words."""

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def bound(self) -> float:
        """The current bound on ``held_bytes``."""
        return min(self._most_bytes, max(self._least_bytes, self._bytes_for_a_byte * self._seen_bytes))

    def add(self, text: str) -> None:
        """Count the words in ``text``."""
        counts, draw = self._counts, self._random.random
        self._seen_bytes += len(text.encode())
        bound = self.bound
        # findall() would create a list that is larger than the text.
        for word in map(re.Match.group, self._pattern.finditer(text)):
            count = counts.get(word)
            if count is not None:
                counts[word] = count + 1
            elif self.rate == 1 or draw() < self.rate:
                counts[word] = 1
                self.held_bytes += _estimated_bytes(word)
                while self.held_bytes > bound:
                    self._thin()
                    counts = self._counts

    def _thin(self) -> None:
        """Lower the rate, and remove occurrences that would not have been added at the new rate."""
        self.rate *= _KEEP_PROBABILITY
        counts = np.fromiter(self._counts.values(), np.int64, len(self._counts))
        is_removed = self._draws.random(len(counts)) >= _KEEP_PROBABILITY
        counts -= is_removed * self._draws.geometric(self.rate, len(counts))
        remaining = zip(self._counts, counts.tolist(), strict=True)
        self._counts = {word: count for word, count in remaining if count > 0}
        self.held_bytes = sum(map(_estimated_bytes, self._counts))

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield each word with the occurrence count that it represents."""
        unseen = round(1 / self.rate) - 1
        yield from ((word, count + unseen) for word, count in self._counts.items())

    def clear(self) -> None:
        """Remove all words."""
        self._counts = {}


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (EOD,),
    memory_bytes: int | None = None,
    max_token_length: int | None = None,
) -> bytes:
    """Train a byte-level BPE and return the ``tokenizers`` JSON file. Any text can be encoded and decoded losslessly.

    The control tokens have the first ids, followed by the bytes.

    Args:
        memory_bytes: approximate memory for the words; if it is insufficient, the words are sampled. Default: half the
            free memory, limited to the largest of 2.7 times the text, 10 kB per vocabulary token, and 80 MB.
        max_token_length: maximum token length in bytes, at least 2; control tokens are exempt. None: no limit. A
            Chinese character has 3 bytes, and the space before a word 1.

    Raises:
        DataError: ``vocab_size`` is too small for the 256 bytes and the control tokens.
    """
    _check_vocab_size(vocab_size, _NUM_BYTES, "bytes", special)
    with TrainingProgress(f"a vocabulary of {vocab_size} tokens (bpe)") as progress:
        counts = _count_words(progress.reading(texts), BYTE_WORD, vocab_size, memory_bytes)
        return _bpe_of(counts, vocab_size, special, max_token_length)


def _bpe_of(counts: WordCounts, vocab_size: int, special: Sequence[str], max_token_length: int | None) -> bytes:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        # the limit of the library is exclusive
        max_token_length=None if max_token_length is None else max_token_length + 1,
    )
    library.train_from_iterator(_repeated_then_cleared(counts), trainer)
    return library.to_str(pretty=True).encode() + b"\n"


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (EOD,),
    memory_bytes: int | None = None,
    max_token_length: int | None = None,
) -> bytes:
    """Train BERT's WordPiece, cased, and return the ``tokenizers`` JSON file.

    BERT's five control tokens have the first ids, followed by ``special``. White space is not encoded, so decoding does
    not restore the text. The vocabulary contains the most frequent characters: enough to cover all but 1 in 4,000
    characters of the text, and at least half as many as there are tokens other than control tokens. If the words leave
    room, more characters are added.

    Args:
        memory_bytes: see ``train_bpe``.
        max_token_length: must be None, because the library has no limit for WordPiece, in which a Chinese token is one
            character.

    Raises:
        DataError: ``vocab_size`` is too small for the control tokens and a character, or ``max_token_length`` is given.
    """
    if max_token_length is not None:
        raise DataError(
            f"--max-token-length ({max_token_length}) is not supported with --model wordpiece, in which each Chinese "
            "character is a token. Remove it, or use --model bpe or unigram"
        )
    names = [*WORDPIECE_TOKENS, *(name for name in special if name not in WORDPIECE_TOKENS)]
    _check_vocab_size(vocab_size, 2, "characters", names)
    with TrainingProgress(f"a vocabulary of {vocab_size} tokens (wordpiece)") as progress:
        counts = _count_words(progress.reading(texts), _BERT_WORD, vocab_size, memory_bytes)
        return _wordpiece_of(counts, vocab_size, names)


def _wordpiece_of(counts: WordCounts, vocab_size: int, names: Sequence[str]) -> bytes:
    characters, within, num_characters = _alphabet(counts, vocab_size - len(names))
    while True:
        library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=_MAX_WORD_CHARS))
        library.normalizer = normalizers.BertNormalizer(lowercase=False)
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece()
        chosen = characters[:num_characters]
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            # otherwise, the library assigns ids to characters within words in a different order each time
            special_tokens=[*names, *(f"##{character}" for character in chosen if character in within)],
            initial_alphabet=chosen,
            limit_alphabet=num_characters,
            show_progress=False,
        )
        # a word of one character has nothing to merge, so its count does not matter
        words = ((word, count if word[1:] else 1) for word, count in counts.items())
        library.train_from_iterator(_repeated(words), trainer)
        num_missing = vocab_size - library.get_vocab_size()
        if num_missing <= 0 or num_characters == len(characters):
            fields = json.loads(library.to_str())
            fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] in names]
            return json.dumps(fields, ensure_ascii=False, indent=2).encode() + b"\n"
        num_characters = min(num_characters + num_missing, len(characters))


def train_unigram(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (EOD,),
    memory_bytes: int | None = None,
    max_token_length: int | None = None,
) -> bytes:
    """Train a SentencePiece unigram model, with byte fallback for unknown characters, and return its ``.model`` file.

    Args:
        memory_bytes: available memory; a warning is logged if the text needs more, as the library stores all of it.
        max_token_length: maximum token length in characters; None: SentencePiece's default, 16.

    Raises:
        DataError: there is too little text, or ``vocab_size`` is too small.
    """
    model = io.BytesIO()
    errors: list[BaseException] = []
    try:
        with TrainingProgress(f"a vocabulary of {vocab_size} tokens (unigram)") as progress:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_sentences(
                    _warn_if_too_large(_record_errors(progress.reading(texts), errors), memory_bytes)
                ),
                model_writer=model,
                model_type="unigram",
                vocab_size=vocab_size,
                control_symbols=list(special),
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                split_by_unicode_script=True,
                max_sentence_length=_MAX_SENTENCE_BYTES,
                num_threads=1,
                minloglevel=2,
                max_sentencepiece_length=max_token_length or _UNIGRAM_TOKEN_LENGTH,
            )
    except (RuntimeError, OSError) as error:
        if errors:  # the library converts an error of the corpus to text; raise the original error
            raise errors[0] from None
        raise DataError(
            f"--vocab-size {vocab_size} cannot be trained on this text; SentencePiece reports: {error}"
        ) from error
    return model.getvalue()


MODELS: dict[str, Callable[..., bytes]] = {
    "bpe": train_bpe,
    "unigram": train_unigram,
    "wordpiece": train_wordpiece,
}


def _estimated_bytes(word: str) -> int:
    return _BYTES_FOR_A_WORD + _BYTES_FOR_A_BYTE * len(word.encode())


def _count_words(
    texts: Iterable[str], pattern: re.Pattern[str], vocab_size: int, memory_bytes: int | None
) -> WordCounts:
    """Count the words in ``texts``; log a message if they had to be sampled."""
    if memory_bytes is None:
        least_bytes = max(_MIN_MEMORY_BYTES, _BYTES_FOR_A_TOKEN * vocab_size)
        counts = WordCounts(pattern, free_memory_bytes() / 2, least_bytes, _MEMORY_FOR_A_BYTE)
    else:
        counts = WordCounts(pattern, memory_bytes, memory_bytes, 0)
    for text in texts:
        counts.add(text)
    if counts.rate < 1:
        log.info(
            f"the distinct words of the text do not fit into {counts.bound / 1e6:.0f} MB of memory: training uses "
            f"{len(counts)} of them, the frequent ones and {counts.rate:.1%} of the rare ones. Increase --memory-bytes "
            "to use more"
        )
    return counts


def _repeated(counts: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Yield lists that contain each word as often as its count."""
    for word, count in counts:
        num_full_lists, remainder = divmod(count, _MAX_REPEATED)
        yield from repeat([word] * _MAX_REPEATED, num_full_lists)
        yield [word] * remainder


def _repeated_then_cleared(counts: WordCounts) -> Iterator[list[str]]:
    """Yield each word as often as its count, then free ``counts`` before the trainer's peak memory use."""
    yield from _repeated(counts.items())
    counts.clear()


def _alphabet(counts: WordCounts, room: int) -> tuple[list[str], set[str], int]:
    """Return (characters that fit into a WordPiece vocabulary, characters within words, initial character count).

    The characters are sorted by descending frequency. A character that occurs within words (never a Chinese one) needs
    two tokens.
    """
    totals: Counter[str] = Counter()
    within: set[str] = set()
    for word, count in counts.items():
        is_within_word = False
        for character in word:
            totals[character] += count
            is_mark = character in string.punctuation or unicodedata.category(character)[0] == "P"
            if is_within_word and not is_mark:
                within.add(character)
            is_within_word = not is_mark
    # BERT drops control characters.
    ordered = [pair for pair in totals.most_common() if unicodedata.category(pair[0])[0] != "C"]
    characters, remaining_room = [], room
    for character, _ in ordered:
        size = 1 + (character in within)
        if size <= remaining_room:
            characters.append(character)
            remaining_room -= size
    num_known = (1 - _MAX_UNKNOWN_SHARE) * totals.total()
    num_needed = 1 + sum(total < num_known for total in accumulate(count for _, count in ordered))
    return characters, within, min(max(room // 2, num_needed), len(characters))


def free_memory_bytes() -> int:
    """Return the available memory on the node, or in the control group (container) if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used, files in _CONTROL_GROUPS:
        try:
            limit_text, used_bytes = Path(limit).read_text().strip(), int(Path(used).read_text())
            stat = dict(line.split() for line in Path(used).with_name("memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit_text != "max":
            free = min(free, max(int(limit_text) - used_bytes + int(stat[files]), 0))
    return free


def _warn_if_too_large(texts: Iterable[str], memory_bytes: int | None) -> Iterator[str]:
    """Yield ``texts``, and warn once when unigram will need more memory than is available."""
    bound = free_memory_bytes() if memory_bytes is None else memory_bytes
    num_bytes = 0
    for text in texts:
        is_within = num_bytes * _UNIGRAM_MEMORY_FOR_A_BYTE <= bound
        num_bytes += len(text.encode())
        if is_within and num_bytes * _UNIGRAM_MEMORY_FOR_A_BYTE > bound:
            log.warning(
                f"unigram needs about {_UNIGRAM_MEMORY_FOR_A_BYTE} times the size of the text in memory; "
                f"{bound / 1e9:.1f} GB are enough for {num_bytes / 1e6:.0f} MB, and the text is larger. Set "
                f"--sample-bytes {num_bytes}"
            )
        yield text


def _check_vocab_size(vocab_size: int, num_needed: int, required_name: str, special: Sequence[str]) -> None:
    smallest = num_needed + len(special)
    if vocab_size < smallest:
        names = ", ".join(special[:6]) + (", ..." if len(special) > 6 else "")
        raise DataError(
            f"--vocab-size must be at least {smallest} ({num_needed} {required_name} and {names}), got {vocab_size}"
        )


def _record_errors(texts: Iterable[str], errors: list[BaseException]) -> Iterator[str]:
    """Yield ``texts``, and append an exception that they raise to ``errors``."""
    try:
        yield from texts
    except (Exception, KeyboardInterrupt) as error:
        errors.append(error)
        raise


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines, split into parts short enough for the trainer, which skips longer lines."""
    step = _MAX_SENTENCE_BYTES // 4
    for text in texts:
        for line in text.splitlines():
            yield from (line[start : start + step] for start in range(0, len(line), step))
