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
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    scores = [(pieces.id_to_piece(number), pieces.get_score(number)) for number in range(pieces.get_piece_size())]
    scores += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    transformers.T5Tokenizer(vocab=scores).save_pretrained(folder)
    return folder


def test_sentinels_are_those_of_hugging_face_from_either_file(folder: Path) -> None:
    reference = transformers.T5Tokenizer.from_pretrained(folder)
    expected = tuple(reference.convert_tokens_to_ids(f"<extra_id_{number}>") for number in range(100))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model")).get_piece_size()
    assert expected == tuple(range(pieces + 99, pieces - 1, -1))
    for kind in ("T5SentencePiece", "TokenizersJSON"):
        built = tokenizer.build(kind, tokenizer_path=folder)
        assert built.sentinel_ids == expected and built.vocab_size == pieces + 100
        assert (built.pad_id, built.eod_id, built.unk_id) == (0, 1, 2)
        assert built.control_tokens["<extra_id_7>"] == expected[7]


def test_sentinels_appended_by_a_run_are_the_same_and_are_not_counted_twice(folder: Path) -> None:
    own = tokenizer.build("T5SentencePiece", tokenizer_path=folder)
    plain = tokenizer.build("SentencePiece", tokenizer_path=folder / "spiece.model")
    assert plain.sentinel_ids == () and plain.identity != own.identity
    by_run, by_tokenizer = (t5_tokens(built, 100, []) for built in (plain, own))
    assert by_run.sentinels == by_tokenizer.sentinels and by_run.vocab_size == by_tokenizer.vocab_size == own.vocab_size


def test_ids_of_text_are_those_of_hugging_face(folder: Path, corpus: list[str]) -> None:
    reference = transformers.T5Tokenizer.from_pretrained(folder)
    built = tokenizer.build("T5SentencePiece", tokenizer_path=folder)
    for line in [line.strip() for text in corpus[9:12] for line in text.splitlines() if line.strip()]:
        assert built.encode(line) == reference.encode(line, add_special_tokens=False)


def test_a_sentinel_in_text_is_text_and_one_among_ids_comes_back_by_name(folder: Path) -> None:
    built = tokenizer.build("T5SentencePiece", tokenizer_path=folder / "spiece.model")
    assert not set(built.encode("a <extra_id_0> b</s>")) & {*built.sentinel_ids, 0, 1}
    first, second = built.sentinel_ids[:2]
    assert built.decode([first, *built.encode("the lamp"), second]) == "<extra_id_0>the lamp<extra_id_1>"


def test_a_folder_without_a_model_names_the_kind_that_reads_its_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="folder with spiece.model, got .*--tokenizer-type TokenizersJSON"):
        tokenizer.build("T5SentencePiece", tokenizer_path=tmp_path)
