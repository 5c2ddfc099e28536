"""Attention with a relative bias against its formula: output and every gradient, in blocks of any size."""

from __future__ import annotations

import pytest
import torch

from megatron.ops import biased_attention as module
from megatron.ops.attention import segment_mask
from megatron.ops.biased_attention import biased_attention, spread
from tests.mpu.whole import random

B, A, S, D = 3, 4, 7, 5
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0] * S, [0, 1, 2, 3, 4, 5, -1]])
MASKS = {
    "no mask": None,
    "segments": segment_mask(SEGMENTS, SEGMENTS),
    "one mask for all": SEGMENTS[:1, None, None] >= 0,
}


def inputs():
    """Return query, key and value as views of one product, as the layer has them, and the bias."""
    packed = random(1, S, B, A, 3, D)
    query, key, value = (x.permute(1, 2, 0, 3) for x in packed.unbind(3))
    return [
        x.clone(memory_format=torch.preserve_format).requires_grad_()
        for x in (query, key, value, random(2, A, 2 * S - 1))
    ]


def formula(query, key, value, by_distance, mask, is_causal):
    """Return attention with every entry of the bias looked up by itself."""
    bias = torch.stack([by_distance[:, S - 1 - i : 2 * S - 1 - i] for i in range(S)], dim=1)  # [a, s, s]
    scores = query @ key.transpose(-1, -2) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if is_causal:
        scores = scores.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), float("-inf"))
    return scores.softmax(dim=-1) @ value


def with_gradients(function, *args, **how):
    leaves = inputs()
    y = function(*leaves, *args, **how)
    y.backward(random(3, B, A, S, D))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [1, 3 * S * S, 9 * S * S, 2**20], ids=["a head", "3 heads", "2 samples", "all"])
@pytest.mark.parametrize("name", MASKS)
def test_it_equals_the_formula_and_so_do_all_gradients(name, block, is_causal, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    mask = MASKS[name]
    if name == "one mask for all":
        mask = mask | torch.eye(S, dtype=torch.bool)
    expected = with_gradients(formula, mask, is_causal)
    found = with_gradients(biased_attention, mask=mask, is_causal=is_causal)
    for own, wanted in zip(found, expected, strict=True):
        assert (own - wanted).abs().max() <= 1e-13 * wanted.abs().max()


@pytest.mark.parametrize("name", ["no mask", "segments"])
def test_the_way_of_other_devices_is_the_same_function(name, monkeypatch):
    here = with_gradients(biased_attention, mask=MASKS[name], is_causal=True)
    monkeypatch.setattr(module, "on_cpu", lambda *_: False)
    there = with_gradients(biased_attention, mask=MASKS[name], is_causal=True)
    for own, wanted in zip(there, here, strict=True):
        assert (own - wanted).abs().max() <= 1e-13 * wanted.abs().max()


def test_dropout_drops_probabilities():
    leaves = inputs()
    torch.manual_seed(0)
    dropped = biased_attention(*leaves, dropout=0.5)
    assert (dropped - biased_attention(*leaves)).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(biased_attention(*leaves, dropout=0.5), dropped)


def test_spread_puts_each_distance_on_its_diagonal_and_its_gradient_sums_them():
    by_distance = random(5, A, 2 * S - 1).requires_grad_()
    matrix = spread(by_distance)
    assert matrix.shape == (A, S, S)
    weights = random(6, A, S, S)
    matrix.backward(weights)
    for k in range(2 * S - 1):
        assert (matrix.diagonal(k - S + 1, 1, 2) == by_distance[:, k, None]).all()
        sums = weights.diagonal(k - S + 1, 1, 2).sum(dim=-1)
        assert (by_distance.grad[:, k] - sums).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_bias_in_16_bits_are_summed_in_32(dtype):
    expected = with_gradients(formula, None, False)
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs()]
    biased_attention(*leaves).backward(random(3, B, A, S, D).to(dtype))
    assert all(leaf.grad.dtype == dtype for leaf in leaves)
    for leaf, wanted in zip(leaves, expected[1:], strict=True):
        assert (leaf.grad - wanted).norm() <= 4 * torch.finfo(dtype).eps * wanted.norm() * S
