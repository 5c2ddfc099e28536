"""The original of the word cut, and small vocabularies of each kind, made once a session."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import jieba
import pytest
import sentencepiece

from megatron.tokenizer import train

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
CPM_CONTROL = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]
CPM_MARKS = str.maketrans(" \n", "\u2582\u2583")


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Chinese and English texts in turn."""
    return [path.read_text(encoding="utf-8") for lang in ("zh", "en") for path in sorted((CORPUS / lang).iterdir())[:9]]


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """jieba's own word cut; its cache file goes to a folder of the test."""
    jieba.setLogLevel(logging.WARNING)
    original = jieba.Tokenizer()
    original.tmp_dir = str(tmp_path_factory.mktemp("jieba"))
    return original.lcut


@pytest.fixture(scope="session")
def cpm_folder(tmp_path_factory: pytest.TempPathFactory, corpus: list[str], cut: Callable[[str], list[str]]) -> Path:
    """A vocabulary as CPM-1's, but small: NFKC, words already cut, control tokens that text could spell."""
    lines = [line for text in corpus[:2] + corpus[-2:] for line in text.splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(word.translate(CPM_MARKS) for word in cut(line)) for line in lines),
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
def bpe_path(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> Path:
    """A byte-level BPE of 700 tokens."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_bytes(train.train_bpe([text[:2000] for text in corpus], 700))
    return path
