"""Which token ends a document, and which tokens of a text are text: a vocabulary with Gemma's trap.

``TOKENIZER_PATH`` is a byte-level BPE whose special tokens are <pad>, <eos>, <bos> and <end_of_turn>. <s>, </s> and
<table> are
added tokens that are not special: HTML tags in a text.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from megatron import tokenizer
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.control_tokens import BY_NAME
from tests.helpers.trap import TOKENIZER_PATH

TEXTS = ["a <s>b</s> c", "</s>", "<table>\n  </s></s> <table", "the lamp </s >", "灯<s>", ""]


def build_with_settings(folder: Path, settings: dict[str, Any] | None, *, has_template: bool = False) -> Tokenizer:
    """Return the tokenizer of a copy of ``TOKENIZER_PATH`` with this tokenizer_config.json (None: without one)."""
    shutil.copy(TOKENIZER_PATH / "tokenizer.json", folder)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if has_template:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return tokenizer.build(tokenizer_path=folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("settings", "has_template", "expected"),
    [
        pytest.param(None, False, "<eos>", id="no settings: the list of names, without the tag"),
        pytest.param({"eos_token": "<bos>"}, False, "<bos>", id="without a template the eos_token"),
        pytest.param({"eos_token": {"content": "</s>"}}, False, "</s>", id="also where it is not special"),
        pytest.param({"eos_token": "<end_of_turn>"}, True, "<eos>", id="with a template the end of texts"),
        pytest.param({"eos_token": "<end_of_turn>", "chat_template": "x"}, False, "<eos>", id="a template in settings"),
        pytest.param({"eos_token": "<nowhere>"}, False, "<eos>", id="an eos_token that is no token"),
    ],
)
def test_folder_settings_select_eod_token(
    settings: dict[str, Any] | None, has_template: bool, expected: str, tmp_path: Path
) -> None:
    built = build_with_settings(tmp_path, settings, has_template=has_template)
    assert built.eod_name == expected and built.eod_id == built.token_to_id(expected)


@pytest.mark.parametrize("is_complete", [False, True])
def test_special_tokens_map_overrides_settings_like_transformers(is_complete: bool, tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<bos>"}))
    added_tokens = {"0": {"content": "<pad>", "special": True}}
    built = build_with_settings(
        tmp_path, {"eos_token": "<eos>"} | ({"added_tokens_decoder": added_tokens} if is_complete else {})
    )
    assert built.eod_name == ("<eos>" if is_complete else "<bos>")
    assert built.eod_name == transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token


def test_non_special_tags_are_encoded_like_transformers() -> None:
    library = tokenizers.Tokenizer.from_file(str(TOKENIZER_PATH / "tokenizer.json"))
    built = tokenizer.build(tokenizer_path=TOKENIZER_PATH)
    assert built.encode_batch(TEXTS) == [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert not {"<s>", "</s>", "<table>"} & built.control_tokens.keys()
    special_ids = {built.token_to_id(name) for name in ("<pad>", "<eos>", "<bos>", "<end_of_turn>")}
    for text in ("a<eos>b", "<end_of_turn>\n", "<bos><pad>"):
        assert not special_ids & set(built.encode(text)) and built.decode(built.encode(text)) == text


def test_chosen_eod_token_is_not_encoded_from_text_and_survives_pickle(tmp_path: Path) -> None:
    built = build_with_settings(tmp_path, {"eos_token": "<bos>"})
    built.use_eod("</s>")
    assert built.eod_id == built.token_to_id("</s>") and built.decode([built.eod_id]) == "</s>"
    assert built.eod_id not in built.encode("a</s>b") and built.token_to_id("<s>") in built.encode("a<s>")
    (tmp_path / "tokenizer_config.json").unlink()
    copy = pickle.loads(pickle.dumps(built))
    assert copy.eod_name == "</s>" and copy.encode_batch(TEXTS) == built.encode_batch(TEXTS)
    with pytest.raises(DataError, match="--eod-token <nowhere> is not in the vocabulary"):
        built.use_eod("<nowhere>")


def test_by_name_selects_eod_like_earlier_versions() -> None:
    assert tokenizer.build(tokenizer_path=TOKENIZER_PATH, eod_token=BY_NAME).eod_name == "</s>"


def test_non_special_eod_is_used_if_only_candidate(tmp_path: Path) -> None:
    fields = json.loads((TOKENIZER_PATH / "tokenizer.json").read_text())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if not token["special"]]
    for name in ("<pad>", "<eos>", "<bos>"):
        fields["model"]["vocab"][f"x{name}"] = fields["model"]["vocab"].pop(name)
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    built = tokenizer.build(tokenizer_path=tmp_path)
    assert built.eod_name == "</s>" and built.eod_id not in built.encode("a</s>")


def test_sentencepiece_tags_are_text_if_other_eod_exists(tmp_path: Path, corpus: list[str]) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus[-1:] for line in text[:3000].splitlines()), model_writer=model,
        vocab_size=400, user_defined_symbols=["<s>", "</s>", "<mask>"], bos_piece="<bos>", eos_piece="<eos>",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    (tmp_path / "t.model").write_bytes(model.getvalue())
    built = tokenizer.build(tokenizer_path=tmp_path / "t.model")
    sentencepiece_model = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert built.eod_name == "<eos>" and built.encode("a<s>b</s>") == sentencepiece_model.encode("a<s>b</s>")
    assert built.token_to_id("<mask>") not in built.encode("a<mask>")
    built.use_eod("</s>")
    assert built.eod_id == sentencepiece_model.piece_to_id("</s>") not in built.encode("a</s>b")
    assert pickle.loads(pickle.dumps(built)).encode("a</s><s>b") == built.encode("a</s><s>b")


@pytest.mark.parametrize("add_bos_token", [True, False, None])
def test_post_processor_decides_prompt_opening_tokens(add_bos_token: bool | None, tmp_path: Path) -> None:
    built = build_with_settings(tmp_path, {"bos_token": "<bos>", "add_bos_token": add_bos_token})
    assert built.opening_ids == (built.token_to_id("<bos>"),)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    assert tokenizer.build(tokenizer_path=tmp_path).opening_ids == ()


@pytest.mark.parametrize(("add_bos_token", "has_bos"), [(True, True), (False, False), (None, False)])
def test_tokenizer_settings_decide_opening_tokens_without_tokenizer_json(
    add_bos_token: bool | None, has_bos: bool, tmp_path: Path
) -> None:
    fields = json.loads((TOKENIZER_PATH / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(fields["model"]["vocab"]))
    merges = "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in fields["model"]["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    settings = {"bos_token": "<bos>", "add_bos_token": add_bos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    built = tokenizer.build(vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt")
    assert built.opening_ids == ((built.token_to_id("<bos>"),) if has_bos else ())
