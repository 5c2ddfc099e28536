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
from megatron.tokenizer.continued_pieces import Continued
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from tests.tokenizer.conftest import BETWEEN, LEFT_IN_CHARACTERS, NOT_CHINESE, mixed_lines
from tests.tokenizer.test_control_tokens import sentence_piece, unigram

PARTS = [*LEFT_IN_CHARACTERS[:6], *NOT_CHINESE, *BETWEEN, "the lamp ", "lamp", " ", "<|endoftext|>", "</s>", "[MASK]"]
TEXTS = st.lists(st.lists(st.sampled_from(PARTS), max_size=4).map("".join), min_size=2, max_size=5)


def gpt2(folder: Path, bpe_path: Path) -> Tokenizer:
    model = json.loads(bpe_path.read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    return tokenizer.build(vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt")


def bert(folder: Path) -> Tokenizer:
    tokens = [
        "[UNK]",
        "[MASK]",
        "the",
        "lamp",
        "la",
        *"玉人一几联上abglmptx0123789",
        *(f"##{one}" for one in "ampt0123789"),
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

    def numbered() -> Path:
        model = request.getfixturevalue("cpm_folder") / "chinese_vocab.model"
        (folder / model.name).write_bytes(model.read_bytes())
        (folder / "vocab.json").write_text(json.dumps({"<unk>": 0, "玉": 1, "人": 2, "▁": 3}))
        return folder

    made: dict[str, Callable[[], Tokenizer]] = {
        "bpe": lambda: tokenizer.build(tokenizer_path=bpe_path),
        "gpt2": lambda: gpt2(folder, bpe_path),
        "gigatoken": lambda: with_gigatoken(tokenizer.build(tokenizer_path=bpe_path), corpus[:2], is_required=True),
        "unigram": lambda: tokenizer.build(tokenizer_path=unigram(folder, sentence_piece(folder, corpus))),
        "bert": lambda: bert(folder),
        "sentencepiece": lambda: tokenizer.build(tokenizer_path=sentence_piece(folder, corpus)),
        "t5": lambda: tokenizer.build("T5SentencePiece", tokenizer_path=sentence_piece(folder, corpus)),
        "cpm1": lambda: tokenizer.build("CPM1", tokenizer_path=request.getfixturevalue("cpm_folder")),
        "cpm1 numbered": lambda: tokenizer.build("CPM1", tokenizer_path=numbered()),
        "cpm2": lambda: tokenizer.build("CPM2", tokenizer_path=request.getfixturevalue("cpm2_path")),
    }
    found = made[request.param]()
    with pytest.MonkeyPatch.context() as patch:
        if request.param in ("t5", "sentencepiece"):  # a fact of the model, which each copy would seek for 0.3 s
            assert isinstance(found, SentencePieceTokenizer)
            patch.setattr(Continued, "_blanks", found._continued._blanks)
        yield found


def fresh(built: Tokenizer) -> Tokenizer:
    """Return the tokenizer as a new process has it: nothing is remembered."""
    chinese_words._known_runs.clear()
    return pickle.loads(pickle.dumps(built))


def check(built: Tokenizer, texts: list[str]) -> None:
    alone = [fresh(built).encode(text) for text in texts]
    assert fresh(built).encode_batch(texts) == alone
    warm = fresh(built)
    assert warm.encode_batch(texts[::-1]) == alone[::-1]
    assert warm.encode_batch(texts) == alone
    assert [warm.encode(text) for text in texts] == alone


@settings(max_examples=2, deadline=None)
@example(texts=["1玉人", "玉人"])
@given(texts=TEXTS)
def test_ids_of_a_text_are_the_same_beside_any_others_and_behind_them(built: Tokenizer, texts: list[str]) -> None:
    check(built, texts)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(texts=TEXTS)
def test_ids_of_a_text_are_the_same_beside_many_others(built: Tokenizer, texts: list[str]) -> None:
    check(built, texts)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_lines_in_two_orders_have_the_same_ids(built: Tokenizer, corpus: list[str], count: int) -> None:
    lines = mixed_lines(count, 5, corpus)
    forward, backward = fresh(built).encode_batch(lines), fresh(built).encode_batch(lines[::-1])
    assert forward == backward[::-1] == built.encode_batch(lines)


def test_dropout_of_a_vocabulary_is_said_and_not_done(
    bpe_path: Path, tmp_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for training on one text cut in many ways; a file of ids is made once, and must be made alike again."""
    said: list[str] = []
    log.warn_once.cache_clear()
    monkeypatch.setattr(log, "warning", said.append)
    library = tokenizers.Tokenizer.from_file(str(bpe_path))
    library.model.dropout = 0.5
    library.save(str(tmp_path / "tokenizer.json"))
    dropping = tokenizer.build(tokenizer_path=tmp_path)
    expected = tokenizer.build(tokenizer_path=bpe_path).encode_batch(corpus[:3])
    assert dropping.encode_batch(corpus[:3]) == fresh(dropping).encode_batch(corpus[:3]) == expected
    assert len(said) == 1 and "dropout 0.5" in said[0]
