"""Training a vocabulary: byte-level BPE or WordPiece (``tokenizers``), or unigram (``sentencepiece``).

| model | file | what is not in the vocabulary | memory beside the text being read |
|---|---|---|---|
| bpe | JSON | nothing: all bytes are | the different words of the text, up to a bound |
| wordpiece | JSON | ``[UNK]`` | the same; a Chinese character is a word |
| unigram | .model | written as bytes | some 20 times the text |

Scripts without blanks have nearly as many different words as words, and the trainer takes about 80 bytes for each byte
of them. Where that would pass the bound, the words are sampled: a frequent word is kept and counted, of the rare ones a
share stands for all.

The same texts in the same order give the same file, with the same version of the library and the same bound.
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
_MOST_UNKNOWN = 1 / 4000
"""Share of a text's characters that may stay out of a WordPiece vocabulary with room for them."""
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
BYTE_WORD = re.compile(f"'(?:[sdmt]|ll|ve|re)| ?[^\\W_]+| ?(?:[^{SPACE}\\w]|_)+|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+")
"""GPT-2's words, but for letters and digits that stand together: the library parts those."""
_BERT_WORD = re.compile(f"[{_HAN}]|[^{_HAN}\\t\\n\\r \\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+")
_BYTES_FOR_A_BYTE = 80
_BYTES_FOR_A_WORD = 150
_BYTES_FOR_A_TOKEN = 10_000
_LEAST_MEMORY = 80e6
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
"""The limit, what is used of it, and the part of that which the kernel gives back, in versions 2 and 1."""
_KEPT = 0.9
_MOST_REPEATED = 1000


def special_names(special_tokens: Sequence[str] = (), num_sentinels: int = 0) -> list[str]:
    """Return the names of all control tokens: the end of a document, those asked for, T5's ``<extra_id_0>`` and so on.

    Raises:
        DataError: a name is empty, holds a blank, or is there twice.
    """
    names = [EOD, *(name for name in special_tokens if name != EOD)]
    names += [f"<extra_id_{number}>" for number in range(num_sentinels)]
    for name in names:
        if not name or name.split() != [name]:
            raise DataError(f"--special-tokens must be names without blanks, got {name!r}")
        if names.count(name) > 1:
            raise DataError(f"--special-tokens must differ from each other and from the sentinels, got {name!r} twice")
    return names


