"""One text in consecutive pieces: of every kind it comes back as the whole text does."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron import tokenizer
from megatron.tokenizer import Tokenizer, with_gigatoken

LINES = [
    "The lamp stood\n",
    "in the window. \n",
    "\n",
    "窗前有一盏灯。\n",
    "  the house </s> by the river\n",
    "the end",
]
WORDS = ["The la", "mp stood ", " ", "\n", " in\u3000", "the <", "/s> ", "win", "dow", "", " and\u200b\t", "<pad>house"]


def sentence_piece(folder: Path, corpus: list[str], **options: object) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus[9:] for line in text.splitlines()),
        model_writer=model,
        vocab_size=500,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    (folder / "sp.model").write_bytes(model.getvalue())
    return folder / "sp.model"


def with_parts(path: Path, folder: Path, **parts: object) -> Path:
    library = tokenizers.Tokenizer.from_file(str(path))
    for name, part in parts.items():
        setattr(library, name, part)
    library.save(str(folder / "t.json"))
    return folder / "t.json"


def unigram(folder: Path, corpus: list[str], **parts: object) -> Path:
    model = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece(folder, corpus)))
    pieces = [(model.id_to_piece(number), model.get_score(number)) for number in range(model.get_piece_size())]
    tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True)).save(str(folder / "plain.json"))
    ends = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return with_parts(folder / "plain.json", folder, decoder=ends, **parts)


KINDS: dict[str, Callable[[Path, Path, list[str]], Path]] = {
    "nmt_nfkc": lambda folder, bpe, corpus: sentence_piece(folder, corpus),
    "no prefix": lambda folder, bpe, corpus: sentence_piece(folder, corpus, add_dummy_prefix=False),
    "llama": lambda folder, bpe, corpus: sentence_piece(
        folder, corpus, model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "byte level": lambda folder, bpe, corpus: bpe,
    "byte level, space": lambda folder, bpe, corpus: with_parts(
        bpe, folder, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "metaspace": lambda folder, bpe, corpus: unigram(folder, corpus, pre_tokenizer=pre_tokenizers.Metaspace()),
    "words": lambda folder, bpe, corpus: unigram(
        folder,
        corpus,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    "stripped": lambda folder, bpe, corpus: unigram(
        folder,
        corpus,
        normalizer=normalizers.Sequence(
            [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Prepend(" ")]
        ),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_come_back_as_the_whole_text_does(kind: str, tmp_path: Path, bpe_path: Path, corpus: list[str]) -> None:
    built = tokenizer.build(tokenizer_path=KINDS[kind](tmp_path, bpe_path, corpus))
    for pieces in (LINES, WORDS, [" ", "a"], ["a", " "], ["a\n", "\n", "\n", "b"], ["灯"], [""], []):
        whole, got = built.encode("".join(pieces)), built.encode_pieces(iter(pieces))
        assert got.dtype == "int32" and built.decode(got.tolist()) == built.decode(whole)
        assert not set(built.control_tokens.values()) - {built.unk_id} & set(got.tolist())
    lines = ["The lamp stood\n", "in the window.\n", "窗前有一盏灯。\n", "The end"]
    assert built.encode_pieces(lines).tolist() == built.encode("".join(lines))


def test_cpm_and_gigatoken_take_pieces(cpm_folder: Path, tmp_path: Path, bpe_path: Path) -> None:
    spaced = with_parts(bpe_path, tmp_path, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    fast: list[Tokenizer] = [tokenizer.build("CPM1", tokenizer_path=cpm_folder)]
    fast += [with_gigatoken(tokenizer.build(tokenizer_path=path), []) for path in (bpe_path, spaced)]
    for built in fast:
        lines = ["The lamp stood\n", "窗前有一盏灯\n", "in the window <eod>\n", "the end"]
        whole = built.encode("".join(lines))
        assert built.encode_pieces(lines).tolist() == whole and built.eod_id not in whole
        assert built.decode(built.encode_pieces(WORDS).tolist()) == built.decode(built.encode("".join(WORDS)))


def test_a_vocabulary_of_words_without_control_tokens_opens(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "t.json"))
    built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert built.encode("b a b") == [1, 0, 1] and built.encode_pieces(["b a", " b"]).tolist() == [1, 0, 1]
    assert json.loads((tmp_path / "t.json").read_text())["added_tokens"] == []
