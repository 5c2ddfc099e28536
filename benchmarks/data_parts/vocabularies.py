"""The vocabularies of the benchmark, trained on a part of its corpus; and how each kind is used by both sides."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.data_parts.peer import Encode
from megatron import tokenizer
from megatron.tokenizer import Tokenizer, train

BPE, GIGATOKEN, SENTENCE_PIECE, CPM = "bpe", "gigatoken", "sentencepiece", "cpm"
KINDS = (BPE, GIGATOKEN, SENTENCE_PIECE, CPM)
EOD = "<eod>"
_CPM_MARKS = str.maketrans(" \n", "\u2582\u2583")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How ours makes the tokenizer, and how the reference encodes one text with the same file.

    Args:
        chunk_size: lines that the reference sends to a worker at once.
        bar: how many times as fast ours must be, None where nothing is asked.
        bar_workers: with which numbers of processes that is asked.
    """

    make_tokenizer: Callable[[], Tokenizer]
    make_encode: Callable[[], Encode]
    chunk_size: int = 32
    use_gigatoken: bool = False
    bar: float | None = None
    bar_workers: Sequence[int] = (1, 2)


def kinds(folder: Path, names: Sequence[str], texts: Sequence[str], vocab_size: int) -> dict[str, Kind]:
    """Train what ``names`` need into ``folder`` and return the kinds."""
    bpe, unigram, cpm = folder / "bpe.json", folder / "unigram.model", folder / "cpm.model"
    if BPE in names or GIGATOKEN in names:
        bpe.write_bytes(train.train_bpe(texts, vocab_size))
    if SENTENCE_PIECE in names:
        unigram.write_bytes(train.train_unigram(texts, vocab_size))
    if CPM in names:
        cpm.write_bytes(train_cpm(texts, vocab_size))
    of_bpe = partial(tokenizer.build, tokenizer_path=bpe)
    every = {
        BPE: Kind(make_tokenizer=of_bpe, make_encode=partial(bpe_encode, bpe), bar=1.3),
        GIGATOKEN: Kind(make_tokenizer=of_bpe, make_encode=partial(bpe_encode, bpe), use_gigatoken=True, bar=8.0),
        SENTENCE_PIECE: Kind(
            make_tokenizer=partial(tokenizer.build, tokenizer_path=unigram),
            make_encode=partial(unigram_encode, unigram),
        ),
        CPM: Kind(
            make_tokenizer=partial(tokenizer.build, "CPM1", tokenizer_path=cpm),
            make_encode=partial(cpm_encode, cpm),
            chunk_size=25,
            bar=3.0,
            bar_workers=(1,),
        ),
    }
    return {name: every[name] for name in names}


def bpe_encode(path: Path) -> Encode:
    """Return how Megatron encodes a text with a BPE of the ``tokenizers`` library."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: library.encode(text, add_special_tokens=False).ids


def unigram_encode(path: Path) -> Encode:
    """Return how Megatron encodes a text with SentencePiece."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode


def cpm_encode(path: Path) -> Encode:
    """Return how CPM encodes a text: jieba's words, marks for spaces and line ends, SentencePiece."""
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return lambda text: library.encode(cpm_words(text))


def cpm_words(text: str) -> str:
    """Return the words of a text with spaces between them, as CPM's SentencePiece reads it."""
    import jieba

    jieba.setLogLevel("ERROR")
    return " ".join(word.translate(_CPM_MARKS) for word in jieba.cut(text))


def train_cpm(texts: Sequence[str], vocab_size: int) -> bytes:
    """Return a small SentencePiece unigram of the kind that CPM-1 has."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(cpm_words(line) for text in texts for line in text.splitlines(keepends=True)),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        control_symbols=[EOD],
        character_coverage=0.9995,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
