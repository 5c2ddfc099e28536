"""A tokenizer with more ids than the model has rows: accepted where plain text never becomes the extra ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron import tokenizer
from megatron.arguments import parse
from megatron.checkpoint.huggingface.convert import export
from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
from megatron.checkpoint.one_process import open_folder
from megatron.config import Config
from megatron.errors import ConfigError, DataError
from megatron.training.vocabulary import with_tokenizer
from tests.helpers.saved_models import save_model
from tests.helpers.trap import FLAGS, TRAP

IDS, TEXT_IDS = 294, 293
"""The last id of the vocabulary is that of <end_of_turn>, which is special."""


def parsed(rows: int, *words: str) -> Config:
    argv = [*FLAGS, "--tokenizer-path", str(TRAP), "--data-path", "mock", "--vocab-size", str(rows), *words]
    return parse(argv, world_size=1, env={})


def test_extra_special_tokens_need_no_row_and_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    built, config = with_tokenizer(parsed(TEXT_IDS))
    assert (built.vocab_size, built.text_vocab_size, config.model.vocab_size) == (IDS, TEXT_IDS, TEXT_IDS)
    assert "the tokenizer has 294 ids, but the model 293 rows" in capsys.readouterr().err
    assert with_tokenizer(parsed(IDS))[1].model.vocab_size == IDS and not capsys.readouterr().err


def test_ids_of_text_need_a_row() -> None:
    with pytest.raises(ConfigError, match="--vocab-size must be at least the tokenizer's vocabulary"):
        with_tokenizer(parsed(TEXT_IDS - 1))
    with pytest.raises(ConfigError, match="--vocab-size must be at least"):  # the end of documents is one of them
        with_tokenizer(parsed(TEXT_IDS, "--eod-token", "<end_of_turn>"))


def test_a_conversation_with_such_a_token_is_an_error() -> None:
    built, _ = with_tokenizer(parsed(TEXT_IDS))
    assert built.encode_rendered("<bos>a")[0][0] == built.token_to_id("<bos>")
    with pytest.raises(DataError, match=r"holds <end_of_turn> \(id 293\), but the model has 293 rows"):
        built.encode_rendered("a<end_of_turn>")


@pytest.mark.parametrize("rows", [IDS, TEXT_IDS, 200])
def test_an_export_works_for_any_number_of_rows(rows: int, tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
    save_model(tmp_path / "run", "gpt2", **sizes, vocab_size=rows, tokenizer_path=str(TRAP / "tokenizer.json"))
    written = export(open_folder(tmp_path / "run"), tmp_path / "hf")
    assert any(f"{IDS} ids, but the model {rows} rows" in note for note in written.notes) == (rows < IDS)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == rows
    assert tokenizer.build(tokenizer_path=tmp_path / "hf").vocab_size == IDS


def test_writing_text_needs_the_ids_of_text(tmp_path: Path) -> None:
    found = vocabulary_of(parsed(TEXT_IDS), None)
    assert found is not None and found.tokenizer.num_rows == TEXT_IDS
    with pytest.raises(ConfigError, match="must not have more tokens than the model, got 294"):
        vocabulary_of(parsed(200), None)
