"""Text that a normaliser makes into the spelling of a control token is text: of every kind that normalises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, trainers

from megatron import tokenizer
from megatron.tokenizer import Tokenizer, with_gigatoken
from tests.tokenizer.test_pieces import write_sentencepiece, write_unigram, write_with_components

NAMES = ["<pad>", "</s>", "<mask>"]
TEXTS = [
    "a＜/s＞b",
    "＜/s＞",
    "</S>",
    "x ＜pad＞＜pad＞ y",
    "＜/s>",
    "灯＜mask> ＜PAD＞ </s>",
    "＜|endoftext|＞",
    "ａ",
]


def write_unigram_json(folder: Path, corpus: list[str], pre_tokenizer: object) -> Path:
    path = write_unigram(folder, corpus, normalizer=normalizers.NFKC(), pre_tokenizer=pre_tokenizer)
    library = tokenizers.Tokenizer.from_file(str(path))
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", *NAMES],
        unk_token="<unk>",
        initial_alphabet=list("</>"),
        show_progress=False,
    )
    library.train_from_iterator(corpus[9:], trainer)
    library.decoder = decoders.Metaspace()
    library.save(str(path))
    return path


def write_byte_bpe(folder: Path, bpe: Path) -> Path:
    library = tokenizers.Tokenizer.from_file(str(bpe))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    library.add_tokens([tokenizers.AddedToken(name, normalized=True) for name in NAMES])
    library.save(str(folder / "t.json"))
    return folder / "t.json"


BUILDERS: dict[str, Callable[[Path, Path, list[str]], Tokenizer]] = {
    "unigram": lambda folder, bpe, corpus: tokenizer.build(
        tokenizer_path=write_unigram_json(folder, corpus, pre_tokenizers.Metaspace())
    ),
    "words": lambda folder, bpe, corpus: tokenizer.build(
        tokenizer_path=write_unigram_json(
            folder, corpus, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        )
    ),
    "bpe": lambda folder, bpe, corpus: tokenizer.build(tokenizer_path=write_byte_bpe(folder, bpe)),
    "gigatoken": lambda folder, bpe, corpus: with_gigatoken(
        tokenizer.build(tokenizer_path=write_with_components(bpe, folder, normalizer=normalizers.NFC())), []
    ),
    "sentencepiece": lambda folder, bpe, corpus: tokenizer.build(
        tokenizer_path=write_sentencepiece(folder, corpus, user_defined_symbols=["<pad>", "<mask>"])
    ),
    "cpm1": lambda folder, bpe, corpus: tokenizer.build(
        "CPM1", tokenizer_path=write_sentencepiece(folder, corpus, user_defined_symbols=["<pad>", "<mask>"])
    ),
}


@pytest.mark.parametrize("tokenizer_type", BUILDERS)
def test_normalised_text_never_becomes_control_token(
    tokenizer_type: str, tmp_path: Path, bpe_path: Path, corpus: list[str]
) -> None:
    built = BUILDERS[tokenizer_type](tmp_path, bpe_path, corpus)
    control_ids = set(built.control_tokens.values()) - {built.unk_id}
    encoded = built.encode_batch(TEXTS)
    assert not control_ids & {token for ids in encoded for token in ids} and all(encoded)
    assert encoded == [built.encode(text) for text in TEXTS]
    assert not control_ids & set(built.encode_chunks(TEXTS).tolist())
    if tokenizer_type in ("unigram", "bpe"):
        assert built.decode(encoded[0]).casefold() == "a</s>b" and built.decode(encoded[-1]) == "a"
