"""The loop of greedy decoding, over a function in place of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.generate import greedy_gpt2, greedy_t5
from megatron.generate.greedy import greedy
from megatron.model.gpt2 import GPT2Model
from megatron.model.sizes import T5Sizes
from megatron.model.t5 import T5Model
from tests.model.samples import SEQ, SMALL, VOCAB, filled, small_sizes

EOS = 50


class Counting:
    """The next token is the last one plus 1; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, tokens: torch.Tensor, last: torch.Tensor) -> list[int]:
        self.asked.append((tokens.clone(), last.clone()))
        return (tokens[torch.arange(len(last)), last] + 1).tolist()


def test_each_row_ends_with_its_own_end_of_sequence() -> None:
    count = Counting()
    assert greedy(count, [[7, 47], [48], [1, 2, 10]], max_new_tokens=4, eos_id=EOS) == [
        [48, 49, 50],
        [49, 50],
        [11, 12, 13, 14],
    ]
    assert [last.tolist() for _, last in count.asked] == [[1, 0, 2], [2, 1, 3], [3, 2, 4], [4, 2, 5]]
    assert count.asked[-1][0].tolist() == [[7, 47, 48, 49, 50, 0], [48, 49, 50, 0, 0, 0], [1, 2, 10, 11, 12, 13]]


def test_it_ends_when_all_rows_have_ended() -> None:
    count = Counting()
    assert greedy(count, [[48], [49]], max_new_tokens=100, eos_id=EOS) == [[49, 50], [50]]
    assert len(count.asked) == 2


def test_without_an_end_of_sequence_every_row_has_all_tokens() -> None:
    assert greedy(Counting(), [[48], [49]], max_new_tokens=3, eos_id=None) == [[49, 50, 51], [50, 51, 52]]


@pytest.mark.parametrize(
    ("prompts", "new", "told"),
    [
        ([], 1, r"prompts must be one or more rows .* got rows of lengths \[\]"),
        ([[1], []], 1, r"got rows of lengths \[1, 0\]"),
        ([[1], [2, VOCAB]], 1, "from 0 to 100, got 101 in row 1"),
        ([[-1]], 1, "from 0 to 100, got -1 in row 0"),
        ([[1]], 0, "max_new_tokens must be at least 1, got 0"),
        ([[1], [1, 2, 3]], SEQ - 1, "got 13 tokens and 12 positions"),
    ],
)
def test_what_a_model_cannot_take_is_refused(prompts: Any, new: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        greedy_gpt2(filled(GPT2Model(small_sizes())), prompts, max_new_tokens=new)


def test_the_last_position_can_be_used() -> None:
    model = filled(GPT2Model(small_sizes()))
    assert [len(row) for row in greedy_gpt2(model, [[1, 2, 3]], max_new_tokens=SEQ - 2)] == [SEQ - 2]


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a GPT2Model, a T5Model, or the engine that trains one, got Linear"):
        greedy_gpt2(torch.nn.Linear(2, 2), [[1]], max_new_tokens=1)


def small_t5(**changes: Any) -> T5Model:
    return filled(T5Model(T5Sizes(**{**SMALL, "enc_layers": 1, "dec_layers": 1, **changes})))


def test_each_family_has_its_own_function() -> None:
    with pytest.raises(TypeError, match="got an encoder-decoder. Use greedy_t5"):
        greedy_gpt2(small_t5(), [[1]], max_new_tokens=1)
    with pytest.raises(TypeError, match="greedy_t5 needs a T5, .* Use greedy_gpt2"):
        greedy_t5(GPT2Model(small_sizes()), [[1]], start_id=0, max_new_tokens=1)


@pytest.mark.parametrize(
    ("sources", "start", "new", "told"),
    [
        ([[1] * (SEQ + 1)], 0, 1, "a source must not be longer .* got 13 tokens and 12 positions"),
        ([[1]], 0, SEQ + 1, "start token with .* got 13 tokens and 12 positions"),
        ([[1]], VOCAB, 1, "tokens of start_id must be from 0 to 100, got 101"),
        ([[1], [VOCAB]], 0, 1, "tokens of sources must be from 0 to 100, got 101 in row 1"),
    ],
)
def test_what_a_t5_cannot_take_is_refused(sources: Any, start: int, new: int, told: str) -> None:
    model = small_t5(position_embedding_type="learned", activation="gelu")
    with pytest.raises(ValueError, match=told):
        greedy_t5(model, sources, start_id=start, max_new_tokens=new)


def test_every_learned_position_can_be_used_and_relative_ones_have_no_end() -> None:
    for changes, new in (({"position_embedding_type": "learned"}, SEQ), ({}, 2 * SEQ)):
        rows = greedy_t5(small_t5(**changes), [[1] * SEQ, [2]], start_id=0, max_new_tokens=new)
        assert [len(row) for row in rows] == [new, new]
