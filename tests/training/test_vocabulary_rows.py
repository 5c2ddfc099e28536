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
from tests.helpers.trap import FLAGS, TOKENIZER_PATH

NUM_IDS, NUM_TEXT_IDS = 294, 293
"""The last id of the vocabulary is that of <end_of_turn>, which is special."""


def parse_with_rows(num_rows: int, *extra_args: str) -> Config:
    argv = [
        *FLAGS,
        "--tokenizer-path",
        str(TOKENIZER_PATH),
        "--data-path",
        "mock",
        "--vocab-size",
        str(num_rows),
        *extra_args,
    ]
    return parse(argv, world_size=1, env={})


def test_extra_special_tokens_need_no_row_and_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    loaded_tokenizer, config = with_tokenizer(parse_with_rows(NUM_TEXT_IDS))
    assert (loaded_tokenizer.vocab_size, loaded_tokenizer.text_vocab_size, config.model.vocab_size) == (
        NUM_IDS,
        NUM_TEXT_IDS,
        NUM_TEXT_IDS,
    )
    assert "the tokenizer has 294 ids and the model 293 rows" in capsys.readouterr().err
    assert with_tokenizer(parse_with_rows(NUM_IDS))[1].model.vocab_size == NUM_IDS and not capsys.readouterr().err


def test_text_ids_require_rows() -> None:
    with pytest.raises(ConfigError, match="--vocab-size must be at least the tokenizer's vocabulary"):
        with_tokenizer(parse_with_rows(NUM_TEXT_IDS - 1))
    with pytest.raises(ConfigError, match="--vocab-size must be at least"):  # the end of documents is one of them
        with_tokenizer(parse_with_rows(NUM_TEXT_IDS, "--eod-token", "<end_of_turn>"))


def test_conversation_with_token_without_row_raises() -> None:
    loaded_tokenizer, _ = with_tokenizer(parse_with_rows(NUM_TEXT_IDS))
    assert loaded_tokenizer.encode_rendered("<bos>a")[0][0] == loaded_tokenizer.token_to_id("<bos>")
    with pytest.raises(DataError, match=r"contains <end_of_turn> \(id 293\), but the model has only 293 rows"):
        loaded_tokenizer.encode_rendered("a<end_of_turn>")


@pytest.mark.parametrize("num_rows", [NUM_IDS, NUM_TEXT_IDS, 200])
def test_export_accepts_any_number_of_rows(num_rows: int, tmp_path: Path) -> None:
    model_args = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
    save_model(
        tmp_path / "run",
        "gpt2",
        **model_args,
        vocab_size=num_rows,
        tokenizer_path=str(TOKENIZER_PATH / "tokenizer.json"),
    )
    result = export(open_folder(tmp_path / "run"), tmp_path / "hf")
    assert any(f"{NUM_IDS} ids, but the model {num_rows} rows" in note for note in result.notes) == (num_rows < NUM_IDS)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == num_rows
    assert tokenizer.build(tokenizer_path=tmp_path / "hf").vocab_size == NUM_IDS


def test_generation_requires_rows_for_text_ids(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(parse_with_rows(NUM_TEXT_IDS), None)
    assert vocabulary is not None and vocabulary.tokenizer.num_rows == NUM_TEXT_IDS
    with pytest.raises(ConfigError, match="must not have more tokens than the model, got 294"):
        vocabulary_of(parse_with_rows(200), None)
