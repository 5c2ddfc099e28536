"""Texts to what a model reads, and what it says to text."""

from __future__ import annotations

import pytest
import tokenizers

from megatron import tokenizer
from megatron.errors import DataError
from megatron.generate.text import UNKNOWN, ChatPrompts, Prompts, fill_gaps, streaming
from megatron.models.t5.data import T5Tokens, t5_tokens
from megatron.models.t5.spans import Denoiser
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat import find_template
from tests.helpers.small_corpora import make_tokenizer
from tests.helpers.trap import TOKENIZER_PATH

TEXT = "the lamp stood in the window"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("vocabulary"))


def tokens_of(vocabulary: Tokenizer) -> T5Tokens:
    return t5_tokens(vocabulary, 3, ())


def test_gpt2_prompt_equals_encoded_text_and_empty_prompt_is_eod(vocabulary: Tokenizer) -> None:
    prompts = Prompts(vocabulary, None)
    assert prompts.encode(TEXT) == vocabulary.encode(TEXT) and prompts.eos_id == vocabulary.eod_id
    assert prompts.encode("") == [vocabulary.eod_id]
    spelled_ids = prompts.encode(f"a{vocabulary.eod_name}<extra_id_0>")
    assert (
        vocabulary.eod_id not in spelled_ids and vocabulary.decode(spelled_ids) == f"a{vocabulary.eod_name}<extra_id_0>"
    )


def test_gpt2_answer_is_decoded_without_prompt_and_eod(vocabulary: Tokenizer) -> None:
    prompts = Prompts(vocabulary, None)
    prompt_ids, answer_ids = prompts.encode("the lamp"), prompts.encode(" 灯 stood")
    assert prompts.decode([*answer_ids, vocabulary.eod_id], prompt=prompt_ids) == " 灯 stood"
    assert prompts.decode(answer_ids) == " 灯 stood"
    assert prompts.decode([*answer_ids, vocabulary.vocab_size + 5]) == " 灯 stood" + UNKNOWN


def test_t5_spans_use_sentinels_and_decode_to_names(vocabulary: Tokenizer) -> None:
    tokens = tokens_of(vocabulary)
    prompts, (first, second, _) = Prompts(vocabulary, tokens), tokens.sentinels
    full_ids = vocabulary.encode(TEXT)
    prompt_ids = prompts.encode("the lamp <extra_id_0> in<extra_id_1> window")
    lamp, inside, window = (vocabulary.encode(fragment) for fragment in ("the lamp", " in", " window"))
    assert prompt_ids == [*lamp, first, *inside, second, *window, tokens.eos_id]
    assert set(lamp + inside + window) <= set(full_ids)  # words as they are in a text
    assert prompts.decode([first, *inside, second, tokens.eos_id]) == "<extra_id_0> in <extra_id_1>"
    assert prompts.encode("<extra_id_1>") == [second, tokens.eos_id] and prompts.encode("") == [tokens.eos_id]


def test_unknown_sentinel_or_mode_is_rejected(vocabulary: Tokenizer) -> None:
    with pytest.raises(DataError, match="<extra_id_3> must be one of the model's 3 sentinels, .* to <extra_id_2>"):
        Prompts(vocabulary, tokens_of(vocabulary)).encode("a<extra_id_3>")
    with pytest.raises(DataError, match="got S. This model has no modes"):
        Prompts(vocabulary, tokens_of(vocabulary), "S")
    tokens_with_modes = t5_tokens(vocabulary, 3, [Denoiser("R", 0.15, 3), Denoiser("X", 0.5, 8)])
    with pytest.raises(DataError, match="got S. This model has R, X"):
        Prompts(vocabulary, tokens_with_modes, "S")
    for mode, mode_name in ((None, "R"), ("X", "X")):
        assert Prompts(vocabulary, tokens_with_modes, mode).encode(TEXT)[0] == tokens_with_modes.modes[mode_name]


def test_streaming_emits_complete_characters(vocabulary: Tokenizer) -> None:
    prompts = Prompts(vocabulary, None)
    answer_ids, chunks = prompts.encode("a é灯b"), list[str]()
    assert len(answer_ids) > 4  # some characters are of several tokens
    on_token = streaming(prompts, prompts.encode("x"), chunks.append)
    for token in [*answer_ids, vocabulary.eod_id]:
        on_token(0, token)
    assert "".join(chunks) == "a é灯b" and UNKNOWN not in "".join(chunks) and len(chunks) > 3


def test_t5_answers_fill_gaps_of_text() -> None:
    text = "<extra_id_0> tide comes <extra_id_1>，每天<extra_id_2>次"
    assert fill_gaps(text, "<extra_id_1> in twice <extra_id_0> The <extra_id_2>") == (
        "[The] tide comes [in twice]，每天[...]次"
    )
    assert fill_gaps("no gap", "anything") == "no gap"


def test_prompt_starts_with_bos_if_tokenizer_adds_it(vocabulary: Tokenizer) -> None:
    built = tokenizer.build(tokenizer_path=TOKENIZER_PATH)
    bos_id, text = built.token_to_id("<bos>"), built.encode(TEXT)
    library = tokenizers.Tokenizer.from_file(str(TOKENIZER_PATH / "tokenizer.json"))
    assert Prompts(built, None).encode(TEXT) == [bos_id, *text] == library.encode(TEXT).ids
    assert Prompts(built, None).encode("") == [bos_id]
    assert Prompts(built, None, adds_bos=False).encode(TEXT) == text
    assert Prompts(built, None, adds_bos=False).encode("") == [built.eod_id]
    assert Prompts(vocabulary, None).encode(TEXT) == vocabulary.encode(TEXT)
    assert Prompts(vocabulary, None, adds_bos=True).encode(TEXT) == [vocabulary.eod_id, *vocabulary.encode(TEXT)]
    assert bos_id not in Prompts(built, tokens_of(built)).encode(TEXT)


def test_chat_template_adds_bos_once() -> None:
    built = tokenizer.build(tokenizer_path=TOKENIZER_PATH)
    ids = ChatPrompts(find_template(built)).encode("hi")
    assert ids.count(built.token_to_id("<bos>")) == 1 and ids[0] == built.token_to_id("<bos>")
