"""Texts to what a model reads, and what it says to text."""

from __future__ import annotations

import pytest
import tokenizers

from megatron import tokenizer
from megatron.errors import DataError
from megatron.generate.text import UNKNOWN, ChatPrompts, Prompts, streaming, with_gaps_filled
from megatron.models.t5.data import T5Tokens, t5_tokens
from megatron.models.t5.spans import Denoiser
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat import find_template
from tests.helpers.small_corpora import make_tokenizer
from tests.helpers.trap import TRAP

TEXT = "the lamp stood in the window"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("vocabulary"))


def tokens_of(vocabulary: Tokenizer) -> T5Tokens:
    return t5_tokens(vocabulary, 3, ())


def test_gpt2_reads_the_text_and_a_document_begins_behind_an_end(vocabulary: Tokenizer) -> None:
    prompts = Prompts(vocabulary, None)
    assert prompts.encode(TEXT) == vocabulary.encode(TEXT) and prompts.eos_id == vocabulary.eod_id
    assert prompts.encode("") == [vocabulary.eod_id]
    spelled = prompts.encode(f"a{vocabulary.eod_name}<extra_id_0>")
    assert vocabulary.eod_id not in spelled and vocabulary.decode(spelled) == f"a{vocabulary.eod_name}<extra_id_0>"


def test_what_gpt2_said_comes_back_without_prompt_and_end(vocabulary: Tokenizer) -> None:
    prompts = Prompts(vocabulary, None)
    behind, said = prompts.encode("the lamp"), prompts.encode(" 灯 stood")
    assert prompts.decode([*said, vocabulary.eod_id], behind=behind) == " 灯 stood"
    assert prompts.decode(said) == " 灯 stood"
    assert prompts.decode([*said, vocabulary.vocab_size + 5]) == " 灯 stood" + UNKNOWN


def test_t5_reads_spans_by_their_sentinels_and_says_them_by_name(vocabulary: Tokenizer) -> None:
    tokens = tokens_of(vocabulary)
    prompts, (first, second, _) = Prompts(vocabulary, tokens), tokens.sentinels
    whole = vocabulary.encode(TEXT)
    found = prompts.encode("the lamp <extra_id_0> in<extra_id_1> window")
    lamp, inside, window = (vocabulary.encode(part) for part in ("the lamp", " in", " window"))
    assert found == [*lamp, first, *inside, second, *window, tokens.eos_id]
    assert set(lamp + inside + window) <= set(whole)  # words as they are in a text
    assert prompts.decode([first, *inside, second, tokens.eos_id]) == "<extra_id_0> in <extra_id_1>"
    assert prompts.encode("<extra_id_1>") == [second, tokens.eos_id] and prompts.encode("") == [tokens.eos_id]


def test_a_sentinel_or_mode_that_the_model_does_not_have_is_refused(vocabulary: Tokenizer) -> None:
    with pytest.raises(DataError, match="<extra_id_3> must be one of the model's 3 sentinels, .* to <extra_id_2>"):
        Prompts(vocabulary, tokens_of(vocabulary)).encode("a<extra_id_3>")
    with pytest.raises(DataError, match="got S. This model has no modes"):
        Prompts(vocabulary, tokens_of(vocabulary), "S")
    several = t5_tokens(vocabulary, 3, [Denoiser("R", 0.15, 3), Denoiser("X", 0.5, 8)])
    with pytest.raises(DataError, match="got S. This model has R, X"):
        Prompts(vocabulary, several, "S")
    for mode, opening in ((None, "R"), ("X", "X")):
        assert Prompts(vocabulary, several, mode).encode(TEXT)[0] == several.modes[opening]


def test_text_is_shown_as_soon_as_it_is_whole_characters(vocabulary: Tokenizer) -> None:
    prompts = Prompts(vocabulary, None)
    said, pieces = prompts.encode("a é灯b"), list[str]()
    assert len(said) > 4  # some characters are of several tokens
    on_token = streaming(prompts, prompts.encode("x"), pieces.append)
    for token in [*said, vocabulary.eod_id]:
        on_token(0, token)
    assert "".join(pieces) == "a é灯b" and UNKNOWN not in "".join(pieces) and len(pieces) > 3


def test_what_t5_says_stands_in_the_gaps_of_its_text() -> None:
    text = "<extra_id_0> tide comes <extra_id_1>，每天<extra_id_2>次"
    assert with_gaps_filled(text, "<extra_id_1> in twice <extra_id_0> The <extra_id_2>") == (
        "[The] tide comes [in twice]，每天[...]次"
    )
    assert with_gaps_filled("no gap", "anything") == "no gap"


def test_a_prompt_begins_with_bos_where_the_tokenizer_adds_it(vocabulary: Tokenizer) -> None:
    built = tokenizer.build(tokenizer_path=TRAP)
    bos, text = built.token_to_id("<bos>"), built.encode(TEXT)
    library = tokenizers.Tokenizer.from_file(str(TRAP / "tokenizer.json"))
    assert Prompts(built, None).encode(TEXT) == [bos, *text] == library.encode(TEXT).ids
    assert Prompts(built, None).encode("") == [bos]
    assert Prompts(built, None, adds_bos=False).encode(TEXT) == text
    assert Prompts(built, None, adds_bos=False).encode("") == [built.eod_id]
    assert Prompts(vocabulary, None).encode(TEXT) == vocabulary.encode(TEXT)
    assert Prompts(vocabulary, None, adds_bos=True).encode(TEXT) == [vocabulary.eod_id, *vocabulary.encode(TEXT)]
    assert bos not in Prompts(built, tokens_of(built)).encode(TEXT)


def test_a_chat_template_writes_bos_itself() -> None:
    built = tokenizer.build(tokenizer_path=TRAP)
    ids = ChatPrompts(find_template(built)).encode("hi")
    assert ids.count(built.token_to_id("<bos>")) == 1 and ids[0] == built.token_to_id("<bos>")
