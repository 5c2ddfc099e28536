"""Drawing tokens: the probabilities are Hugging Face's, and the numbers depend on seed, prompt and place alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron.generate import Sampling, generate_gpt2, keys_of
from megatron.generate.sampling import NO_TOKEN, probabilities, sample_tokens, uniform
from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import fill_weights, make_parallel_context, small_model_args

PROMPTS = [[5, 17, 3], [42], [9, 8, 7, 6, 5], [42]]
SAMPLING = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=3)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), list(itertools.product([0.5, 1.0, 3.0], [0, 1, 7, 1000], [0.05, 0.8, 1.0]))
)
def test_filtered_tokens_equal_hugging_face_warpers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    expected_logits = TemperatureLogitsWarper(temperature)(None, logits)
    expected_logits = TopKLogitsWarper(top_k)(None, expected_logits) if top_k else expected_logits
    expected_logits = TopPLogitsWarper(top_p)(None, expected_logits) if top_p < 1 else expected_logits
    actual = probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(actual > 0, expected_logits.softmax(-1) > 0)
    assert torch.allclose(actual, expected_logits.softmax(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e300])
def test_extreme_temperatures_yield_finite_probabilities(temperature: float) -> None:
    actual = probabilities(torch.tensor([[3.0, 900.0, -7.0]]).double(), Sampling(temperature=temperature))
    expected = [1 / 3] * 3 if temperature > 1 else [0.0, 1.0, 0.0]
    assert actual[0].tolist() == pytest.approx(expected)


def test_draw_maps_uniform_number_to_cumulative_probability() -> None:
    token_probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64).expand(6, 5)
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(token_probabilities, numbers).tolist() == [0, 0, 2, 2, 3, 3]
    nan_probabilities = torch.tensor([[0.5, float("nan")]], dtype=torch.float64)
    assert sample_tokens(nan_probabilities, torch.zeros(1, dtype=torch.float64)).tolist() == [NO_TOKEN]


def test_uniform_numbers_depend_on_seed_row_and_step() -> None:
    first_key, repeated_key, other_key = keys_of([[1, 2], [1, 2], [12]])
    assert len({first_key, repeated_key, other_key}) == 3 and keys_of([[12], [1, 2]]) == [other_key, first_key]
    numbers = [
        uniform(seed, key, step)
        for seed in range(10)
        for key in (first_key, repeated_key, other_key)
        for step in range(100)
    ]
    assert len(set(numbers)) == 3000 and all(0 <= value < 1 for value in numbers)
    counts = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
    assert float((counts - 300).abs().max()) < 5 * 300**0.5


def sample_on_rank(rank: int, world_size: int) -> list[list[int]]:
    group = build_grid(Topology.from_world_size(world_size, tensor=world_size, pipe=1), rank).tensor
    model = fill_weights(
        DecoderModel(small_model_args(max_position_embeddings=32), make_parallel_context(group)).double()
    )
    return generate_gpt2(model, PROMPTS, max_new_tokens=12, sampling=SAMPLING)


def sample_single_rows(**overrides: Any) -> list[list[int]]:
    model = fill_weights(DecoderModel(small_model_args(max_position_embeddings=32)).double())
    sampling = Sampling(**{**vars(SAMPLING), **overrides})
    keys = keys_of(PROMPTS)
    options = {"max_new_tokens": 12, "sampling": sampling}
    return [generate_gpt2(model, [row], keys=[key], **options)[0] for row, key in zip(PROMPTS, keys, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_samples_are_independent_of_batch_and_vocabulary_sharding(world_size: int) -> None:
    expected = sample_single_rows()
    assert (
        len({tuple(row) for row in expected}) == len(PROMPTS) and len({token for row in expected for token in row}) > 15
    )
    assert run_ranks(world_size, sample_on_rank, world_size) == [expected] * world_size


def test_seed_changes_samples_and_top_k_1_is_greedy() -> None:
    assert sample_single_rows(seed=4) != sample_single_rows()
    model = fill_weights(DecoderModel(small_model_args(max_position_embeddings=32)).double())
    assert sample_single_rows(top_k=1) == generate_gpt2(model, PROMPTS, max_new_tokens=12)


def test_remaining_rows_draw_same_tokens_after_another_row_ends() -> None:
    full_rows = sample_single_rows()
    eos_id = full_rows[0][2]
    model = fill_weights(DecoderModel(small_model_args(max_position_embeddings=32)).double())
    rows = generate_gpt2(model, PROMPTS, max_new_tokens=12, sampling=SAMPLING, eos_id=eos_id)
    expected = [row[: row.index(eos_id)] if eos_id in row else row for row in full_rows]
    assert len(expected[0]) <= 2 and max(map(len, expected[1:])) == 12, "one row ends early, another one late"
    assert [row[: row.index(eos_id)] if eos_id in row else row for row in rows] == expected
