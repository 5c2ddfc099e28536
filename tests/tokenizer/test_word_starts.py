"""Which tokens begin a word, in vocabularies of each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.tokenizer import Tokenizer, build, word_starts

ENGLISH, CHINESE = "The lighthouse's keeper, unhurried: 42 times.\n", "灯塔的看守人等了一百年。"


def split_words(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the words of ``text`` as their tokens make them up."""
    ids, starts = tokenizer.encode(text), word_starts(tokenizer)
    assert starts.shape == (tokenizer.vocab_size,) and starts.dtype == bool
    boundaries = [idx for idx, token in enumerate(ids) if starts[token] or not idx] + [len(ids)]
    return [tokenizer.decode(ids[start:stop]).strip() for start, stop in zip(boundaries, boundaries[1:], strict=False)]


def test_byte_level_words_start_at_space_punctuation_or_chinese_character(bpe_path: Path) -> None:
    tokenizer = build(tokenizer_path=bpe_path)
    words = [word for word in split_words(tokenizer, ENGLISH) if word]
    assert words == ["The", "lighthouse's", "keeper", ",", "unhurried", ":", "42", "times", "."]
    assert max(len(tokenizer.encode(f" {word}")) for word in words) > 1, "some words have several tokens"
    chinese_words = split_words(tokenizer, CHINESE)
    assert "".join(chinese_words) == CHINESE and "\ufffd" not in "".join(chinese_words), "no character is cut"
    assert len(chinese_words) >= len(CHINESE) / 3
    accented_words = split_words(tokenizer, "naïve café \u0431\u043e\u0442")
    assert accented_words == ["naïve", "café", "\u0431\u043e\u0442"]


def test_wordpiece_continuations_start_with_hash_signs(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##hurr", "##ied", ",", "灯", "塔", "##"])
    )
    tokenizer = build("BertWordPiece", vocab_file=vocab)
    assert np.flatnonzero(~word_starts(tokenizer)).tolist() == [6, 7]
    assert split_words(tokenizer, "unhurried, 灯塔") == ["unhurried", ",", "灯", "塔"]


def test_cpm_words_equal_jieba(cpm_folder: Path, corpus: list[str], jieba_segment: Callable[[str], list[str]]) -> None:
    tokenizer, line = build("CPM1", tokenizer_path=cpm_folder), next(filter(None, corpus[0].splitlines()))
    words = split_words(tokenizer, line)
    assert words == [word for word in jieba_segment(line) if word.strip()] and max(map(len, words)) > 1


def test_sentencepiece_words_start_with_marker(cpm_folder: Path) -> None:
    tokenizer = build("SentencePiece", tokenizer_path=cpm_folder / "chinese_vocab.model")
    starts = word_starts(tokenizer)
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token)
        if piece.startswith("\u2581"):
            assert starts[token]
        elif piece.isascii() and piece.isalnum():
            assert not starts[token], piece
    assert tokenizer.piece(10**6) is None


def test_vocabulary_without_word_markers_has_single_token_words(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["<unk>", "<eod>", "灯", "塔", "灯塔"]), encoding="utf-8")
    assert word_starts(build("CPM2", vocab_file=vocab)).all()


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_joined_words_equal_text(bpe_path: Path, text: str) -> None:
    tokenizer = build(tokenizer_path=bpe_path)
    starts, ids = word_starts(tokenizer), tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and 0 < sum(starts[ids]) <= len(ids)
