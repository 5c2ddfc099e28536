"""Tokenizers are known by the ids that they give to text, not by the bytes of their files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron import tokenizer
from megatron.tokenizer.identity import is_same, parts
from tests.helpers.trap import FORMER_IDENTITY, TRAP

Change = Callable[[dict[str, Any]], None]


def changed(folder: Path, change: Change) -> str:
    """Return the identity of ``TRAP`` after a change to its JSON."""
    fields = json.loads((TRAP / "tokenizer.json").read_text())
    change(fields)
    (folder / "tokenizer.json").write_text(json.dumps(dict(reversed(fields.items())), indent=2, ensure_ascii=True))
    return tokenizer.build(tokenizer_path=folder).identity


def _resave(fields: dict[str, Any]) -> None:
    fields["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    fields["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    fields["pre_tokenizer"]["trim_offsets"] = not fields["pre_tokenizer"]["trim_offsets"]
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [fields["pre_tokenizer"]]}
    model = fields["model"]
    model.update(ignore_merges=False, dropout=None, fuse_unk=False)
    model["merges"] = [list(one) if isinstance(one, list) else one.split(" ") for one in model["merges"]]
    model["vocab"] = dict(sorted(model["vocab"].items()))
    fields["added_tokens"][0]["normalized"] = True


def _swap_merges(fields: dict[str, Any]) -> None:
    merges = fields["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def _swap_ids(fields: dict[str, Any]) -> None:
    vocab = fields["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def _tag(fields: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in fields["added_tokens"] if one["content"] == "</s>")


OTHERS: dict[str, Change] = {
    "merges in another order": _swap_merges,
    "two ids swapped": _swap_ids,
    "a normalizer": lambda fields: fields.update(normalizer={"type": "NFC"}),
    "a space in front": lambda fields: fields["pre_tokenizer"].update(add_prefix_space=True),
    "a tag that is special": lambda fields: _tag(fields).update(special=True),
    "a tag that takes the space before it": lambda fields: _tag(fields).update(lstrip=True),
    "a tag less": lambda fields: fields["added_tokens"].remove(_tag(fields)),
}


def test_a_file_that_was_saved_again_is_the_same_tokenizer(tmp_path: Path) -> None:
    first, second = tokenizer.build(tokenizer_path=TRAP).identity, changed(tmp_path, _resave)
    assert is_same(first, second) and first != second and parts(first)[0] == parts(second)[0]


@pytest.mark.parametrize("change", OTHERS)
def test_a_file_that_gives_other_ids_is_another_tokenizer(change: str, tmp_path: Path) -> None:
    assert not is_same(tokenizer.build(tokenizer_path=TRAP).identity, changed(tmp_path, OTHERS[change]))


def test_the_identity_of_an_earlier_version_is_accepted_while_the_file_is_unchanged(tmp_path: Path) -> None:
    now = tokenizer.build(tokenizer_path=TRAP).identity
    assert is_same(FORMER_IDENTITY, now) and is_same(now, FORMER_IDENTITY)
    assert not is_same(FORMER_IDENTITY, changed(tmp_path, _resave))  # nothing but bytes is known of it


def test_the_end_of_documents_is_no_part_of_it() -> None:
    assert (
        tokenizer.build(tokenizer_path=TRAP, eod_token="</s>").identity
        == tokenizer.build(tokenizer_path=TRAP, eod_token="<bos>").identity
    )


def _model(corpus: list[str], **settings: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[-1][:3000].splitlines()), model_writer=model, vocab_size=400, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **settings,
    )  # fmt: skip
    return model.getvalue()


def test_a_sentencepiece_model_is_known_by_its_pieces_and_normalization(tmp_path: Path, corpus: list[str]) -> None:
    def identity(model: bytes) -> str:
        (tmp_path / "t.model").write_bytes(model)
        return tokenizer.build(tokenizer_path=tmp_path / "t.model").identity

    model = _model(corpus)
    trained_elsewhere = bytes([2 << 3 | 2, 3, 1 << 3 | 2, 1, ord("x")])  # trainer_spec { input: "x" }
    with_prefix_said = bytes([3 << 3 | 2, 2, 3 << 3 | 0, 1])  # normalizer_spec { add_dummy_prefix: true }, its default
    without_prefix = bytes([3 << 3 | 2, 2, 3 << 3 | 0, 0])
    first = identity(model)
    assert is_same(first, identity(model + trained_elsewhere)) and is_same(first, identity(model + with_prefix_said))
    assert not is_same(first, identity(model + without_prefix))
    assert not is_same(first, identity(_model(corpus, add_dummy_prefix=False)))


def test_a_list_of_words_is_known_by_its_ids(tmp_path: Path) -> None:
    def identity(text: str) -> str:
        (tmp_path / "vocab.txt").write_text(text)
        return tokenizer.build("CPM2", tokenizer_path=tmp_path / "vocab.txt").identity

    first = identity("<unk>\n<eod>\na\nb\n")
    assert is_same(first, identity("<unk>\r\n<eod>\r\na\r\nb")) and not is_same(first, identity("<unk>\n<eod>\nb\na\n"))
