"""Where a text that a task lets the model write ends, and that control tokens are no part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import StopRequest
from megatron.evaluation import all_ranks
from megatron.evaluation.all_ranks import ModelOfAllRanks, Writing
from megatron.evaluation.scoring import Row, Score
from megatron.generate.text import Prompts
from megatron.tokenizer import Tokenizer, build
from megatron.tokenizer.chat import find_template
from tests.helpers.chats import CHATML, write_tokenizer
from tests.helpers.evaluation import Model, Request, decoder_lm

Says = Callable[..., str]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return build(tokenizer_path=write_tokenizer(tmp_path, CHATML) / "tokenizer.json")


@pytest.fixture
def written(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Return what is left of a text that the model would write."""

    def written(tokens: list[int], how: Writing) -> str:
        def generate(part: Any, rows: Any, *, eos_id: int | None, ends: Any, **more: Any) -> list[list[int]]:
            stop = next(n for n in range(1, 99) if n == len(tokens) or tokens[n - 1] == eos_id or ends(0, tokens[:n]))
            return [tokens[:stop]]

        monkeypatch.setattr(all_ranks, "generate_gpt2", generate)
        part: Any = SimpleNamespace(
            sizes=SimpleNamespace(has_position_ids=False), place=SimpleNamespace(sequence_parallel=False, group=None)
        )
        part.place.group = SimpleNamespace(size=1)
        model = ModelOfAllRanks(part, Prompts(tokenizer, None), max_length=99)
        [text] = model.write([tokenizer.encode("a")], how)
        return text

    return written


def test_a_turns_end_ends_a_text_and_no_control_token_is_part_of_it(tokenizer: Tokenizer, written: Says) -> None:
    turn, document, start = (tokenizer.token_to_id(f"<|{name}|>") for name in ("im_end", "endoftext", "im_start"))
    one, two = tokenizer.encode(" one"), tokenizer.encode(" two")
    assert turn is not None and document is not None and start is not None
    assert written([*one, turn, *two], Writing(50, end_id=turn)) == " one"
    assert written([*one, turn, *two], Writing(50)) == " one two"
    assert written([*one, start, *two, document, *one], Writing(50, end_id=turn)) == " one two"
    assert written([*one, turn, *two, *one], Writing(50, ("<|im_end|>",))) == " one"
    assert written([*one, *two, *one], Writing(50, ("w",), end_id=turn)) == " one t"


def test_a_conversation_has_its_templates_end_of_turns(tokenizer: Tokenizer) -> None:
    for chat in (find_template(tokenizer), None):
        model = Model(tokenizer, max_length=40)
        lm = decoder_lm().DecoderLM(model, chat=chat)
        lm.generate_until([Request(("a", {"until": ["x"], "max_gen_toks": 4}))])
        assert model.written[0][1] == Writing(4, ("x",), end_id=tokenizer.token_to_id("<|im_end|>") if chat else None)


def test_some_batches_are_asked_for_at_a_time_and_results_come_in_order(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_ranks, "BATCHES_AT_ONCE", 2)
    place = SimpleNamespace(sequence_parallel=False, group=SimpleNamespace(size=1))
    part: Any = SimpleNamespace(sizes=SimpleNamespace(has_position_ids=False), place=place)
    portions = list[list[Row]]()

    def score(part: Any, rows: list[Row], **more: Any) -> list[Score]:
        portions.append(rows)
        return [Score(-float(row.tokens[0]), is_greedy=False) for row in rows]

    monkeypatch.setattr(all_ranks, "score_rows", score)
    stops = iter([False, False, True])
    prompts = Prompts(tokenizer, None)
    model = ModelOfAllRanks(part, prompts, max_length=99, max_tokens=6, is_stopping=lambda: next(stops))
    rows = [Row((number, *[1] * length), 1) for number, length in enumerate((3, 1, 3, 6, 3, 1))]
    assert [one.logprob for one in model.score(rows)] == [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert [len(portion) for portion in portions] == [3, 3], "of two batches each"
    with pytest.raises(StopRequest, match="asked to stop during the evaluation"):
        model.score(rows[:1])
