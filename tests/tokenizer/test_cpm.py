from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron import tokenizer
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer, chinese_words
from megatron.tokenizer import cpm as tokenizer_cpm
from tests.tokenizer.conftest import CPM_CONTROL, CPM_MARKS, mixed_lines
from tests.tokenizer.test_word_cut import ALPHABET, DIFFICULT_TEXTS

Segment = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def cpm1(cpm_folder: Path) -> Tokenizer:
    return tokenizer.build("CPM1", tokenizer_path=cpm_folder)


@pytest.fixture(scope="module")
def cpm1_model(cpm_folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(cpm_folder / "chinese_vocab.model"))


@pytest.fixture(scope="module")
def cpm2(cpm2_path: Path) -> Tokenizer:
    return tokenizer.build("CPM2", tokenizer_path=cpm2_path)


@pytest.fixture(scope="module")
def cpm2_ids(cpm2_path: Path) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(cpm2_path.read_text(encoding="utf-8").split("\n"))}


def reference_cpm1(segment: Segment, model: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
    return model.encode(" ".join(word.translate(CPM_MARKS) for word in segment(text)))


def reference_cpm2(segment: Segment, ids: dict[str, int], text: str) -> list[int]:
    token_ids = []
    for word in (word.translate(CPM_MARKS) for word in segment(text)):
        if len(word) > 200:
            token_ids.append(ids["<unk>"])
            continue
        while word:
            length = next((length for length in range(len(word), 0, -1) if word[:length] in ids), 0)
            token_ids.append(ids[word[:length]] if length else ids["<unk>"])
            word = word[max(length, 1) :]
    return token_ids


def test_cpm1_ids_equal_jieba_and_sentencepiece(
    cpm1: Tokenizer, cpm1_model: sentencepiece.SentencePieceProcessor, jieba_segment: Segment, corpus: list[str]
) -> None:
    texts = [text[:1500] for text in corpus] + DIFFICULT_TEXTS
    assert cpm1.encode_batch(texts) == [reference_cpm1(jieba_segment, cpm1_model, text) for text in texts]


@pytest.mark.parametrize("num_lines", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mixed_line_ids_equal_reference_in_any_order(
    cpm1: Tokenizer,
    cpm1_model: sentencepiece.SentencePieceProcessor,
    cpm2: Tokenizer,
    cpm2_ids: dict[str, int],
    jieba_segment: Segment,
    corpus: list[str],
    num_lines: int,
) -> None:
    lines = mixed_lines(num_lines, 18, corpus)
    for batch_idx, batch in enumerate((lines, lines[::-1], lines[1::2], lines[::2])):
        chinese_words._known_runs.clear()
        assert cpm1.encode_batch(batch) == [reference_cpm1(jieba_segment, cpm1_model, text) for text in batch], (
            batch_idx
        )
    assert cpm2.encode_batch(lines) == [reference_cpm2(jieba_segment, cpm2_ids, text) for text in lines]


@settings(max_examples=25, deadline=None)
@given(text=st.one_of(st.text(ALPHABET, max_size=80), st.text(max_size=20)))
def test_cpm_ids_equal_reference_for_any_text(
    cpm1: Tokenizer,
    cpm1_model: sentencepiece.SentencePieceProcessor,
    cpm2: Tokenizer,
    cpm2_ids: dict[str, int],
    jieba_segment: Segment,
    text: str,
) -> None:
    assert cpm1.encode(text) == reference_cpm1(jieba_segment, cpm1_model, text)
    assert cpm2.encode(text) == reference_cpm2(jieba_segment, cpm2_ids, text)


def test_cpm1_text_round_trips_with_spaces_and_lines(cpm1: Tokenizer) -> None:
    text = "灯。\n The lamp  stood in the same place 。\n\n"
    assert cpm1.decode(cpm1.encode(text)) == text
    assert cpm1.eod_name == "<eod>" and cpm1.unk_id == 0 and {*CPM_CONTROL, "<s>", "</s>"} <= cpm1.control_tokens.keys()


def test_cpm1_uses_ids_of_vocab_json(cpm1: Tokenizer, cpm_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "chinese_vocab.model"
    model.write_bytes((cpm_folder / model.name).read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    shifted_ids = {processor.id_to_piece(piece_id): piece_id + 5 for piece_id in range(cpm1.vocab_size)}
    (tmp_path / "vocab.json").write_text(json.dumps(shifted_ids))
    shifted_tokenizer = tokenizer.build("CPM1", vocab_file=tmp_path / "vocab.json")
    text = "窗前有一盏灯。\nThe lamp"
    assert shifted_tokenizer.encode(text) == [token + 5 for token in cpm1.encode(text)]
    assert shifted_tokenizer.decode(shifted_tokenizer.encode(text)) == cpm1.decode(cpm1.encode(text))
    assert shifted_tokenizer.eod_id == cpm1.eod_id + 5 and shifted_tokenizer.vocab_size == cpm1.vocab_size + 5
    assert tokenizer.build("CPM1", tokenizer_path=tmp_path).identity == shifted_tokenizer.identity
    assert len({shifted_tokenizer.identity, cpm1.identity, tokenizer.build(tokenizer_path=model).identity}) == 3


def test_cpm2_ids_are_longest_matches_of_each_word(
    cpm2_path: Path, cpm2_ids: dict[str, int], jieba_segment: Segment, corpus: list[str]
) -> None:
    built = tokenizer.build("CPM2", tokenizer_path=cpm2_path.parent)
    texts = [text[:1500] for text in corpus] + [*DIFFICULT_TEXTS, "a" * 200, "a" * 201]
    assert built.encode_batch(texts) == [reference_cpm2(jieba_segment, cpm2_ids, text) for text in texts]
    text = corpus[0][:1500]
    assert built.decode(built.encode(text)) == text
    assert built.eod_id == 7 and built.pad_id == 5 and built.unk_id == 0 and len(built.sentinel_ids) == 20
    assert pickle.loads(pickle.dumps(built)).encode(text) == built.encode(text)


@pytest.mark.parametrize(
    "content, message",
    [
        ("a\nb\n", "must contain the token <unk>"),
        ("<unk>\n##ing\n", "without pieces that begin with ##"),
        (b"\xff", "UTF-8"),
    ],
)
def test_file_without_cpm_vocabulary_is_rejected(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        tokenizer.build("CPM2", tokenizer_path=path)


def test_out_of_vocabulary_ids_decode_to_replacement_character(
    cpm1: Tokenizer, cpm2: Tokenizer, cpm_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "chinese_vocab.model").write_bytes((cpm_folder / "chinese_vocab.model").read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "chinese_vocab.model"))
    ids = {processor.id_to_piece(piece_id): piece_id + 5 for piece_id in range(cpm1.vocab_size)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    for built in (cpm1, cpm2, tokenizer.build("CPM1", tokenizer_path=tmp_path)):
        lamp_ids = built.encode("灯")
        assert built.decode([*lamp_ids, built.vocab_size + 7, *lamp_ids]) == "灯\ufffd灯" and built.decode([]) == ""


def test_cpm2_word_cache_is_bounded(
    cpm2_path: Path,
    cpm2_ids: dict[str, int],
    jieba_segment: Segment,
    corpus: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_cpm, "_MAX_CHARACTERS", 400)
    built = tokenizer.build("CPM2", tokenizer_path=cpm2_path)
    assert isinstance(built, tokenizer_cpm.CPM2Tokenizer)
    for text in corpus[:2]:
        assert built.encode(text[:500]) == reference_cpm2(jieba_segment, cpm2_ids, text[:500])
        assert 0 < len(built._words) <= 400 // 17
