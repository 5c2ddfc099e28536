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
from tests.helpers.trap import OLD_IDENTITY, TOKENIZER_PATH

Change = Callable[[dict[str, Any]], None]


def changed_identity(folder: Path, change: Change) -> str:
    """Return the identity of ``TOKENIZER_PATH`` after a change to its JSON."""
    fields = json.loads((TOKENIZER_PATH / "tokenizer.json").read_text())
    change(fields)
    (folder / "tokenizer.json").write_text(json.dumps(dict(reversed(fields.items())), indent=2, ensure_ascii=True))
    return tokenizer.build(tokenizer_path=folder).identity


def _reformat(fields: dict[str, Any]) -> None:
    fields["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    fields["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    fields["pre_tokenizer"]["trim_offsets"] = not fields["pre_tokenizer"]["trim_offsets"]
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [fields["pre_tokenizer"]]}
    model = fields["model"]
    model.update(ignore_merges=False, dropout=None, fuse_unk=False)
    model["merges"] = [list(merge) if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["vocab"] = dict(sorted(model["vocab"].items()))
    fields["added_tokens"][0]["normalized"] = True


def _swap_merges(fields: dict[str, Any]) -> None:
    merges = fields["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def _swap_ids(fields: dict[str, Any]) -> None:
    vocab = fields["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def _find_tag(fields: dict[str, Any]) -> dict[str, Any]:
    return next(token for token in fields["added_tokens"] if token["content"] == "</s>")


CHANGES: dict[str, Change] = {
    "merges in another order": _swap_merges,
    "two ids swapped": _swap_ids,
    "a normalizer": lambda fields: fields.update(normalizer={"type": "NFC"}),
    "a space in front": lambda fields: fields["pre_tokenizer"].update(add_prefix_space=True),
    "a tag that is special": lambda fields: _find_tag(fields).update(special=True),
    "a tag that takes the space before it": lambda fields: _find_tag(fields).update(lstrip=True),
    "a tag less": lambda fields: fields["added_tokens"].remove(_find_tag(fields)),
}


def test_resaved_file_has_same_identity(tmp_path: Path) -> None:
    first, second = tokenizer.build(tokenizer_path=TOKENIZER_PATH).identity, changed_identity(tmp_path, _reformat)
    assert is_same(first, second) and first != second and parts(first)[0] == parts(second)[0]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_ids_change_identity(change: str, tmp_path: Path) -> None:
    assert not is_same(
        tokenizer.build(tokenizer_path=TOKENIZER_PATH).identity, changed_identity(tmp_path, CHANGES[change])
    )


def test_old_identity_is_accepted_for_unchanged_file(tmp_path: Path) -> None:
    current = tokenizer.build(tokenizer_path=TOKENIZER_PATH).identity
    assert is_same(OLD_IDENTITY, current) and is_same(current, OLD_IDENTITY)
    assert not is_same(OLD_IDENTITY, changed_identity(tmp_path, _reformat))  # nothing but bytes is known of it


def test_eod_token_is_not_included_in_identity() -> None:
    assert (
        tokenizer.build(tokenizer_path=TOKENIZER_PATH, eod_token="</s>").identity
        == tokenizer.build(tokenizer_path=TOKENIZER_PATH, eod_token="<bos>").identity
    )


def _train_model(corpus: list[str], **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[-1][:3000].splitlines()), model_writer=model, vocab_size=400, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    return model.getvalue()


def test_sentencepiece_identity_depends_on_pieces_and_normalization(tmp_path: Path, corpus: list[str]) -> None:
    def identity(model: bytes) -> str:
        (tmp_path / "t.model").write_bytes(model)
        return tokenizer.build(tokenizer_path=tmp_path / "t.model").identity

    model = _train_model(corpus)
    trainer_spec = bytes([2 << 3 | 2, 3, 1 << 3 | 2, 1, ord("x")])  # trainer_spec { input: "x" }
    explicit_default_prefix = bytes(
        [3 << 3 | 2, 2, 3 << 3 | 0, 1]
    )  # normalizer_spec { add_dummy_prefix: true }, its default
    without_prefix = bytes([3 << 3 | 2, 2, 3 << 3 | 0, 0])
    first = identity(model)
    assert is_same(first, identity(model + trainer_spec)) and is_same(first, identity(model + explicit_default_prefix))
    assert not is_same(first, identity(model + without_prefix))
    assert not is_same(first, identity(_train_model(corpus, add_dummy_prefix=False)))


def test_word_list_identity_depends_on_ids(tmp_path: Path) -> None:
    def identity(text: str) -> str:
        (tmp_path / "vocab.txt").write_text(text)
        return tokenizer.build("CPM2", tokenizer_path=tmp_path / "vocab.txt").identity

    first = identity("<unk>\n<eod>\na\nb\n")
    assert is_same(first, identity("<unk>\r\n<eod>\r\na\r\nb")) and not is_same(first, identity("<unk>\n<eod>\nb\na\n"))
