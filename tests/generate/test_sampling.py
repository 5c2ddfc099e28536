"""Drawing tokens: the probabilities are Hugging Face's, and the numbers depend on seed, prompt and place alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron.generate import Sampling, generate_gpt2, keys_of
from megatron.generate.sampling import NONE, drawn, probabilities, uniform
from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import filled, place_of, small_sizes

PROMPTS = [[5, 17, 3], [42], [9, 8, 7, 6, 5], [42]]
DRAWING = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=3)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), list(itertools.product([0.5, 1.0, 3.0], [0, 1, 7, 1000], [0.05, 0.8, 1.0]))
)
def test_the_same_tokens_are_left_out_as_by_hugging_faces_warpers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    wanted = TopKLogitsWarper(top_k)(None, wanted) if top_k else wanted
    wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted
    found = probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(found > 0, wanted.softmax(-1) > 0)
    assert torch.allclose(found, wanted.softmax(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e300])
def test_any_temperature_gives_numbers(temperature: float) -> None:
    found = probabilities(torch.tensor([[3.0, 900.0, -7.0]]).double(), Sampling(temperature=temperature))
    wanted = [1 / 3] * 3 if temperature > 1 else [0.0, 1.0, 0.0]
    assert found[0].tolist() == pytest.approx(wanted)


def test_a_number_falls_on_the_token_whose_share_of_the_line_it_lies_in() -> None:
    found = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64).expand(6, 5)
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert drawn(found, numbers).tolist() == [0, 0, 2, 2, 3, 3]
    broken = torch.tensor([[0.5, float("nan")]], dtype=torch.float64)
    assert drawn(broken, torch.zeros(1, dtype=torch.float64)).tolist() == [NONE]


def test_numbers_are_even_and_differ_by_seed_row_and_step() -> None:
    first, again, other = keys_of([[1, 2], [1, 2], [12]])
    assert len({first, again, other}) == 3 and keys_of([[12], [1, 2]]) == [other, first]
    numbers = [uniform(seed, key, step) for seed in range(10) for key in (first, again, other) for step in range(100)]
    assert len(set(numbers)) == 3000 and all(0 <= number < 1 for number in numbers)
    counts = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
    assert float((counts - 300).abs().max()) < 5 * 300**0.5


def said(rank: int, size: int) -> list[list[int]]:
    group = build_grid(Topology.of_world(size, tensor=size, pipe=1), rank).tensor
    model = filled(DecoderModel(small_sizes(max_position_embeddings=32), place_of(group)).double())
    return generate_gpt2(model, PROMPTS, max_new_tokens=12, sampling=DRAWING)


def alone(**changes: Any) -> list[list[int]]:
    model = filled(DecoderModel(small_sizes(max_position_embeddings=32)).double())
    sampling = Sampling(**{**vars(DRAWING), **changes})
    keys = keys_of(PROMPTS)
    given = {"max_new_tokens": 12, "sampling": sampling}
    return [generate_gpt2(model, [row], keys=[key], **given)[0] for row, key in zip(PROMPTS, keys, strict=True)]


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_prompt_draws_the_same_alone_in_a_batch_and_over_a_cut_vocabulary(size: int) -> None:
    wanted = alone()
    assert len({tuple(row) for row in wanted}) == len(PROMPTS) and len({t for row in wanted for t in row}) > 15
    assert run_ranks(size, said, size) == [wanted] * size


def test_another_seed_draws_others_and_a_k_of_one_takes_the_likeliest() -> None:
    assert alone(seed=4) != alone()
    model = filled(DecoderModel(small_sizes(max_position_embeddings=32)).double())
    assert alone(top_k=1) == generate_gpt2(model, PROMPTS, max_new_tokens=12)


def test_rows_that_go_on_draw_as_before_when_another_has_ended() -> None:
    wanted = alone()
    end = wanted[0][2]
    model = filled(DecoderModel(small_sizes(max_position_embeddings=32)).double())
    found = generate_gpt2(model, PROMPTS, max_new_tokens=12, sampling=DRAWING, eos_id=end)
    cut = [row[: row.index(end)] if end in row else row for row in wanted]
    assert len(cut[0]) <= 2 and max(map(len, cut[1:])) == 12, "one row ends early, another one late"
    assert [row[: row.index(end)] if end in row else row for row in found] == cut
