"""Rotary positions: what turns with what, how far, in which arithmetic, and keys that several queries share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.ops.attention import attention
from megatron.ops.positions import Rotary, apply_rotary, rotary_cos_sin

SMALL_ROTARY = Rotary(head_size=8)
LLAMA3 = Rotary(
    head_size=64, base=500000.0, scaling="llama3", factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotate(
    rotary: Rotary, x: torch.Tensor, positions: torch.Tensor | None = None, max_positions: int = 0
) -> torch.Tensor:
    return apply_rotary(x, *rotary_cos_sin(rotary, x, positions, max_positions))


def test_pairs_rotate_by_position_times_frequency() -> None:
    x = random(1, 1, 5, 8)
    actual = rotate(SMALL_ROTARY, x)[0, 0]
    for position in range(5):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            first, second = x[0, 0, position, pair].item(), x[0, 0, position, pair + 4].item()
            assert actual[position, pair].item() == pytest.approx(
                first * math.cos(angle) - second * math.sin(angle), rel=1e-13
            )
            assert actual[position, pair + 4].item() == pytest.approx(
                second * math.cos(angle) + first * math.sin(angle), rel=1e-13
            )


def test_scores_depend_only_on_distance() -> None:
    query, key = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def score(query_position: int, key_position: int) -> float:
        positions = (torch.tensor([[position]]) for position in (query_position, key_position))
        rotated_query, rotated_key = (
            rotate(SMALL_ROTARY, x, position, 2000) for x, position in zip((query, key), positions, strict=True)
        )
        return float((rotated_query * rotated_key).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-11)
    assert abs(score(9, 4) - score(4, 9)) > 1e-3, "and on its sign"


@pytest.mark.parametrize("max_positions", [0, 5, 900])
def test_explicit_positions_match_full_sequence(max_positions: int) -> None:
    x, positions = random(2, 3, 4, 8), torch.tensor([[0, 1, 2, 3], [3, 0, 0, 2]])
    actual, expected = rotate(SMALL_ROTARY, x, positions, max_positions), rotate(SMALL_ROTARY, x)
    assert actual[0].equal(expected[0])
    one_by_one = [rotate(SMALL_ROTARY, x[1:, :, i : i + 1], positions[1:, i : i + 1], 4) for i in range(4)]
    assert actual[1:].equal(torch.cat(one_by_one, dim=2))


@pytest.mark.parametrize("scaling", ["default", "linear", "llama3"])
def test_frequencies_and_rotation_match_hugging_face(scaling: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    our_rotary = replace(LLAMA3, scaling={"default": "none"}.get(scaling, scaling))
    factor_keys = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"], "default": []}
    factors = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope: dict[str, Any] = {
        "rope_type": scaling,
        "rope_theta": 500000.0,
        **{key: factors[key] for key in factor_keys[scaling]},
    }
    if scaling == "llama3":
        rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope)
    hf_rotary = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(torch.tensor(our_rotary.frequencies()), hf_rotary.inv_freq, rtol=2e-6, atol=0)
    query, key = (random(2, 2, 12, 64, seed=seed).float() for seed in (0, 1))
    cosine, sine = hf_rotary(query, torch.arange(12).expand(2, 12))
    for expected, x in zip(apply_rotary_pos_emb(query, key, cosine, sine), (query, key), strict=True):
        torch.testing.assert_close(rotate(our_rotary, x), expected, rtol=0, atol=2e-5)


def test_llama3_interpolates_between_scaled_and_plain_frequencies() -> None:
    plain, scaled = replace(LLAMA3, scaling="none").frequencies(), LLAMA3.frequencies()
    ratios = [
        scaled_frequency / plain_frequency for scaled_frequency, plain_frequency in zip(scaled, plain, strict=True)
    ]
    assert ratios[0] == 1.0 and ratios[-1] == pytest.approx(1 / 32)
    assert ratios == sorted(ratios, reverse=True) and sum(1 / 32 < value < 1 for value in ratios) >= 2


@pytest.mark.parametrize("position", [7, 4095, 131071])
def test_long_positions_are_exact(position: int) -> None:
    """In fp32 an angle of 131,071 is off by up to 0.004, and so would be its cosine."""
    x = torch.ones(1, 1, 1, 64)
    cosine, sine = rotary_cos_sin(LLAMA3, x, torch.tensor([[position]]), 131072)
    for pair, frequency in enumerate(LLAMA3.frequencies()):
        assert cosine[0, 0, 0, pair].item() == pytest.approx(math.cos(position * frequency), abs=1e-7)
        assert sine[0, 0, 0, pair].item() == pytest.approx(math.sin(position * frequency), abs=1e-7)


def test_16_bit_inputs_rotate_in_fp32() -> None:
    x = random(1, 2, 6, 8).bfloat16()
    actual = rotate(SMALL_ROTARY, x)
    assert actual.dtype == torch.bfloat16 and actual.equal(rotate(SMALL_ROTARY, x.float()).bfloat16())
    assert (
        rotary_cos_sin(SMALL_ROTARY, x)[0].dtype == torch.float32
        and rotary_cos_sin(SMALL_ROTARY, x.double())[0].dtype == torch.float64
    )


def rotate_by_operators(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return the rotated heads by operators that autograd differentiates one by one."""
    size = 2 * cosine.shape[-1]
    first, second = x[..., :size].to(cosine.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., size:]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("has_positions", [False, True])
