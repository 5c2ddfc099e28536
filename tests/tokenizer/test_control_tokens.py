"""Text that spells a control token is ordinary text: of every kind, for every name."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megatron import tokenizer
from megatron.tokenizer import Tokenizer, huggingface
from megatron.tokenizer.continued_text import without_prefix
from megatron.tokenizer.control_tokens import Spellings

NAMES = [
    "<|endoftext|>",
    "<pad>",
    "<mask>",
    "<extra_id_0>",
    "<s_3>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "</s>",
]


def bpe(folder: Path, bpe_path: Path, special: bool) -> Path:
    library = tokenizers.Tokenizer.from_file(str(bpe_path))
    (library.add_special_tokens if special else library.add_tokens)([*NAMES, "<|my own|>"])
    library.save(str(folder / "bpe.json"))
    return folder / "bpe.json"


def sentence_piece(folder: Path, corpus: list[str]) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus[-3:] for line in text.splitlines()),
        model_writer=model,
        vocab_size=400,
        user_defined_symbols=NAMES[:-1],
        byte_fallback=True,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    (folder / "sp.model").write_bytes(model.getvalue())
    return folder / "sp.model"


def unigram(folder: Path, model: Path) -> Path:
    """A T5 folder's tokenizer.json: control tokens are pieces of the unigram model, each word gets a mark in front."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    scores = [(pieces.id_to_piece(number), pieces.get_score(number)) for number in range(pieces.get_piece_size())]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=0, byte_fallback=True))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    library.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(prepend_scheme="always")]
    )
    library.add_special_tokens(["<pad>", "</s>"])
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=["special", "sentencepiece", "unigram", "cpm1"])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bpe_path: Path, corpus: list[str]
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("control")
    made: dict[str, Callable[[], Tokenizer]] = {
        "special": lambda: tokenizer.build(tokenizer_path=bpe(folder, bpe_path, True)),
        "sentencepiece": lambda: tokenizer.build(tokenizer_path=sentence_piece(folder, corpus)),
        "unigram": lambda: tokenizer.build(tokenizer_path=unigram(folder, sentence_piece(folder, corpus))),
        "cpm1": lambda: tokenizer.build("CPM1", tokenizer_path=request.getfixturevalue("cpm_folder")),
    }
    return made[request.param]()


def test_no_spelling_becomes_a_control_token_and_each_comes_back(built: Tokenizer) -> None:
    names = [name for name in built.control_tokens if len(name) > 1]
    assert len(names) >= 7
    ids = set(built.control_tokens.values()) - {built.unk_id}
    texts = [
        text for name in names for text in (f"a{name}b c", f"{name}{name} a{name}", f"灯 {name[:-1]}{name}{name[1:]}")
    ]
    for text, encoded in zip(texts, built.encode_batch(texts), strict=True):
        assert not ids & set(encoded) and built.decode(encoded) == text


def test_arrays_hold_what_lists_hold_with_and_without_spellings(built: Tokenizer) -> None:
    texts = ["a b", "", "x<pad>y</s>", "<pad>", "灯", "<|endoftext|> <eod>", ""]
    tokens, sizes = built.encode_arrays(texts)
    assert (tokens.dtype, sizes.dtype) == (np.int32, np.int64)
    assert [part.tolist() for part in np.split(tokens, np.cumsum(sizes)[:-1])] == [built.encode(text) for text in texts]
    assert [len(array) for array in built.encode_arrays([])] == [0, 0] and built.encode_batch([]) == []


def test_a_copy_for_another_process_gives_the_same_ids(built: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(built))
    assert copy.encode("a<pad>b</s> 灯") == built.encode("a<pad>b</s> 灯")
    assert copy.identity == built.identity and copy.vocab_size == built.vocab_size


@pytest.mark.parametrize("kind", ["special", "plain", "unigram"])
def test_a_tokenizer_is_read_by_the_library_once_and_its_parts_agree_with_the_file(
    kind: str, tmp_path: Path, bpe_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary of Gemma 3 has 33 MB: each time that the library reads it takes 2 s."""
    made = unigram(tmp_path, sentence_piece(tmp_path, corpus)) if kind == "unigram" else tmp_path
    path = made / "tokenizer.json" if kind == "unigram" else bpe(tmp_path, bpe_path, kind == "special")
    description, sizes, load = path.read_text(encoding="utf-8"), list[int](), huggingface.load
    monkeypatch.setattr(huggingface, "load", lambda text: (sizes.append(len(text)), load(text))[1])
    built = tokenizer.build(tokenizer_path=path)
    assert isinstance(built, huggingface.LibraryTokenizer)
    texts = [text for name in NAMES for text in (f"a{name} b", f" {name}{name}  灯", name[1:])]
    continued, rendered = load(without_prefix(description)), load(description)
    rendered.encode_special_tokens = False
    built._encode_continued(["x"])
    assert built._continued is not None
    for text in texts:
        assert built.encode_rendered(text)[0] == rendered.encode(text, add_special_tokens=False).ids
        ids = continued.encode(text, add_special_tokens=False).ids
        assert built._continued.encode(text, add_special_tokens=False).ids == ids
    assert [size for size in sizes if size > len(description) // 2] == [len(description)]


def test_declared_control_tokens_are_control_tokens(tmp_path: Path, bpe_path: Path) -> None:
    special = tokenizer.build(tokenizer_path=bpe(tmp_path, bpe_path, True))
    assert set(NAMES) | {"<|my own|>"} <= special.control_tokens.keys()
    added = tokenizer.build(tokenizer_path=bpe(tmp_path, bpe_path, False))
    assert added.control_tokens.keys() == {"<|endoftext|>"}  # no special token ends a document
    assert added.encode("a<pad>b</s>") == [added.token_to_id(name) for name in ("a", "<pad>", "b", "</s>")]
    assert added.token_to_id("<|endoftext|>") not in added.encode("a<|endoftext|>")


def test_an_added_token_is_text_unless_it_is_special(tmp_path: Path, bpe_path: Path) -> None:
    assert not tokenizer.build(tokenizer_path=bpe_path).spelled_names
    for is_special in (False, True):
        library = json.loads(bpe_path.read_text())
        added = {**library["added_tokens"][0], "id": 700, "content": "<mask>", "special": is_special}
        library["added_tokens"].append(added)
        (tmp_path / "t.json").write_text(json.dumps(library))
        built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
        assert (700 in built.encode("a <mask> b")) is not is_special
        assert built.decode(built.encode("a <mask> b")) == "a <mask> b"


def test_spellings_that_overlap_are_all_cut() -> None:
    spellings = Spellings(["ab", "bc", "abc", "<x>"])
    for text in ("abc", "ab<x>bcab", "aabbcc", "<x><x>", "plain", ""):
        parts = spellings.cut(text)
        assert "".join(parts) == text and not any(name in part for part in parts for name in spellings.names)
    assert not Spellings([]) and not Spellings([]).is_in("a")