class WordCounts:
    """The words of texts with how often each comes, in bounded memory.

    While all words fit, each count is exact. When they do not, a word is taken up with the probability ``rate``, which
    falls as far as it must, each time it comes; from then on it is counted. A word in the table with the count c then
    stands for ``c + 1 / rate - 1``: the sum over any words is right on average.

    Args:
        pattern: what a word is. It may leave words together that the library parts, not the other way round.
        most_bytes: the bound on what a trainer takes for the words, as estimated.
        bytes_for_a_byte: the bound is also this for each byte of the text so far, but at least ``least_bytes``.

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
        """What a trainer takes for the words that are held, as estimated."""

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def bound(self) -> float:
        """What ``held_bytes`` may be after the text so far."""
        return min(self._most_bytes, max(self._least_bytes, self._bytes_for_a_byte * self._seen_bytes))

    def add(self, text: str) -> None:
        """Count the words of ``text``."""
        counts, draw = self._counts, self._random.random
        self._seen_bytes += len(text.encode())
        bound = self.bound
        for word in map(re.Match.group, self._pattern.finditer(text)):  # a list of all would be larger than the text
            count = counts.get(word)
            if count is not None:
                counts[word] = count + 1
            elif self.rate == 1 or draw() < self.rate:
                counts[word] = 1
                self.held_bytes += _bytes_held(word)
                while self.held_bytes > bound:
                    self._thin()
                    counts = self._counts

    def _thin(self) -> None:
        """Let go of what would not have been taken up at a lower rate."""
        self.rate *= _KEPT
        counts = np.fromiter(self._counts.values(), np.int64, len(self._counts))
        is_let_go = self._draws.random(len(counts)) >= _KEPT
        counts -= is_let_go * self._draws.geometric(self.rate, len(counts))
        kept = zip(self._counts, counts.tolist(), strict=True)
        self._counts = {word: count for word, count in kept if count > 0}
        self.held_bytes = sum(map(_bytes_held, self._counts))

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield each word with the count that it stands for."""
        unseen = round(1 / self.rate) - 1
        yield from ((word, count + unseen) for word, count in self._counts.items())

    def clear(self) -> None:
        """Let go of all words."""
        self._counts = {}


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (EOD,),
    memory_bytes: int | None = None,
    max_token_length: int | None = None,
) -> bytes:
    """Return a ``tokenizers`` JSON file of byte-level BPE; any text can be encoded and decoded without loss.

    Control tokens come first, then the bytes.

    Args:
        memory_bytes: about so much memory may be taken for words; they are sampled where that does not do. By
            default half of what is free, but not more than the largest of 2.7 times the text, 10 kB for each token
            of the vocabulary, and 80 MB.
        max_token_length: bytes of the longest token, at least 2, control tokens aside; None for no limit. A Chinese
            character takes 3 bytes, the space before a word 1.

    Raises:
        DataError: ``vocab_size`` has no room for the 256 bytes and the control tokens.
    """
    _check_room(vocab_size, _NUM_BYTES, "bytes", special)
    with TrainingProgress(f"a vocabulary of {vocab_size} tokens (bpe)") as progress:
        counts = _counted(progress.reading(texts), BYTE_WORD, vocab_size, memory_bytes)
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
        # the library joins pieces whose length is less than its limit
        max_token_length=None if max_token_length is None else max_token_length + 1,
    )
    library.train_from_iterator(_last(counts), trainer)
    return library.to_str(pretty=True).encode() + b"\n"


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (EOD,),
    memory_bytes: int | None = None,
    max_token_length: int | None = None,
) -> bytes:
    """Return a ``tokenizers`` JSON file of BERT's WordPiece, cased: BERT's five tokens first, then ``special``.

    Blanks are not kept, so text does not come back as it was. The most frequent characters are in the vocabulary: all
    but 1 of 4,000 as the text has them, or half as many as there is room if that is more, and further ones where words
    leave room.

    Args:
        memory_bytes: as for ``train_bpe``.
        max_token_length: must be None: the library has no limit for WordPiece, whose Chinese tokens are one character.

    Raises:
        DataError: ``vocab_size`` has no room for the control tokens and a character; ``max_token_length`` is given.
    """
    if max_token_length is not None:
        raise DataError(
            f"--max-token-length ({max_token_length}) is not supported with --model wordpiece, in which each Chinese "
            "character is a token. Leave it out, or use --model bpe or unigram"
        )
    names = [*WORDPIECE_TOKENS, *(name for name in special if name not in WORDPIECE_TOKENS)]
    _check_room(vocab_size, 2, "characters", names)
    with TrainingProgress(f"a vocabulary of {vocab_size} tokens (wordpiece)") as progress:
        counts = _counted(progress.reading(texts), _BERT_WORD, vocab_size, memory_bytes)
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
            # left to itself the library numbers characters within words in another order each time
            special_tokens=[*names, *(f"##{character}" for character in chosen if character in within)],
            initial_alphabet=chosen,
            limit_alphabet=num_characters,
            show_progress=False,
        )
        # a word of one character has nothing to join, so that it need not be repeated
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
    """Return a SentencePiece unigram model; bytes stand in for characters that it does not have.

    Args:
        memory_bytes: a warning comes where the text will take more; the library keeps all of it.
        max_token_length: characters of the longest token; None for SentencePiece's default, 16.

    Raises:
        DataError: the text is too little, or ``vocab_size`` too small.
    """
    model = io.BytesIO()
    errors: list[BaseException] = []
    try:
        with TrainingProgress(f"a vocabulary of {vocab_size} tokens (unigram)") as progress:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_sentences(_weighed(_kept(progress.reading(texts), errors), memory_bytes)),
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
        if errors:  # the library has made a text of the corpus's own error
            raise errors[0] from None
        raise DataError(
            f"--vocab-size {vocab_size} cannot be trained on this text; SentencePiece says: {error}"
        ) from error
    return model.getvalue()


MODELS: dict[str, Callable[..., bytes]] = {
    "bpe": train_bpe,
    "unigram": train_unigram,
    "wordpiece": train_wordpiece,
}


def _bytes_held(word: str) -> int:
    return _BYTES_FOR_A_WORD + _BYTES_FOR_A_BYTE * len(word.encode())


