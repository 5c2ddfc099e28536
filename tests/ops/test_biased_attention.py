"""Attention with a relative bias against its formula: output and every gradient, in blocks of any size."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.ops import biased_attention as ops_biased_attention
from megatron.ops.attention import additive, segment_mask
from megatron.ops.biased_attention import biased_attention, spread, without_future
from tests.helpers.whole import random

B, A, S, D = 3, 4, 7, 5
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0] * S, [0, 1, 2, 3, 4, 5, -1]])
MASKS = {
    "no mask": None,
    "segments": segment_mask(SEGMENTS, SEGMENTS),
    "one mask for all": SEGMENTS[:1, None, None] >= 0,
}


def inputs(dtype=torch.float64):
    """Return query, key and value in one tensor, as the layer makes them, and the bias."""
    return [random(1, S, B, A, 3, D).to(dtype).requires_grad_(), random(2, A, 2 * S - 1).to(dtype).requires_grad_()]


def heads(packed):
    return [x.permute(1, 2, 0, 3) for x in packed.unbind(3)]


def formula(query, key, value, by_distance, mask, is_causal):
    """Return attention with every entry of the bias looked up by itself."""
    bias = torch.stack([by_distance[:, S - 1 - i : 2 * S - 1 - i] for i in range(S)], dim=1)  # [a, s, s]
    scores = query @ key.transpose(-1, -2) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if is_causal:
        scores = scores.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), float("-inf"))
    return scores.softmax(dim=-1) @ value


def with_gradients(function, dtype=torch.float64):
    """Return the output of ``function(query, key, value, by_distance)`` and the gradients."""
    packed, by_distance = inputs(dtype)
    y = function(*heads(packed), by_distance)
    y.backward(random(3, B, A, S, D).to(dtype))
    return [y.detach(), packed.grad, by_distance.grad]


def ours(mask, is_causal):
    """Return our function with everything but the tensors."""
    return lambda q, k, v, bias: biased_attention(q, k, v, without_future(bias) if is_causal else bias, mask=mask)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [1, 3 * S * S, 9 * S * S, 2**20], ids=["a head", "3 heads", "2 samples", "all"])
@pytest.mark.parametrize("kept", [0, 2**24], ids=["made twice", "kept"])
@pytest.mark.parametrize("name", MASKS)
def test_it_equals_the_formula_and_so_do_all_gradients(name, kept, block, is_causal, monkeypatch):
    monkeypatch.setattr(ops_biased_attention, "BLOCK", block)
    monkeypatch.setattr(ops_biased_attention, "KEPT", kept)
    mask = MASKS[name]
    if name == "one mask for all":
        mask = mask | torch.eye(S, dtype=torch.bool)
    expected = with_gradients(lambda *tensors: formula(*tensors, mask, is_causal))
    found = with_gradients(ours(mask, is_causal))
    for own, wanted in zip(found, expected, strict=True):
        assert (own - wanted).abs().max() <= 1e-13 * wanted.abs().max()


@pytest.mark.parametrize("name", ["no mask", "segments"])
def test_the_way_of_other_devices_is_the_same_function(name, monkeypatch):
    here = with_gradients(ours(MASKS[name], True))
    monkeypatch.setattr(ops_biased_attention, "is_blocked", lambda *_: False)
    there = with_gradients(ours(MASKS[name], True))
    for own, wanted in zip(there, here, strict=True):
        assert (own - wanted).abs().max() <= 1e-13 * wanted.abs().max()


def test_dropout_drops_probabilities():
    packed, by_distance = inputs()
    torch.manual_seed(0)
    dropped = biased_attention(*heads(packed), by_distance, dropout=0.5)
    assert (dropped - biased_attention(*heads(packed), by_distance)).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(biased_attention(*heads(packed), by_distance, dropout=0.5), dropped)


@pytest.mark.parametrize("blocked", [True, False])
def test_sequences_of_two_lengths_without_a_bias(blocked, monkeypatch):
    monkeypatch.setattr(ops_biased_attention, "is_blocked", lambda *_: blocked)
    mask = torch.rand(B, 1, 3, S, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, 0, 1] = False
    results = []
    for function in (
        lambda q, k, v: biased_attention(q, k, v, mask=mask),
        lambda q, k, v: (q @ k.transpose(2, 3) + additive(mask, q.dtype)).softmax(-1) @ v,
    ):
        leaves = [random(i, B, A, size, D).requires_grad_() for i, size in enumerate((3, S, S))]
        y = function(*leaves)
        grad = random(4, B, A, 3, D)
        grad[0, :, 1] = 0.0
        y.backward(grad)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        assert (y[0, :, 1] - leaves[2][0].mean(dim=1)).abs().max() <= 1e-14, "what may look nowhere looks everywhere"
    for own, wanted in zip(*results, strict=True):
        assert (own - wanted).abs().max() <= 1e-13 * wanted.abs().max()


def test_probabilities_are_kept_for_backward_up_to_a_limit_only(monkeypatch):
    def kept():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            packed, by_distance = inputs()
            biased_attention(*heads(packed), by_distance)
        return sum(sizes)

    less = 3 * B * A * S * D + A * (2 * S - 1)
    assert kept() == less + B * A * S * S
    monkeypatch.setattr(ops_biased_attention, "KEPT", B * A * S * S - 1)
    assert kept() == less


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
def test_fewer_bits_give_the_same_but_for_rounding(dtype):
    expected = with_gradients(lambda *tensors: formula(*tensors, None, False))
    for own, wanted in zip(with_gradients(ours(None, False), dtype), expected, strict=True):
        assert own.dtype == dtype
        assert (own - wanted).norm() <= 4 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize(
    ("name", "has_bias"),
    [
        ("segments", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("no mask", True), ("segments", False), ("no mask", False))
        ),
    ],
)
def test_a_compiler_sees_one_operator_that_torch_accepts(has_bias, name):
    query, key, value = (random(i, B, A, S, D).requires_grad_() for i in range(3))
    bias = random(4, 2 * S - 1, A).t().requires_grad_() if has_bias else None  # in memory as the layer's
    hidden = None if MASKS[name] is None else ~MASKS[name]
    torch.library.opcheck(ops_biased_attention._forward, (query, key, value, bias, hidden, True))
    targets = []

    def keep(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    tensors = [query, key, value] if bias is None else [query, key, value, bias]
    compiled = torch.compile(biased_attention, backend=keep, dynamic=False)
    outcomes = []
    for function in (biased_attention, compiled):
        y = function(query, key, value, bias, mask=MASKS[name])
        outcomes.append([y.detach(), *torch.autograd.grad(y, tensors, random(5, B, A, S, D))])
    assert all(torch.equal(one, two) for one, two in zip(*outcomes, strict=True))
    assert sum("megatron_tds.biased_attention" in each for each in targets) == 1
    assert not any("bmm" in each for each in targets)


@pytest.mark.parametrize("kept", [0, 2**24], ids=["made twice", "kept"])
def test_its_products_are_counted(kept, monkeypatch):
    monkeypatch.setattr(ops_biased_attention, "KEPT", kept)
    with FlopCounterMode(display=False) as counter:
        with_gradients(ours(None, False))
    assert counter.get_total_flops() == (6 if kept else 7) * 2 * B * A * S * S * D
