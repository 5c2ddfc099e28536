"""The loop of generation, over a function in place of a model; and what no model can take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import DataError
from megatron.generate import generate_gpt2, generate_t5
from megatron.generate.decode import generate
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.generation import ModelStage
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model
from tests.helpers.model_samples import SEQ, SMALL, VOCAB, fill_weights, small_model_args

EOS = 50


class IncrementModel:
    """A model whose next token is the last one plus 1; keeps what it was asked."""

    def __init__(self) -> None:
        self.reads: list[list[list[int]]] = []
        self.kept_rows: list[list[int]] = []

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        self.reads.append([tokens.tolist(), positions.tolist(), last.tolist()])
        return tokens[torch.arange(len(last)), last] + 1

    def keep(self, rows: list[int]) -> None:
        self.kept_rows.append(rows)


def generate_counting(model: IncrementModel, starts: Any, limits: list[int], eos_id: int | None = EOS) -> Any:
    streamed: list[tuple[int, int]] = []
    stage = ModelStage(torch.nn.Linear(1, 1), ModelArgs(**SMALL), ParallelContext(), {}, [0])
    options: dict[str, Any] = {"limits": limits, "eos_id": eos_id, "choose": lambda logits, rows, step: logits}
    rows = generate(stage, model, starts, **options, on_token=lambda row, token: streamed.append((row, token)))
    assert [[token for streamed_row, token in streamed if streamed_row == row] for row in range(len(rows))] == rows
    return rows


def test_rows_stop_at_eos_or_limit_and_are_not_read_further() -> None:
    model = IncrementModel()
    rows = generate_counting(model, [[7, 47], [48], [1, 2, 10], [20]], [4, 4, 4, 1])
    assert rows == [[48, 49, 50], [49, 50], [11, 12, 13, 14], [21]]
    first, *later_reads = model.reads
    assert first[0] == [[7, 47, 0], [48, 0, 0], [1, 2, 10], [20, 0, 0]] and first[1] == [[0, 1, 2]] * 4
    assert first[2] == [1, 0, 2, 0] and model.kept_rows == [[0, 1, 2], [0, 2], [1]]
    assert later_reads == [
        [[[48], [49], [11]], [[2], [1], [3]], [0, 0, 0]],
        [[[49], [12]], [[3], [4]], [0, 0]],
        [[[13]], [[5]], [0]],
    ]


def test_generation_stops_after_all_rows_or_at_limits() -> None:
    model = IncrementModel()
    assert generate_counting(model, [[48], [49]], [100, 100]) == [[49, 50], [50]] and len(model.reads) == 2
    assert generate_counting(IncrementModel(), [[48], [49]], [3, 3], None) == [[49, 50, 51], [50, 51, 52]]


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([], 1, r"prompts must be one or more rows .* got rows of lengths \[\]"),
        ([[1], []], 1, r"got rows of lengths \[1, 0\]"),
        ([[1], [2, VOCAB]], 1, "from 0 to 100, got 101 in row 1"),
        ([[-1]], 1, "from 0 to 100, got -1 in row 0"),
        ([[1]], 0, "max_new_tokens must be at least 1, got 0"),
        ([[1], [1, 2, 3]], SEQ - 1, f"prompt 2 has 3 tokens and {SEQ - 1} new .* 12 learned .* at most 10 new"),
        ([[1] * (SEQ + 1)], None, "prompt 1 has 13 tokens. .* 12 learned positions .* Shorten it"),
    ],
)
def test_invalid_gpt2_prompts_are_rejected(prompts: Any, max_new_tokens: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        generate_gpt2(fill_weights(DecoderModel(small_model_args())), prompts, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize(("max_new_tokens", "lengths"), [(SEQ - 2, [SEQ - 2] * 2), (None, [SEQ - 2, SEQ])])
def test_last_position_is_usable_and_default_length_fills_model(max_new_tokens: int | None, lengths: list[int]) -> None:
    model = fill_weights(DecoderModel(small_model_args()))
    assert [len(row) for row in generate_gpt2(model, [[1, 2, 3], [4]], max_new_tokens=max_new_tokens)] == lengths


def test_non_model_argument_is_rejected() -> None:
    with pytest.raises(TypeError, match="must be a model of megatron.models or its training engine, got Linear"):
        generate_gpt2(torch.nn.Linear(2, 2), [[1]], max_new_tokens=1)


def small_t5(**changes: Any) -> T5Model:
    return fill_weights(T5Model(T5ModelArgs(**{**SMALL, "enc_layers": 1, "dec_layers": 1, **changes})))  # type: ignore[arg-type]


def test_each_model_family_requires_matching_generate_function() -> None:
    with pytest.raises(TypeError, match="got an encoder-decoder. Use generate_t5"):
        generate_gpt2(small_t5(), [[1]], max_new_tokens=1)
    with pytest.raises(TypeError, match="generate_t5 needs a T5, .* Use generate_gpt2"):
        generate_t5(DecoderModel(small_model_args()), [[1]], start_id=0, max_new_tokens=1)


@pytest.mark.parametrize(
    ("sources", "start_id", "max_new_tokens", "message"),
    [
        ([[1] * (SEQ + 1)], 0, 1, "prompt 1 has 13 tokens and must fit into the model's 12 learned positions"),
        ([[1]], 0, SEQ + 1, "start of answer 1 has 1 tokens and 13 new ones, .* at most 12 new tokens"),
        ([[1]], VOCAB, 1, "tokens of start_id must be from 0 to 100, got 101"),
        ([[1], [VOCAB]], 0, 1, "tokens of sources must be from 0 to 100, got 101 in row 1"),
    ],
)
def test_invalid_t5_prompts_are_rejected(sources: Any, start_id: int, max_new_tokens: int, message: str) -> None:
    model = small_t5(position_embedding_type="learned", activation="gelu")
    with pytest.raises(DataError, match=message):
        generate_t5(model, sources, start_id=start_id, max_new_tokens=max_new_tokens)


def test_all_learned_positions_are_usable_and_relative_ones_are_unbounded() -> None:
    for changes, max_new_tokens in (({"position_embedding_type": "learned"}, SEQ), ({}, 2 * SEQ)):
        rows = generate_t5(small_t5(**changes), [[1] * SEQ, [2]], start_id=0, max_new_tokens=max_new_tokens)
        assert [len(row) for row in rows] == [max_new_tokens, max_new_tokens]
