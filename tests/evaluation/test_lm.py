"""Our model as lm_eval asks it: which tokens are scored behind which, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.evaluation.all_ranks import GenerationArgs, truncate_at_stop
from megatron.evaluation.scoring import Row
from megatron.generate.sampling import Sampling
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.huggingface import from_json_files
from tests.helpers import small_corpora
from tests.helpers.evaluation import FakeModel, Request, import_decoder_lm
from tests.helpers.trap import TOKENIZER_PATH

lm = import_decoder_lm()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    small_corpora.make_tokenizer(folder)
    return from_json_files(folder / "t.json")


def score_pairs(tokenizer: Tokenizer, *pairs: tuple[str, str], length: int = 64) -> tuple[FakeModel, list[Any]]:
    model = FakeModel(tokenizer, length)
    return model, lm.DecoderLM(model).loglikelihood([Request(pair) for pair in pairs])


def test_continuation_starts_after_context_tokens(tokenizer: Tokenizer) -> None:
    context, continuation = "the lamp stood", " in the window"
    full_tokens, context_tokens = tokenizer.encode(context + continuation), tokenizer.encode(context)
    model, scores = score_pairs(tokenizer, (context, continuation))
    assert model.rows == [Row(tuple(full_tokens), len(full_tokens) - len(context_tokens))]
    assert scores == [(-float(sum(full_tokens[len(context_tokens) :])), len(full_tokens) - len(context_tokens) == 1)]


def test_texts_can_be_split_anywhere(tokenizer: Tokenizer) -> None:
    text, num_differing = "the lamp stood in the window", 0
    full_tokens = tokenizer.encode(text)
    for split_idx in (idx for idx in range(1, len(text)) if text[idx - 1] != " "):
        context_tokens = tokenizer.encode(text[:split_idx])
        if len(context_tokens) < len(full_tokens):
            model, _ = score_pairs(tokenizer, (text[:split_idx], text[split_idx:]))
            assert model.rows == [
                Row((*context_tokens, *full_tokens[len(context_tokens) :]), len(full_tokens) - len(context_tokens))
            ]
            num_differing += full_tokens[len(context_tokens) :] != tokenizer.encode(text[split_idx:])
    assert num_differing, "else the context would not matter"


def test_trailing_spaces_of_context_belong_to_continuation(tokenizer: Tokenizer) -> None:
    model, _ = score_pairs(tokenizer, ("the lamp ", "stood"), ("the lamp", " stood"))
    assert model.rows[0] == model.rows[1]


def test_empty_context_becomes_eod_token(tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer.encode("灯在窗前"))
    model, _ = score_pairs(tokenizer, ("", "灯在窗前"), ("  ", "灯在窗前"))
    assert model.rows[0] == Row((tokenizer.eod_id, *tokens), len(tokens))
    spaced_tokens = tuple(tokenizer.encode("  灯在窗前"))
    assert model.rows[1] == Row((tokenizer.eod_id, *spaced_tokens), len(spaced_tokens))


def test_continuation_within_last_context_token_is_encoded_separately(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("灯在窗前")) <= len(tokenizer.encode("灯")), "the case of this test"
    model, _ = score_pairs(tokenizer, ("灯", "在窗前"))
    continuation_tokens = tokenizer.encode("在窗前")
    assert model.rows == [Row((*tokenizer.encode("灯"), *continuation_tokens), len(continuation_tokens))]


def test_long_context_is_truncated_and_long_continuation_is_rejected(tokenizer: Tokenizer) -> None:
    text = "the lamp stood in the window of the house"
    full_tokens = tokenizer.encode(text + " at night")
    num_scored = len(full_tokens) - len(tokenizer.encode(text))
    model, _ = score_pairs(tokenizer, (text, " at night"), length=num_scored + 2)
    assert model.rows == [Row(tuple(full_tokens[-(num_scored + 3) :]), num_scored)]
    with pytest.raises(DataError, match=f"a continuation must have at most {num_scored - 1} tokens"):
        score_pairs(tokenizer, (text, " at night"), length=num_scored - 1)
    with pytest.raises(DataError, match="a continuation must add at least one token to its context, got ''"):
        score_pairs(tokenizer, (text, ""))


def test_results_keep_request_order_and_are_cached(tokenizer: Tokenizer) -> None:
    pairs = [("the lamp", " stood"), ("x", " y"), ("灯", "在窗前")]
    model = FakeModel(tokenizer, 64)
    adapter, cached = lm.DecoderLM(model), []
    adapter.cache_hook.add_partial = lambda *arguments: cached.append(arguments)
    scores = adapter.loglikelihood([Request(pair) for pair in pairs])
    expected = [-float(sum(row.tokens[-row.num_scored :])) for row in model.rows]
    assert [value for value, _ in scores] == expected and len(set(expected)) == 3
    assert cached == [("loglikelihood", pair, value) for pair, value in zip(pairs, scores, strict=True)]


def test_rolling_text_scores_each_token_once(tokenizer: Tokenizer) -> None:
    texts = ["the lamp stood in the window of the house", "灯", ""]
    model = FakeModel(tokenizer, 4)
    scores = lm.DecoderLM(model).loglikelihood_rolling([Request((text,)) for text in texts])
    assert scores == [-float(sum(tokenizer.encode(text))) for text in texts]
    assert model.rows[0].tokens[0] == tokenizer.eod_id


def test_generation_follows_task_settings(tokenizer: Tokenizer) -> None:
    model = FakeModel(tokenizer, 12)
    settings = [
        {"until": ["\n\n", ""], "max_gen_toks": 5},
        {"until": "。", "max_new_tokens": 3, "do_sample": False, "temperature": 0.7},
        {"max_gen_toks": 5, "do_sample": True, "top_k": 9},
        {"until": ["\n\n", ""], "max_gen_toks": 5},
    ]
    texts = ["the lamp stood in the window of the house, and of the others", "灯", "", "x"]
    requests = [Request((text, options)) for text, options in zip(texts, settings, strict=True)]
    answers = lm.DecoderLM(model).generate_until(requests)
    rows = [tokenizer.encode(text)[-(12 - length) :] for text, length in zip(texts, (5, 3, 5, 5), strict=True)]
    rows[2] = [tokenizer.eod_id]
    assert answers == [f"{len(row)} tokens" for row in rows]
    first, second = GenerationArgs(5, ("\n\n",)), GenerationArgs(3, ("。",))
    third = GenerationArgs(5, (), Sampling(temperature=1.0, top_k=9))
    assert model.generate_calls == [(rows[0], first), (rows[3], first), (rows[1], second), (rows[2], third)]
    assert lm.parse_generation_kwargs({}).max_new_tokens == 256, "lm_eval's own number"
    assert lm.parse_generation_kwargs({"temperature": 0.5}).sampling == Sampling(temperature=0.5)
    assert lm.parse_generation_kwargs({"temperature": 0.0, "do_sample": True}).sampling is None
    with pytest.raises(DataError, match="generation_kwargs of a task may contain .* got num_beams"):
        lm.parse_generation_kwargs({"num_beams": 3})
    with pytest.raises(DataError, match="fewer tokens than the model's maximum length 12, got 12"):
        lm.DecoderLM(model).generate_until([Request(("x", {"max_gen_toks": 12}))])


def test_text_after_first_stop_is_removed() -> None:
    assert (
        truncate_at_stop("one\ntwo. three\nfour", [".", "\n"]) == truncate_at_stop("one\ntwo\nthree", ["\n"]) == "one"
    )
    assert truncate_at_stop("one", ["\n", ""]) == "one"


def test_add_bos_token_prepends_bos_to_context(tokenizer: Tokenizer, tmp_path: Path) -> None:
    adapter = lm.DecoderLM(FakeModel(tokenizer), add_bos_token=True)
    context_tokens = tokenizer.encode("the lamp stood")
    assert adapter.request_row("the lamp", " stood").tokens == (tokenizer.eod_id, *context_tokens)


def test_bos_is_added_once_if_tokenizer_adds_it(tokenizer: Tokenizer) -> None:
    from megatron.tokenizer.chat import find_template

    trap_tokenizer = from_json_files(TOKENIZER_PATH)
    bos_id, context_tokens = trap_tokenizer.token_to_id("<bos>"), trap_tokenizer.encode("the lamp stood")
    assert lm.DecoderLM(FakeModel(trap_tokenizer)).request_row("the lamp", " stood").tokens == (bos_id, *context_tokens)
    assert lm.DecoderLM(FakeModel(trap_tokenizer)).request_row("", "the lamp stood").tokens == (bos_id, *context_tokens)
    assert lm.DecoderLM(FakeModel(trap_tokenizer), add_bos_token=False).request_row(
        "the lamp", " stood"
    ).tokens == tuple(context_tokens)
    assert lm.DecoderLM(FakeModel(tokenizer)).request_row("the lamp", " stood").tokens[0] != tokenizer.eod_id
    chat_adapter = lm.DecoderLM(FakeModel(trap_tokenizer), chat=find_template(trap_tokenizer))
    context = chat_adapter.apply_chat_template([{"role": "user", "content": "x"}])
    assert context.startswith("<bos>") and chat_adapter.request_row(context, " y").tokens.count(bos_id) == 1


def test_chat_template_renders_control_tokens(tokenizer: Tokenizer) -> None:
    from megatron.tokenizer.chat import ChatTemplate

    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    text += "{% if add_generation_prompt %}assistant:{% endif %}"
    chat = ChatTemplate(text, tokenizer, source="here", special={})
    adapter = lm.DecoderLM(FakeModel(tokenizer), chat=chat)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " so"}]
    assert adapter.apply_chat_template(messages[:1]) == "user: x<|endoftext|>assistant:"
    assert adapter.apply_chat_template(messages, add_generation_prompt=False) == "user: x<|endoftext|>assistant: so"
    row = adapter.request_row(adapter.apply_chat_template(messages[:1]), " y")
    assert tokenizer.eod_id in row.tokens[:-1]
    assert tokenizer.eod_id not in lm.DecoderLM(FakeModel(tokenizer)).request_row("x<|endoftext|>", " y").tokens
    assert (
        adapter.chat_template(True) == text
        and adapter.tokenizer_name != lm.DecoderLM(FakeModel(tokenizer)).tokenizer_name
    )