def test_rotation_and_gradient_have_the_bits_of_single_operators(
    dtype: torch.dtype, percent: float, has_positions: bool
) -> None:
    x = random(5, 2, 3, 8).to(dtype).permute(1, 2, 0, 3).requires_grad_()  # a view, as of packed queries
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 3, 2, 1, 0]]) if has_positions else None
    cosine, sine = rotary_cos_sin(replace(SMALL_ROTARY, percent=percent), x, positions)
    grad = random(2, 3, 5, 8, seed=1).to(dtype)
    outputs = apply_rotary(x, cosine, sine), rotate_by_operators(x, cosine, sine)
    grads = [torch.autograd.grad(output, x, grad)[0] for output in outputs]
    assert torch.equal(*outputs) and torch.equal(*grads) and not torch.equal(grads[0], grad)


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_interleaved_rotation_is_that_of_permuted_halves(percent: float) -> None:
    """Also in a compiled graph and in backward."""
    x, grad = random(2, 3, 5, 8).double().requires_grad_(), random(2, 3, 5, 8, seed=1).double()
    size = int(8 * percent)
    order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2), torch.arange(size, 8)))  # pairs to halves
    cosine, sine = rotary_cos_sin(replace(SMALL_ROTARY, percent=percent), x)
    interleaved = apply_rotary(x, cosine, sine, is_interleaved=True)
    halves = apply_rotary(x[..., order], cosine, sine)
    assert torch.equal(interleaved[..., order], halves)
    grads = torch.autograd.grad(interleaved, x, grad)[0], torch.autograd.grad(halves, x, grad[..., order])[0]
    assert torch.equal(*grads)
    with patch.object(torch.compiler, "is_compiling", return_value=True):
        assert torch.allclose(apply_rotary(x, cosine, sine, is_interleaved=True), interleaved, rtol=0, atol=1e-15)


def test_rotation_saves_only_cosine_and_sine() -> None:
    x = random(2, 3, 5, 8).bfloat16().requires_grad_()
    saved: list[torch.Tensor] = []
    cosine, sine = rotary_cos_sin(SMALL_ROTARY, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda saved: saved):
        apply_rotary(x, cosine, sine)
    assert {tensor.data_ptr() for tensor in saved} == {cosine.data_ptr(), sine.data_ptr()} and len(saved) == 2


def test_layers_share_one_table() -> None:
    table, same_table = (rotary_cos_sin(Rotary(head_size=8), random(1, 1, 6, 8))[0] for _ in range(2))
    assert table.data_ptr() == same_table.data_ptr()


@pytest.mark.parametrize("mask", [None, torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(2)) < 0.7])
@pytest.mark.parametrize("has_dropout", [False, True])
def test_grouped_keys_match_per_head_attention(mask: torch.Tensor | None, has_dropout: bool) -> None:
    query = random(2, 6, 6, 4).requires_grad_()
    key, value = (random(2, 2, 6, 4, seed=seed).requires_grad_() for seed in (1, 2))
    if mask is not None:
        mask = mask | torch.eye(6, dtype=torch.bool)
    drop = (lambda x: x * (torch.arange(6) != 4)) if has_dropout else None
    shared = attention(query, key, value, mask=mask, drop=drop)
    head_outputs = []
    for head in range(6):
        slices = slice(head, head + 1), slice(head // 3, head // 3 + 1)
        head_outputs.append(
            attention(query[:, slices[0]], key[:, slices[1]], value[:, slices[1]], mask=mask, drop=drop)
        )
    per_head = torch.cat(head_outputs, dim=1)
    torch.testing.assert_close(shared, per_head, rtol=1e-12, atol=1e-12)
    weights = random(2, 6, 6, 4, seed=3)
    actual_grads = torch.autograd.grad((shared * weights).sum(), (query, key, value))
    expected_grads = torch.autograd.grad((per_head * weights).sum(), (query, key, value))
    for actual, expected in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
