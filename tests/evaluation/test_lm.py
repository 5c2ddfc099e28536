"""Our model as lm_eval asks it: which tokens are scored behind which, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.evaluation.all_ranks import Writing, before_stop
from megatron.evaluation.scoring import Row
from megatron.generate.sampling import Sampling
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.huggingface import from_json_files
from tests.helpers import small_corpora
from tests.helpers.evaluation import Model, Request, decoder_lm
from tests.helpers.trap import TRAP

lm = decoder_lm()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    small_corpora.make_tokenizer(folder)
    return from_json_files(folder / "t.json")


def asked(tokenizer: Tokenizer, *pairs: tuple[str, str], length: int = 64) -> tuple[Model, list[Any]]:
    model = Model(tokenizer, length)
    return model, lm.DecoderLM(model).loglikelihood([Request(pair) for pair in pairs])


def test_a_continuation_is_what_lies_behind_the_tokens_of_its_context(tokenizer: Tokenizer) -> None:
    context, continuation = "the lamp stood", " in the window"
    whole, own = tokenizer.encode(context + continuation), tokenizer.encode(context)
    model, found = asked(tokenizer, (context, continuation))
    assert model.rows == [Row(tuple(whole), len(whole) - len(own))]
    assert found == [(-float(sum(whole[len(own) :])), len(whole) - len(own) == 1)]


def test_words_may_be_cut_anywhere(tokenizer: Tokenizer) -> None:
    text, others = "the lamp stood in the window", 0
    whole = tokenizer.encode(text)
    for cut in (place for place in range(1, len(text)) if text[place - 1] != " "):
        own = tokenizer.encode(text[:cut])
        if len(own) < len(whole):
            model, _ = asked(tokenizer, (text[:cut], text[cut:]))
            assert model.rows == [Row((*own, *whole[len(own) :]), len(whole) - len(own))]
            others += whole[len(own) :] != tokenizer.encode(text[cut:])
    assert others, "else the context would not matter"


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(tokenizer: Tokenizer) -> None:
    model, _ = asked(tokenizer, ("the lamp ", "stood"), ("the lamp", " stood"))
    assert model.rows[0] == model.rows[1]


def test_an_empty_context_is_the_token_behind_which_documents_begin(tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer.encode("灯在窗前"))
    model, _ = asked(tokenizer, ("", "灯在窗前"), ("  ", "灯在窗前"))
    assert model.rows[0] == Row((tokenizer.eod_id, *tokens), len(tokens))
    behind = tuple(tokenizer.encode("  灯在窗前"))
    assert model.rows[1] == Row((tokenizer.eod_id, *behind), len(behind))


def test_a_continuation_that_is_within_the_contexts_last_token_is_encoded_by_itself(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("灯在窗前")) <= len(tokenizer.encode("灯")), "the case of this test"
    model, _ = asked(tokenizer, ("灯", "在窗前"))
    own = tokenizer.encode("在窗前")
    assert model.rows == [Row((*tokenizer.encode("灯"), *own), len(own))]


def test_too_long_a_context_loses_its_beginning_and_too_long_a_continuation_is_refused(tokenizer: Tokenizer) -> None:
    text = "the lamp stood in the window of the house"
    whole = tokenizer.encode(text + " at night")
    scored = len(whole) - len(tokenizer.encode(text))
    model, _ = asked(tokenizer, (text, " at night"), length=scored + 2)
    assert model.rows == [Row(tuple(whole[-(scored + 3) :]), scored)]
    with pytest.raises(DataError, match=f"a continuation must have at most {scored - 1} tokens"):
        asked(tokenizer, (text, " at night"), length=scored - 1)
    with pytest.raises(DataError, match="a continuation must add at least one token to its context, got ''"):
        asked(tokenizer, (text, ""))


def test_results_come_in_the_order_of_requests_and_go_to_the_cache(tokenizer: Tokenizer) -> None:
    pairs = [("the lamp", " stood"), ("x", " y"), ("灯", "在窗前")]
    model = Model(tokenizer, 64)
    ours, kept = lm.DecoderLM(model), []
    ours.cache_hook.add_partial = lambda *given: kept.append(given)
    found = ours.loglikelihood([Request(pair) for pair in pairs])
    wanted = [-float(sum(row.tokens[-row.num_scored :])) for row in model.rows]
    assert [value for value, _ in found] == wanted and len(set(wanted)) == 3
    assert kept == [("loglikelihood", pair, value) for pair, value in zip(pairs, found, strict=True)]


def test_a_rolling_text_scores_each_token_once(tokenizer: Tokenizer) -> None:
    texts = ["the lamp stood in the window of the house", "灯", ""]
    model = Model(tokenizer, 4)
    found = lm.DecoderLM(model).loglikelihood_rolling([Request((text,)) for text in texts])
    assert found == [-float(sum(tokenizer.encode(text))) for text in texts]
    assert model.rows[0].tokens[0] == tokenizer.eod_id


def test_texts_are_written_as_the_task_says(tokenizer: Tokenizer) -> None:
    model = Model(tokenizer, 12)
    kinds = [
        {"until": ["\n\n", ""], "max_gen_toks": 5},
        {"until": "。", "max_new_tokens": 3, "do_sample": False, "temperature": 0.7},
        {"max_gen_toks": 5, "do_sample": True, "top_k": 9},
        {"until": ["\n\n", ""], "max_gen_toks": 5},
    ]
    texts = ["the lamp stood in the window of the house, and of the others", "灯", "", "x"]
    requests = [Request((text, kind)) for text, kind in zip(texts, kinds, strict=True)]
    answers = lm.DecoderLM(model).generate_until(requests)
    rows = [tokenizer.encode(text)[-(12 - length) :] for text, length in zip(texts, (5, 3, 5, 5), strict=True)]
    rows[2] = [tokenizer.eod_id]
    assert answers == [f"{len(row)} tokens" for row in rows]
    first, second = Writing(5, ("\n\n",)), Writing(3, ("。",))
    third = Writing(5, (), Sampling(temperature=1.0, top_k=9))
    assert model.written == [(rows[0], first), (rows[3], first), (rows[1], second), (rows[2], third)]
    assert lm.writing_of({}).max_new_tokens == 256, "lm_eval's own number"
    assert lm.writing_of({"temperature": 0.5}).sampling == Sampling(temperature=0.5)
    assert lm.writing_of({"temperature": 0.0, "do_sample": True}).sampling is None
    with pytest.raises(DataError, match="generation_kwargs of a task may contain .* got num_beams"):
        lm.writing_of({"num_beams": 3})
    with pytest.raises(DataError, match="fewer tokens than the model's maximum length 12, got 12"):
        lm.DecoderLM(model).generate_until([Request(("x", {"max_gen_toks": 12}))])


def test_what_lies_behind_the_first_stop_is_cut() -> None:
    assert before_stop("one\ntwo. three\nfour", [".", "\n"]) == before_stop("one\ntwo\nthree", ["\n"]) == "one"
    assert before_stop("one", ["\n", ""]) == "one"


def test_with_add_bos_token_each_context_begins_with_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours = lm.DecoderLM(Model(tokenizer), add_bos_token=True)
    own = tokenizer.encode("the lamp stood")
    assert ours.row("the lamp", " stood").tokens == (tokenizer.eod_id, *own)


def test_contexts_begin_with_bos_where_the_tokenizer_adds_it_once(tokenizer: Tokenizer) -> None:
    from megatron.tokenizer.chat import find_template

    built = from_json_files(TRAP)
    bos, own = built.token_to_id("<bos>"), built.encode("the lamp stood")
    assert lm.DecoderLM(Model(built)).row("the lamp", " stood").tokens == (bos, *own)
    assert lm.DecoderLM(Model(built)).row("", "the lamp stood").tokens == (bos, *own)
    assert lm.DecoderLM(Model(built), add_bos_token=False).row("the lamp", " stood").tokens == tuple(own)
    assert lm.DecoderLM(Model(tokenizer)).row("the lamp", " stood").tokens[0] != tokenizer.eod_id
    chat = lm.DecoderLM(Model(built), chat=find_template(built))
    context = chat.apply_chat_template([{"role": "user", "content": "x"}])
    assert context.startswith("<bos>") and chat.row(context, " y").tokens.count(bos) == 1


def test_a_conversation_is_rendered_and_its_control_tokens_are_tokens(tokenizer: Tokenizer) -> None:
    from megatron.tokenizer.chat import ChatTemplate

    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    text += "{% if add_generation_prompt %}assistant:{% endif %}"
    chat = ChatTemplate(text, tokenizer, source="here", special={})
    ours = lm.DecoderLM(Model(tokenizer), chat=chat)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " so"}]
    assert ours.apply_chat_template(messages[:1]) == "user: x<|endoftext|>assistant:"
    assert ours.apply_chat_template(messages, add_generation_prompt=False) == "user: x<|endoftext|>assistant: so"
    row = ours.row(ours.apply_chat_template(messages[:1]), " y")
    assert tokenizer.eod_id in row.tokens[:-1]
    assert tokenizer.eod_id not in lm.DecoderLM(Model(tokenizer)).row("x<|endoftext|>", " y").tokens
    assert ours.chat_template(True) == text and ours.tokenizer_name != lm.DecoderLM(Model(tokenizer)).tokenizer_name
