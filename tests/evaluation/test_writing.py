"""Where a text that a task lets the model write ends, and that control tokens are no part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import StopRequest
from megatron.evaluation import all_ranks
from megatron.evaluation.all_ranks import DistributedModel, GenerationArgs
from megatron.evaluation.scoring import Row, Score
from megatron.generate.text import Prompts
from megatron.tokenizer import Tokenizer, build
from megatron.tokenizer.chat import find_template
from tests.helpers.chats import CHATML, write_tokenizer
from tests.helpers.evaluation import FakeModel, Request, import_decoder_lm

WriteText = Callable[..., str]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return build(tokenizer_path=write_tokenizer(tmp_path, CHATML) / "tokenizer.json")


@pytest.fixture
def write_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> WriteText:
    """Return what is left of a text that the model would write."""

    def write(tokens: list[int], options: GenerationArgs) -> str:
        def generate(stage: Any, rows: Any, *, eos_id: int | None, ends: Any, **options: Any) -> list[list[int]]:
            stop = next(
                num_tokens
                for num_tokens in range(1, 99)
                if num_tokens == len(tokens) or tokens[num_tokens - 1] == eos_id or ends(0, tokens[:num_tokens])
            )
            return [tokens[:stop]]

        monkeypatch.setattr(all_ranks, "generate_gpt2", generate)
        stage: Any = SimpleNamespace(
            args=SimpleNamespace(has_position_ids=False),
            parallel=SimpleNamespace(sequence_parallel=False, group=SimpleNamespace(size=1)),
        )
        model = DistributedModel(stage, Prompts(tokenizer, None), max_length=99)
        [text] = model.generate([tokenizer.encode("a")], options)
        return text

    return write


def test_end_of_turn_stops_text_and_control_tokens_are_removed(tokenizer: Tokenizer, write_text: WriteText) -> None:
    turn_id, eod_id, start_id = (tokenizer.token_to_id(f"<|{name}|>") for name in ("im_end", "endoftext", "im_start"))
    one_ids, two_ids = tokenizer.encode(" one"), tokenizer.encode(" two")
    assert turn_id is not None and eod_id is not None and start_id is not None
    assert write_text([*one_ids, turn_id, *two_ids], GenerationArgs(50, end_id=turn_id)) == " one"
    assert write_text([*one_ids, turn_id, *two_ids], GenerationArgs(50)) == " one two"
    assert (
        write_text([*one_ids, start_id, *two_ids, eod_id, *one_ids], GenerationArgs(50, end_id=turn_id)) == " one two"
    )
    assert write_text([*one_ids, turn_id, *two_ids, *one_ids], GenerationArgs(50, ("<|im_end|>",))) == " one"
    assert write_text([*one_ids, *two_ids, *one_ids], GenerationArgs(50, ("w",), end_id=turn_id)) == " one t"


def test_chat_template_sets_end_of_turn(tokenizer: Tokenizer) -> None:
    for chat in (find_template(tokenizer), None):
        model = FakeModel(tokenizer, max_length=40)
        lm = import_decoder_lm().DecoderLM(model, chat=chat)
        lm.generate_until([Request(("a", {"until": ["x"], "max_gen_toks": 4}))])
        assert model.generate_calls[0][1] == GenerationArgs(
            4, ("x",), end_id=tokenizer.token_to_id("<|im_end|>") if chat else None
        )


def test_rows_are_scored_in_portions_and_results_keep_order(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_ranks, "BATCHES_PER_REQUEST", 2)
    parallel = SimpleNamespace(sequence_parallel=False, group=SimpleNamespace(size=1))
    stage: Any = SimpleNamespace(args=SimpleNamespace(has_position_ids=False), parallel=parallel)
    portions = list[list[Row]]()

    def score(stage: Any, rows: list[Row], **options: Any) -> list[Score]:
        portions.append(rows)
        return [Score(-float(row.tokens[0]), is_greedy=False) for row in rows]

    monkeypatch.setattr(all_ranks, "score_rows", score)
    stops = iter([False, False, True])
    prompts = Prompts(tokenizer, None)
    model = DistributedModel(stage, prompts, max_length=99, max_tokens=6, is_stopping=lambda: next(stops))
    rows = [Row((idx, *[1] * length), 1) for idx, length in enumerate((3, 1, 3, 6, 3, 1))]
    assert [score.logprob for score in model.score(rows)] == [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert [len(portion) for portion in portions] == [3, 3], "of two batches each"
    with pytest.raises(StopRequest, match="asked to stop during the evaluation"):
        model.score(rows[:1])
