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


def write(folder: Path, tokens: list[str], config: dict[str, bool] | None = None) -> Path:
    (folder / "vocab.txt").write_text("\n".join([*CONTROL, *tokens]) + "\n", encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def letters(upper: bool) -> list[str]:
    plain = list("abcdefghijklmnopqrstuvwxyz0123456789窗前有一盏灯亮着词的表é.,;-—。，[]#") + [
        "the",
        "lamp",
        "##amp",
        "sto",
    ]
    plain += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789éß"]
    return plain + ([*"TLWINDOGPABC", "The", *(f"##{letter}" for letter in "TLWINDOGPABC")] if upper else [])


@pytest.mark.parametrize(
    "upper, config, lower",
    [
        (False, None, True),
        (True, None, False),
        (True, {"do_lower_case": True}, True),
        (False, {"do_lower_case": False}, False),
    ],
)
def test_ids_are_those_of_hugging_face(
    tmp_path: Path, upper: bool, config: dict[str, bool] | None, lower: bool
) -> None:
    built = tokenizer.build("BertWordPiece", tokenizer_path=write(tmp_path, letters(upper), config))
    vocab = {token: number for number, token in enumerate([*CONTROL, *letters(upper)])}
    reference = transformers.BertTokenizer(vocab=vocab, do_lower_case=lower)
    for text in MIXED[:3]:
        assert built.encode(text) == reference.encode(text, add_special_tokens=False)
    assert "lower case: " + str(lower) in built.settings


def test_control_tokens_are_found_and_their_spellings_are_text(tmp_path: Path) -> None:
    built = tokenizer.build("BertWordPiece", vocab_file=write(tmp_path, letters(False)) / "vocab.txt")
    assert (built.eod_name, built.pad_id, built.unk_id, built.vocab_size) == (
        "[SEP]",
        0,
        1,
        len(CONTROL) + len(letters(False)),
    )
    assert not set(built.encode(MIXED[3])) & {0, 2, 3, 4}
    assert built.decode(built.encode("the lamp 窗")) == "the lamp 窗"


def test_lower_case_is_part_of_the_identity(tmp_path: Path) -> None:
    lower = tokenizer.build("BertWordPiece", tokenizer_path=write(tmp_path, letters(False))).identity
    upper = tokenizer.build("BertWordPiece", tokenizer_path=write(tmp_path, letters(False), {"do_lower_case": False}))
    assert upper.identity != lower


def test_files_that_are_no_wordpiece_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs vocab.txt or a folder with it"):
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"must contain the token \[UNK\]"):
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path)
    write(tmp_path, letters(False))
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="tokenizer_config.json must be a JSON object"):
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path)
    with pytest.raises(DataError, match="may have several formats. Set --tokenizer-type BertWordPiece or CPM2"):
        tokenizer.build(tokenizer_path=tmp_path / "vocab.txt")
