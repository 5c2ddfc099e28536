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
CHUNKS = [
    "The la",
    "mp stood ",
    " ",
    "\n",
    " in\u3000",
    "the <",
    "/s> ",
    "win",
    "dow",
    "",
    " and\u200b\t",
    "<pad>house",
]


def write_sentencepiece(folder: Path, corpus: list[str], **options: object) -> Path:
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


def write_with_components(path: Path, folder: Path, **components: object) -> Path:
    library = tokenizers.Tokenizer.from_file(str(path))
    for name, component in components.items():
        setattr(library, name, component)
    library.save(str(folder / "t.json"))
    return folder / "t.json"


def write_unigram(folder: Path, corpus: list[str], **components: object) -> Path:
    model = sentencepiece.SentencePieceProcessor(model_file=str(write_sentencepiece(folder, corpus)))
    scores = [(model.id_to_piece(piece_id), model.get_score(piece_id)) for piece_id in range(model.get_piece_size())]
    tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True)).save(str(folder / "plain.json"))
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return write_with_components(folder / "plain.json", folder, decoder=decoder, **components)


WRITERS: dict[str, Callable[[Path, Path, list[str]], Path]] = {
    "nmt_nfkc": lambda folder, bpe, corpus: write_sentencepiece(folder, corpus),
    "no prefix": lambda folder, bpe, corpus: write_sentencepiece(folder, corpus, add_dummy_prefix=False),
    "llama": lambda folder, bpe, corpus: write_sentencepiece(
        folder, corpus, model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "byte level": lambda folder, bpe, corpus: bpe,
    "byte level, space": lambda folder, bpe, corpus: write_with_components(
        bpe, folder, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "metaspace": lambda folder, bpe, corpus: write_unigram(folder, corpus, pre_tokenizer=pre_tokenizers.Metaspace()),
    "words": lambda folder, bpe, corpus: write_unigram(
        folder,
        corpus,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    "stripped": lambda folder, bpe, corpus: write_unigram(
        folder,
        corpus,
        normalizer=normalizers.Sequence(
            [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Prepend(" ")]
        ),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"),
    ),
}


@pytest.mark.parametrize("tokenizer_type", WRITERS)
def test_encoded_chunks_decode_to_full_text(
    tokenizer_type: str, tmp_path: Path, bpe_path: Path, corpus: list[str]
) -> None:
    built = tokenizer.build(tokenizer_path=WRITERS[tokenizer_type](tmp_path, bpe_path, corpus))
    for chunks in (LINES, CHUNKS, [" ", "a"], ["a", " "], ["a\n", "\n", "\n", "b"], ["灯"], [""], []):
        full_ids, actual = built.encode("".join(chunks)), built.encode_chunks(iter(chunks))
        assert actual.dtype == "int32" and built.decode(actual.tolist()) == built.decode(full_ids)
        assert not set(built.control_tokens.values()) - {built.unk_id} & set(actual.tolist())
    lines = ["The lamp stood\n", "in the window.\n", "窗前有一盏灯。\n", "The end"]
    assert built.encode_chunks(lines).tolist() == built.encode("".join(lines))


def test_cpm_and_gigatoken_encode_chunks(cpm_folder: Path, tmp_path: Path, bpe_path: Path) -> None:
    spaced_path = write_with_components(
        bpe_path, tmp_path, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    )
    tokenizers_under_test: list[Tokenizer] = [tokenizer.build("CPM1", tokenizer_path=cpm_folder)]
    tokenizers_under_test += [
        with_gigatoken(tokenizer.build(tokenizer_path=path), []) for path in (bpe_path, spaced_path)
    ]
    for built in tokenizers_under_test:
        lines = ["The lamp stood\n", "窗前有一盏灯\n", "in the window <eod>\n", "the end"]
        full_ids = built.encode("".join(lines))
        assert built.encode_chunks(lines).tolist() == full_ids and built.eod_id not in full_ids
        assert built.decode(built.encode_chunks(CHUNKS).tolist()) == built.decode(built.encode("".join(CHUNKS)))


def test_word_level_vocabulary_without_control_tokens_is_supported(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "t.json"))
    built = tokenizer.build(tokenizer_path=tmp_path / "t.json")
    assert built.encode("b a b") == [1, 0, 1] and built.encode_chunks(["b a", " b"]).tolist() == [1, 0, 1]
    assert json.loads((tmp_path / "t.json").read_text())["added_tokens"] == []
