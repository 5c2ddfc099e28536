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


def write_bpe(folder: Path, bpe_path: Path, is_special: bool) -> Path:
    library = tokenizers.Tokenizer.from_file(str(bpe_path))
    (library.add_special_tokens if is_special else library.add_tokens)([*NAMES, "<|my own|>"])
    library.save(str(folder / "bpe.json"))
    return folder / "bpe.json"


def write_sentencepiece(folder: Path, corpus: list[str]) -> Path:
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


def write_unigram(folder: Path, model: Path) -> Path:
    """A T5 folder's tokenizer.json: control tokens are pieces of the unigram model, each word gets a mark in front."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    scores = [
        (processor.id_to_piece(piece_id), processor.get_score(piece_id))
        for piece_id in range(processor.get_piece_size())
    ]
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
    builders: dict[str, Callable[[], Tokenizer]] = {
        "special": lambda: tokenizer.build(tokenizer_path=write_bpe(folder, bpe_path, True)),
        "sentencepiece": lambda: tokenizer.build(tokenizer_path=write_sentencepiece(folder, corpus)),
        "unigram": lambda: tokenizer.build(tokenizer_path=write_unigram(folder, write_sentencepiece(folder, corpus))),
        "cpm1": lambda: tokenizer.build("CPM1", tokenizer_path=request.getfixturevalue("cpm_folder")),
    }
    return builders[request.param]()


def test_control_token_spellings_are_encoded_as_text_and_round_trip(built: Tokenizer) -> None:
    names = [name for name in built.control_tokens if len(name) > 1]
    assert len(names) >= 7
    ids = set(built.control_tokens.values()) - {built.unk_id}
    texts = [
        text for name in names for text in (f"a{name}b c", f"{name}{name} a{name}", f"灯 {name[:-1]}{name}{name[1:]}")
    ]
    for text, encoded in zip(texts, built.encode_batch(texts), strict=True):
        assert not ids & set(encoded) and built.decode(encoded) == text


def test_encode_arrays_equals_encode_with_and_without_spellings(built: Tokenizer) -> None:
    texts = ["a b", "", "x<pad>y</s>", "<pad>", "灯", "<|endoftext|> <eod>", ""]
    tokens, lengths = built.encode_arrays(texts)
    assert (tokens.dtype, lengths.dtype) == (np.int32, np.int64)
    assert [ids.tolist() for ids in np.split(tokens, np.cumsum(lengths)[:-1])] == [built.encode(text) for text in texts]
    assert [len(array) for array in built.encode_arrays([])] == [0, 0] and built.encode_batch([]) == []


def test_pickled_copy_yields_same_ids(built: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(built))
    assert copy.encode("a<pad>b</s> 灯") == built.encode("a<pad>b</s> 灯")
    assert copy.identity == built.identity and copy.vocab_size == built.vocab_size


@pytest.mark.parametrize("tokenizer_type", ["special", "plain", "unigram"])
def test_library_reads_tokenizer_file_once_and_variants_agree(
    tokenizer_type: str, tmp_path: Path, bpe_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary of Gemma 3 has 33 MB: each time that the library reads it takes 2 s."""
    folder = write_unigram(tmp_path, write_sentencepiece(tmp_path, corpus)) if tokenizer_type == "unigram" else tmp_path
    path = (
        folder / "tokenizer.json"
        if tokenizer_type == "unigram"
        else write_bpe(tmp_path, bpe_path, tokenizer_type == "special")
    )
    description, loaded_lengths, load = path.read_text(encoding="utf-8"), list[int](), huggingface.load
    monkeypatch.setattr(huggingface, "load", lambda text: (loaded_lengths.append(len(text)), load(text))[1])
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
    assert [length for length in loaded_lengths if length > len(description) // 2] == [len(description)]


def test_declared_control_tokens_are_control_tokens(tmp_path: Path, bpe_path: Path) -> None:
    special_tokenizer = tokenizer.build(tokenizer_path=write_bpe(tmp_path, bpe_path, True))
    assert set(NAMES) | {"<|my own|>"} <= special_tokenizer.control_tokens.keys()
    added_tokenizer = tokenizer.build(tokenizer_path=write_bpe(tmp_path, bpe_path, False))
    assert added_tokenizer.control_tokens.keys() == {"<|endoftext|>"}  # no special token ends a document
    assert added_tokenizer.encode("a<pad>b</s>") == [
        added_tokenizer.token_to_id(name) for name in ("a", "<pad>", "b", "</s>")
    ]
    assert added_tokenizer.token_to_id("<|endoftext|>") not in added_tokenizer.encode("a<|endoftext|>")


def test_added_token_is_text_unless_special(tmp_path: Path, bpe_path: Path) -> None:
    assert not tokenizer.build(tokenizer_path=bpe_path).spelled_names
    for is_special in (False, True):
        fields = json.loads(bpe_path.read_text())
        added = {**fields["added_tokens"][0], "id": 700, "content": "<mask>", "special": is_special}
        fields["added_tokens"].append(added)
        (tmp_path / "t.json").write_text(json.dumps(fields))
        built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
        assert (700 in built.encode("a <mask> b")) is not is_special
        assert built.decode(built.encode("a <mask> b")) == "a <mask> b"


def test_overlapping_spellings_are_all_split() -> None:
    spellings = Spellings(["ab", "bc", "abc", "<x>"])
    for text in ("abc", "ab<x>bcab", "aabbcc", "<x><x>", "plain", ""):
        fragments = spellings.split(text)
        assert "".join(fragments) == text and not any(
            name in fragment for fragment in fragments for name in spellings.names
        )
    assert not Spellings([]) and not Spellings([]).is_in("a")
