from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
import transformers

from megatron import tokenizer
from megatron.errors import DataError
from megatron.models.t5.data import t5_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> Path:
    """spiece.model in T5's layout (<pad> 0, </s> 1, <unk> 2), and the tokenizer.json that Hugging Face makes of it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus[9:] for line in text.splitlines()),
        model_writer=model,
        vocab_size=300,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    folder = tmp_path_factory.mktemp("t5")
    (folder / "spiece.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    scores = [
        (processor.id_to_piece(piece_id), processor.get_score(piece_id))
        for piece_id in range(processor.get_piece_size())
    ]
    scores += [(f"<extra_id_{piece_id}>", 0.0) for piece_id in range(99, -1, -1)]
    transformers.T5Tokenizer(vocab=scores).save_pretrained(folder)
    return folder


def test_sentinels_equal_hugging_face_from_either_file(folder: Path) -> None:
    reference = transformers.T5Tokenizer.from_pretrained(folder)
    expected = tuple(reference.convert_tokens_to_ids(f"<extra_id_{sentinel_idx}>") for sentinel_idx in range(100))
    num_pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model")).get_piece_size()
    assert expected == tuple(range(num_pieces + 99, num_pieces - 1, -1))
    for tokenizer_type in ("T5SentencePiece", "TokenizersJSON"):
        built = tokenizer.build(tokenizer_type, tokenizer_path=folder)
        assert built.sentinel_ids == expected and built.vocab_size == num_pieces + 100
        assert (built.pad_id, built.eod_id, built.unk_id) == (0, 1, 2)
        assert built.control_tokens["<extra_id_7>"] == expected[7]


def test_appended_sentinels_equal_tokenizer_sentinels(folder: Path) -> None:
    t5_tokenizer = tokenizer.build("T5SentencePiece", tokenizer_path=folder)
    sentencepiece_tokenizer = tokenizer.build("SentencePiece", tokenizer_path=folder / "spiece.model")
    assert sentencepiece_tokenizer.sentinel_ids == () and sentencepiece_tokenizer.identity != t5_tokenizer.identity
    appended, builtin = (t5_tokens(built, 100, []) for built in (sentencepiece_tokenizer, t5_tokenizer))
    assert (
        appended.sentinels == builtin.sentinels and appended.vocab_size == builtin.vocab_size == t5_tokenizer.vocab_size
    )


def test_ids_equal_hugging_face(folder: Path, corpus: list[str]) -> None:
    reference = transformers.T5Tokenizer.from_pretrained(folder)
    built = tokenizer.build("T5SentencePiece", tokenizer_path=folder)
    for line in [line.strip() for text in corpus[9:12] for line in text.splitlines() if line.strip()]:
        assert built.encode(line) == reference.encode(line, add_special_tokens=False)


def test_sentinel_in_text_is_text_and_sentinel_id_decodes_to_name(folder: Path) -> None:
    built = tokenizer.build("T5SentencePiece", tokenizer_path=folder / "spiece.model")
    assert not set(built.encode("a <extra_id_0> b</s>")) & {*built.sentinel_ids, 0, 1}
    first, second = built.sentinel_ids[:2]
    assert built.decode([first, *built.encode("the lamp"), second]) == "<extra_id_0>the lamp<extra_id_1>"


def test_folder_without_model_suggests_tokenizer_type(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="folder with spiece.model, got .*--tokenizer-type TokenizersJSON"):
        tokenizer.build("T5SentencePiece", tokenizer_path=tmp_path)
