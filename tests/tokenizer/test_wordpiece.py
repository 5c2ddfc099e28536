from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from megatron import tokenizer
from megatron.errors import DataError

CONTROL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MIXED = [
    "The Lamp stood in the WINDOW; café, naïve — Straße.",
    "窗前有一盏灯，灯亮着。GPT-2的词表ABC１２３",
    "a\u200b\x00b\ufffdc\td\r\ne  \u3000f 🙂 한국어 ひらがな" + "z" * 101,
    "[MASK] [PAD]a[SEP]b [UNK]##ing",
]


def write_vocabulary(folder: Path, tokens: list[str], config: dict[str, bool] | None = None) -> Path:
    (folder / "vocab.txt").write_text("\n".join([*CONTROL, *tokens]) + "\n", encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def single_characters(has_upper_case: bool) -> list[str]:
    tokens = list("abcdefghijklmnopqrstuvwxyz0123456789窗前有一盏灯亮着词的表é.,;-—。，[]#") + [
        "the",
        "lamp",
        "##amp",
        "sto",
    ]
    tokens += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789éß"]
    return tokens + ([*"TLWINDOGPABC", "The", *(f"##{letter}" for letter in "TLWINDOGPABC")] if has_upper_case else [])


@pytest.mark.parametrize(
    "has_upper_case, config, is_lower_case",
    [
        (False, None, True),
        (True, None, False),
        (True, {"do_lower_case": True}, True),
        (False, {"do_lower_case": False}, False),
    ],
)
def test_ids_equal_hugging_face(
    tmp_path: Path, has_upper_case: bool, config: dict[str, bool] | None, is_lower_case: bool
) -> None:
    built = tokenizer.build(
        "BertWordPiece", tokenizer_path=write_vocabulary(tmp_path, single_characters(has_upper_case), config)
    )
    vocab = {token: token_id for token_id, token in enumerate([*CONTROL, *single_characters(has_upper_case)])}
    reference = transformers.BertTokenizer(vocab=vocab, do_lower_case=is_lower_case)
    for text in MIXED[:3]:
        assert built.encode(text) == reference.encode(text, add_special_tokens=False)
    assert "lower case: " + str(is_lower_case) in built.settings


def test_control_tokens_are_found_and_their_spellings_are_text(tmp_path: Path) -> None:
    built = tokenizer.build(
        "BertWordPiece", vocab_file=write_vocabulary(tmp_path, single_characters(False)) / "vocab.txt"
    )
    assert (built.eod_name, built.pad_id, built.unk_id, built.vocab_size) == (
        "[SEP]",
        0,
        1,
        len(CONTROL) + len(single_characters(False)),
    )
    assert not set(built.encode(MIXED[3])) & {0, 2, 3, 4}
    assert built.decode(built.encode("the lamp 窗")) == "the lamp 窗"


def test_lower_casing_changes_identity(tmp_path: Path) -> None:
    lower_case_identity = tokenizer.build(
        "BertWordPiece", tokenizer_path=write_vocabulary(tmp_path, single_characters(False))
    ).identity
    cased_tokenizer = tokenizer.build(
        "BertWordPiece", tokenizer_path=write_vocabulary(tmp_path, single_characters(False), {"do_lower_case": False})
    )
    assert cased_tokenizer.identity != lower_case_identity


def test_invalid_wordpiece_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs vocab.txt or a folder with it"):
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"must contain the token \[UNK\]"):
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path)
    write_vocabulary(tmp_path, single_characters(False))
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="tokenizer_config.json must be a JSON object"):
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path)
    with pytest.raises(DataError, match="may have several formats. Set --tokenizer-type BertWordPiece or CPM2"):
        tokenizer.build(tokenizer_path=tmp_path / "vocab.txt")
