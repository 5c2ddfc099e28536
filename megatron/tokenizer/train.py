"""Training a vocabulary: byte-level BPE or WordPiece (``tokenizers``), or unigram (``sentencepiece``).

| model | file | what is not in the vocabulary | memory beside the text being read |
|---|---|---|---|
| bpe | JSON | nothing: all bytes are | each different word of the text with its count |
| wordpiece | JSON | ``[UNK]`` | the same |
| unigram | .model | written as bytes | the whole text, several times over |

The same texts in the same order give the same file, with the same version of the library.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megatron.errors import DataError

EOD = "<|endoftext|>"
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUM_BYTES = 256
_MAX_SENTENCE_BYTES = 1 << 14
_MAX_WORD_CHARS = 100


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


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = (EOD,)) -> bytes:
    """Return a ``tokenizers`` JSON file of byte-level BPE; any text can be encoded and decoded without loss.

    Control tokens come first, then the bytes.

    Raises:
        DataError: ``vocab_size`` has no room for the 256 bytes and the control tokens.
    """
    _check_room(vocab_size, _NUM_BYTES, "bytes", special)
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return _to_bytes(library)


def train_wordpiece(texts: Iterable[str], vocab_size: int, special: Sequence[str] = (EOD,)) -> bytes:
    """Return a ``tokenizers`` JSON file of BERT's WordPiece, cased: BERT's five tokens first, then ``special``.

    Blanks are not kept, so text does not come back as it was. The most frequent characters are in the
    vocabulary, at most half as many as there is room.

    Raises:
        DataError: ``vocab_size`` has no room for the control tokens and a character.
    """
    names = [*WORDPIECE_TOKENS, *(name for name in special if name not in WORDPIECE_TOKENS)]
    _check_room(vocab_size, 2, "characters", names)
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=_MAX_WORD_CHARS))
    library.normalizer = normalizers.BertNormalizer(lowercase=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=names,
        limit_alphabet=(vocab_size - len(names)) // 2,  # each may come twice: alone, and within a word
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return _to_bytes(library)


def train_unigram(texts: Iterable[str], vocab_size: int, special: Sequence[str] = (EOD,)) -> bytes:
    """Return a SentencePiece unigram model; bytes stand in for characters that it does not have.

    Raises:
        DataError: the text is too little, or ``vocab_size`` too small.
    """
    model = io.BytesIO()
    errors: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(_kept(texts, errors)),
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
        )
    except (RuntimeError, OSError) as error:
        if errors:  # the library has made a text of the corpus's own error
            raise errors[0] from None
        raise DataError(
            f"--vocab-size {vocab_size} cannot be trained on this text; SentencePiece says: {error}"
        ) from error
    return model.getvalue()


MODELS: dict[str, Callable[[Iterable[str], int, Sequence[str]], bytes]] = {
    "bpe": train_bpe,
    "unigram": train_unigram,
    "wordpiece": train_wordpiece,
}


def _check_room(vocab_size: int, num_needed: int, what: str, special: Sequence[str]) -> None:
    smallest = num_needed + len(special)
    if vocab_size < smallest:
        shown = ", ".join(special[:6]) + (", ..." if len(special) > 6 else "")
        raise DataError(f"--vocab-size must be at least {smallest} ({num_needed} {what} and {shown}), got {vocab_size}")


def _to_bytes(library: tokenizers.Tokenizer) -> bytes:
    return library.to_str(pretty=True).encode() + b"\n"


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