def _counted(texts: Iterable[str], pattern: re.Pattern[str], vocab_size: int, memory_bytes: int | None) -> WordCounts:
    """Return the words of ``texts``, and say so if they are a sample."""
    if memory_bytes is None:
        least_bytes = max(_LEAST_MEMORY, _BYTES_FOR_A_TOKEN * vocab_size)
        counts = WordCounts(pattern, free_memory_bytes() / 2, least_bytes, _MEMORY_FOR_A_BYTE)
    else:
        counts = WordCounts(pattern, memory_bytes, memory_bytes, 0)
    for text in texts:
        counts.add(text)
    if counts.rate < 1:
        log.info(
            f"the text has more different words than fit into {counts.bound / 1e6:.0f} MB of memory: {len(counts)} are "
            f"trained on, the frequent ones and {counts.rate:.1%} of the rare; --memory-bytes gives more"
        )
    return counts


def _repeated(counts: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Yield each word as often as it counts, in lists."""
    for word, count in counts:
        whole, rest = divmod(count, _MOST_REPEATED)
        yield from repeat([word] * _MOST_REPEATED, whole)
        yield [word] * rest


def _last(counts: WordCounts) -> Iterator[list[str]]:
    """Yield each word as often as it counts, and let go of all before the trainer's peak."""
    yield from _repeated(counts.items())
    counts.clear()


def _alphabet(counts: WordCounts, room: int) -> tuple[list[str], set[str], int]:
    """Return the characters that fit into a WordPiece vocabulary, those within words, and how many it gets at first.

    The frequent ones come first. A character comes twice where it goes on with a word, which Chinese ones never do.
    """
    totals: Counter[str] = Counter()
    within: set[str] = set()
    for word, count in counts.items():
        goes_on = False
        for character in word:
            totals[character] += count
            is_mark = character in string.punctuation or unicodedata.category(character)[0] == "P"
            if goes_on and not is_mark:
                within.add(character)
            goes_on = not is_mark
    ordered = [pair for pair in totals.most_common() if unicodedata.category(pair[0])[0] != "C"]  # BERT drops those
    characters, room_left = [], room
    for character, _ in ordered:
        size = 1 + (character in within)
        if size <= room_left:
            characters.append(character)
            room_left -= size
    known = (1 - _MOST_UNKNOWN) * totals.total()
    num_needed = 1 + sum(total < known for total in accumulate(count for _, count in ordered))
    return characters, within, min(max(room // 2, num_needed), len(characters))


def free_memory_bytes() -> int:
    """Return the memory that may still be had: of the node, or of the control group (container) where that has less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used, files in _CONTROL_GROUPS:
        try:
            most, taken = Path(limit).read_text().strip(), int(Path(used).read_text())
            stat = dict(line.split() for line in Path(used).with_name("memory.stat").read_text().splitlines())
        except OSError:
            continue
        if most != "max":
            free = min(free, max(int(most) - taken + int(stat[files]), 0))
    return free


def _weighed(texts: Iterable[str], memory_bytes: int | None) -> Iterator[str]:
    """Yield ``texts``, and warn once when unigram will take more memory for them than there is."""
    bound = free_memory_bytes() if memory_bytes is None else memory_bytes
    num_bytes = 0
    for text in texts:
        is_within = num_bytes * _UNIGRAM_MEMORY_FOR_A_BYTE <= bound
        num_bytes += len(text.encode())
        if is_within and num_bytes * _UNIGRAM_MEMORY_FOR_A_BYTE > bound:
            log.warning(
                f"unigram takes some {_UNIGRAM_MEMORY_FOR_A_BYTE} times the text in memory; {bound / 1e9:.1f} GB are "
                f"enough for {num_bytes / 1e6:.0f} MB and the text has more. Give --sample-bytes {num_bytes}"
            )
        yield text


def _check_room(vocab_size: int, num_needed: int, what: str, special: Sequence[str]) -> None:
    smallest = num_needed + len(special)
    if vocab_size < smallest:
        shown = ", ".join(special[:6]) + (", ..." if len(special) > 6 else "")
        raise DataError(f"--vocab-size must be at least {smallest} ({num_needed} {what} and {shown}), got {vocab_size}")


def _kept(texts: Iterable[str], errors: list[BaseException]) -> Iterator[str]:
    """Yield ``texts``, and put the error that ends them into ``errors``."""
    try:
        yield from texts
    except (Exception, KeyboardInterrupt) as error:
        errors.append(error)
        raise


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines short enough for the trainer, which leaves out longer ones."""
    step = _MAX_SENTENCE_BYTES // 4
    for text in texts:
        for line in text.splitlines():
            yield from (line[start : start + step] for start in range(0, len(line), step))
