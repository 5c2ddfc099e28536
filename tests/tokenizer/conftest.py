"""The original of the word cut, mixed text, and small vocabularies of each kind, made once a session."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable
from pathlib import Path

import jieba
import pytest
import sentencepiece

from megatron.tokenizer import train

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
CPM_CONTROL = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]
CPM_MARKS = str.maketrans(" \n", "\u2582\u2583")

_SPLIT_WORD_CHARACTERS = "玉人一几一联上列上叶上收上牌上航不退之久九所书经今周似可几国加比北村只够同楼后学因事大任学号"
SPLIT_WORDS = [_SPLIT_WORD_CHARACTERS[idx : idx + 2] for idx in range(0, len(_SPLIT_WORD_CHARACTERS), 2)]
"""Words of jieba's dictionary whose likelier route is two characters: alone they stay apart, within an unknown run the
hidden Markov model joins them."""
NON_CHINESE_TEXTS = [*"013789", "12", "2019", "3.5%", "a", "B", "GPT-2", "C++", "T恤", "IP地址", "x_1", "-", ".", "+"]
SEPARATORS = ["", "", "", " ", "，", "。", "\n", "\u3000", "、", "(", "<eod>", "🙂"]


def mixed_lines(num_lines: int, seed: int, texts: list[str]) -> list[str]:
    """Return lines of digits, Latin and Chinese mixed, many of them short, so that parts of some are others."""
    rng = random.Random(seed)
    lines = []
    for _ in range(num_lines):
        fragments = []
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            source = rng.random()
            if source < 0.5:
                fragments.append(rng.choice(SPLIT_WORDS))
            elif source < 0.8:
                fragments.append(rng.choice(NON_CHINESE_TEXTS))
            else:
                text = rng.choice(texts)
                start = rng.randrange(max(len(text) - 9, 1))
                fragments.append(text[start : start + rng.randint(1, 9)])
            fragments.append(rng.choice(SEPARATORS))
        lines.append("".join(fragments))
    return lines


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Chinese and English texts in turn."""
    return [path.read_text(encoding="utf-8") for lang in ("zh", "en") for path in sorted((CORPUS / lang).iterdir())[:9]]


@pytest.fixture(scope="session")
def jieba_segment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """jieba's own word cut; its cache file goes to a folder of the test."""
    jieba.setLogLevel(logging.WARNING)
    original = jieba.Tokenizer()
    original.tmp_dir = str(tmp_path_factory.mktemp("jieba"))
    return original.lcut


@pytest.fixture(scope="session")
def cpm_folder(
    tmp_path_factory: pytest.TempPathFactory, corpus: list[str], jieba_segment: Callable[[str], list[str]]
) -> Path:
    """A vocabulary as CPM-1's, but small: NFKC, words already cut, control tokens that text could spell."""
    lines = [line for text in corpus[:2] + corpus[-2:] for line in text.splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(word.translate(CPM_MARKS) for word in jieba_segment(line)) for line in lines),
        model_writer=model,
        model_type="unigram",
        vocab_size=700,
        required_chars="<>/[]|_0123456789abcdefghijklmnopqrstuvwxyzTABCDEFMSUKP灯\u2582\u2583",
        num_sub_iterations=1,
        hard_vocab_limit=False,
        user_defined_symbols=CPM_CONTROL,
        num_threads=1,
        minloglevel=2,
    )
    folder = tmp_path_factory.mktemp("cpm")
    (folder / "chinese_vocab.model").write_bytes(model.getvalue())
    return folder


@pytest.fixture(scope="session")
def cpm2_path(
    tmp_path_factory: pytest.TempPathFactory, corpus: list[str], jieba_segment: Callable[[str], list[str]]
) -> Path:
    words = {word.translate(CPM_MARKS).strip(): None for text in corpus[:6] for word in jieba_segment(text[:1500])}
    words |= dict.fromkeys("窗灯abcdefg012\u2582\u2583.-_")
    control = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<eod>"]
    sentinels = [f"<s_{idx}>" for idx in range(20)]
    path = tmp_path_factory.mktemp("cpm2") / "vocab.txt"
    path.write_text("\n".join([*control, *words, *sentinels]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def bpe_path(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> Path:
    """A byte-level BPE of 700 tokens."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_bytes(train.train_bpe([text[:2000] for text in corpus], 700))
    return path
