"""Training a vocabulary: byte-level BPE (``tokenizers``) or unigram (``sentencepiece``).

The same text gives the same file.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron.errors import DataError

EOD = "<|endoftext|>"
_SMALLEST_BPE = 257
_MAX_SENTENCE_BYTES = 1 << 14


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a ``tokenizers`` JSON file of byte-level BPE; any text can be encoded and decoded without loss.

    Raises:
        DataError: ``vocab_size`` has no room for the 256 bytes and the end-of-document token.
    """
    if vocab_size < _SMALLEST_BPE:
        raise DataError(f"--vocab-size must be at least {_SMALLEST_BPE} (256 bytes and {EOD}), got {vocab_size}")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library.to_str(pretty=True).encode() + b"\n"


def train_unigram(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a SentencePiece unigram model; bytes stand in for characters that it does not have.

    Raises:
        DataError: the text is too little, or ``vocab_size`` too small.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            control_symbols=[EOD],
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
        raise DataError(
            f"--vocab-size {vocab_size} cannot be trained on this text; SentencePiece says: {error}"
        ) from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines short enough for the trainer, which leaves out longer ones."""
    step = _MAX_SENTENCE_BYTES // 4
    for text in texts:
        for line in text.splitlines():
            yield from (line[start : start + step] for start in range(0, len(line), step))
