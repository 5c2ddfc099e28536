"""Rotary positions: what turns with what, how far, in which arithmetic, and keys that several queries share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.ops.attention import attention
from megatron.ops.positions import Rotary, rotated, turns

HEAD = Rotary(head_size=8)
LLAMA3 = Rotary(
    head_size=64, base=500000.0, scaling="llama3", factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(rotary: Rotary, x: torch.Tensor, positions: torch.Tensor | None = None, longest: int = 0) -> torch.Tensor:
    return rotated(x, *turns(rotary, x, positions, longest))


def test_a_number_and_the_one_half_a_head_away_turn_by_position_times_frequency() -> None:
    x = random(1, 1, 5, 8)
    found = turned(HEAD, x)[0, 0]
    for position in range(5):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            one, other = x[0, 0, position, pair].item(), x[0, 0, position, pair + 4].item()
            assert found[position, pair].item() == pytest.approx(
                one * math.cos(angle) - other * math.sin(angle), rel=1e-13
            )
            assert found[position, pair + 4].item() == pytest.approx(
                other * math.cos(angle) + one * math.sin(angle), rel=1e-13
            )


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def score(of_query: int, of_key: int) -> float:
        places = (torch.tensor([[place]]) for place in (of_query, of_key))
        one, other = (turned(HEAD, x, place, 2000) for x, place in zip((query, key), places, strict=True))
        return float((one * other).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-11)
    assert abs(score(9, 4) - score(4, 9)) > 1e-3, "and on its sign"


@pytest.mark.parametrize("longest", [0, 5, 900])
def test_given_positions_turn_as_those_of_a_whole_sequence(longest: int) -> None:
    x, positions = random(2, 3, 4, 8), torch.tensor([[0, 1, 2, 3], [3, 0, 0, 2]])
    found, whole = turned(HEAD, x, positions, longest), turned(HEAD, x)
    assert found[0].equal(whole[0])
    alone = [turned(HEAD, x[1:, :, i : i + 1], positions[1:, i : i + 1], 4) for i in range(4)]
    assert found[1:].equal(torch.cat(alone, dim=2))


@pytest.mark.parametrize("scaling", ["default", "linear", "llama3"])
def test_frequencies_and_turns_are_hugging_faces(scaling: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    ours = replace(LLAMA3, scaling={"default": "none"}.get(scaling, scaling))
    kinds = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"], "default": []}
    given = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope: dict[str, Any] = {"rope_type": scaling, "rope_theta": 500000.0, **{key: given[key] for key in kinds[scaling]}}
    if scaling == "llama3":
        rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(torch.tensor(ours.frequencies()), theirs.inv_freq, rtol=2e-6, atol=0)
    query, key = (random(2, 2, 12, 64, seed=seed).float() for seed in (0, 1))
    cosine, sine = theirs(query, torch.arange(12).expand(2, 12))
    for wanted, x in zip(apply_rotary_pos_emb(query, key, cosine, sine), (query, key), strict=True):
        torch.testing.assert_close(turned(ours, x), wanted, rtol=0, atol=2e-5)


def test_frequencies_between_the_two_of_llama3_lie_between() -> None:
    plain, scaled = replace(LLAMA3, scaling="none").frequencies(), LLAMA3.frequencies()
    ratio = [one / other for one, other in zip(scaled, plain, strict=True)]
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(1 / 32)
    assert ratio == sorted(ratio, reverse=True) and sum(1 / 32 < each < 1 for each in ratio) >= 2


@pytest.mark.parametrize("position", [7, 4095, 131071])
def test_long_positions_are_exact(position: int) -> None:
    """In fp32 an angle of 131,071 is off by up to 0.004, and so would be its cosine."""
    x = torch.ones(1, 1, 1, 64)
    cosine, sine = turns(LLAMA3, x, torch.tensor([[position]]), 131072)
    for pair, frequency in enumerate(LLAMA3.frequencies()):
        assert cosine[0, 0, 0, pair].item() == pytest.approx(math.cos(position * frequency), abs=1e-7)
        assert sine[0, 0, 0, pair].item() == pytest.approx(math.sin(position * frequency), abs=1e-7)


def test_16_bit_numbers_turn_in_fp32() -> None:
    x = random(1, 2, 6, 8).bfloat16()
    found = turned(HEAD, x)
    assert found.dtype == torch.bfloat16 and found.equal(turned(HEAD, x.float()).bfloat16())
    assert turns(HEAD, x)[0].dtype == torch.float32 and turns(HEAD, x.double())[0].dtype == torch.float64


def test_all_layers_share_one_table() -> None:
    one, other = (turns(Rotary(head_size=8), random(1, 1, 6, 8))[0] for _ in range(2))
    assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("mask", [None, torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(2)) < 0.7])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_key_serves_its_neighbouring_queries(mask: torch.Tensor | None, is_dropped: bool) -> None:
    query = random(2, 6, 6, 4).requires_grad_()
    key, value = (random(2, 2, 6, 4, seed=seed).requires_grad_() for seed in (1, 2))
    if mask is not None:
        mask = mask | torch.eye(6, dtype=torch.bool)
    drop = (lambda x: x * (torch.arange(6) != 4)) if is_dropped else None
    shared = attention(query, key, value, mask=mask, drop=drop)
    parts = []
    for head in range(6):
        own = slice(head, head + 1), slice(head // 3, head // 3 + 1)
        parts.append(attention(query[:, own[0]], key[:, own[1]], value[:, own[1]], mask=mask, drop=drop))
    alone = torch.cat(parts, dim=1)
    torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)
    weights = random(2, 6, 6, 4, seed=3)
    found = torch.autograd.grad((shared * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((alone * weights).sum(), (query, key, value))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
