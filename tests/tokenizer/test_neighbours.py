"""Of every kind, the ids of a text follow from that text: not from those beside it, nor from what came before."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron import log, tokenizer
from megatron.tokenizer import Tokenizer, chinese_words, with_gigatoken
from megatron.tokenizer.continued_pieces import ContinuationEncoder
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from tests.tokenizer.conftest import NON_CHINESE_TEXTS, SEPARATORS, SPLIT_WORDS, mixed_lines
from tests.tokenizer.test_control_tokens import write_sentencepiece, write_unigram

FRAGMENTS = [
    *SPLIT_WORDS[:6],
    *NON_CHINESE_TEXTS,
    *SEPARATORS,
    "the lamp ",
    "lamp",
    " ",
    "<|endoftext|>",
    "</s>",
    "[MASK]",
]
TEXTS = st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=4).map("".join), min_size=2, max_size=5)


def build_gpt2(folder: Path, bpe_path: Path) -> Tokenizer:
    model = json.loads(bpe_path.read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    return tokenizer.build(vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt")


def build_bert(folder: Path) -> Tokenizer:
    tokens = [
        "[UNK]",
        "[MASK]",
        "the",
        "lamp",
        "la",
        *"玉人一几联上abglmptx0123789",
        *(f"##{character}" for character in "ampt0123789"),
    ]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return tokenizer.build("BertWordPiece", tokenizer_path=folder)


@pytest.fixture(
    scope="module",
    params=["bpe", "gpt2", "gigatoken", "unigram", "bert", "sentencepiece", "t5", "cpm1", "cpm1 numbered", "cpm2"],
)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bpe_path: Path, corpus: list[str]
) -> Iterator[Tokenizer]:
    folder = tmp_path_factory.mktemp("neighbours")

    def with_vocab_json() -> Path:
        model = request.getfixturevalue("cpm_folder") / "chinese_vocab.model"
        (folder / model.name).write_bytes(model.read_bytes())
        (folder / "vocab.json").write_text(json.dumps({"<unk>": 0, "玉": 1, "人": 2, "▁": 3}))
        return folder

    builders: dict[str, Callable[[], Tokenizer]] = {
        "bpe": lambda: tokenizer.build(tokenizer_path=bpe_path),
        "gpt2": lambda: build_gpt2(folder, bpe_path),
        "gigatoken": lambda: with_gigatoken(tokenizer.build(tokenizer_path=bpe_path), corpus[:2], is_required=True),
        "unigram": lambda: tokenizer.build(tokenizer_path=write_unigram(folder, write_sentencepiece(folder, corpus))),
        "bert": lambda: build_bert(folder),
        "sentencepiece": lambda: tokenizer.build(tokenizer_path=write_sentencepiece(folder, corpus)),
        "t5": lambda: tokenizer.build("T5SentencePiece", tokenizer_path=write_sentencepiece(folder, corpus)),
        "cpm1": lambda: tokenizer.build("CPM1", tokenizer_path=request.getfixturevalue("cpm_folder")),
        "cpm1 numbered": lambda: tokenizer.build("CPM1", tokenizer_path=with_vocab_json()),
        "cpm2": lambda: tokenizer.build("CPM2", tokenizer_path=request.getfixturevalue("cpm2_path")),
    }
    built_tokenizer = builders[request.param]()
    with pytest.MonkeyPatch.context() as patch:
        if request.param in ("t5", "sentencepiece"):  # a fact of the model, which each copy would seek for 0.3 s
            assert isinstance(built_tokenizer, SentencePieceTokenizer)
            patch.setattr(ContinuationEncoder, "_blanks", built_tokenizer._continued._blanks)
        yield built_tokenizer


def copy_without_caches(built: Tokenizer) -> Tokenizer:
    """Return the tokenizer as a new process has it: nothing is remembered."""
    chinese_words._known_runs.clear()
    return pickle.loads(pickle.dumps(built))


def assert_ids_are_independent(built: Tokenizer, texts: list[str]) -> None:
    single_ids = [copy_without_caches(built).encode(text) for text in texts]
    assert copy_without_caches(built).encode_batch(texts) == single_ids
    warm_tokenizer = copy_without_caches(built)
    assert warm_tokenizer.encode_batch(texts[::-1]) == single_ids[::-1]
    assert warm_tokenizer.encode_batch(texts) == single_ids
    assert [warm_tokenizer.encode(text) for text in texts] == single_ids


@settings(max_examples=2, deadline=None)
@example(texts=["1玉人", "玉人"])
@given(texts=TEXTS)
def test_ids_are_independent_of_batch_and_order(built: Tokenizer, texts: list[str]) -> None:
    assert_ids_are_independent(built, texts)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(texts=TEXTS)
def test_ids_are_independent_of_batch_and_order_for_many_examples(built: Tokenizer, texts: list[str]) -> None:
    assert_ids_are_independent(built, texts)


@pytest.mark.parametrize("num_lines", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_reversed_lines_have_same_ids(built: Tokenizer, corpus: list[str], num_lines: int) -> None:
    lines = mixed_lines(num_lines, 5, corpus)
    forward, backward = (
        copy_without_caches(built).encode_batch(lines),
        copy_without_caches(built).encode_batch(lines[::-1]),
    )
    assert forward == backward[::-1] == built.encode_batch(lines)


def test_bpe_dropout_is_ignored_with_warning(
    bpe_path: Path, tmp_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for training on one text cut in many ways; a file of ids is made once, and must be made alike again."""
    warnings: list[str] = []
    log.warn_once.cache_clear()
    monkeypatch.setattr(log, "warning", warnings.append)
    library = tokenizers.Tokenizer.from_file(str(bpe_path))
    library.model.dropout = 0.5
    library.save(str(tmp_path / "tokenizer.json"))
    dropout_tokenizer = tokenizer.build(tokenizer_path=tmp_path)
    expected = tokenizer.build(tokenizer_path=bpe_path).encode_batch(corpus[:3])
    assert (
        dropout_tokenizer.encode_batch(corpus[:3])
        == copy_without_caches(dropout_tokenizer).encode_batch(corpus[:3])
        == expected
    )
    assert len(warnings) == 1 and "dropout 0.5" in warnings[0]
