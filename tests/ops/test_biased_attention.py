"""Attention with a relative bias against its formula: output and every gradient, in blocks of any size."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.ops import biased_attention as ops_biased_attention
from megatron.ops.attention import additive_mask, segment_mask
from megatron.ops.biased_attention import biased_attention, expand_bias, mask_future
from tests.helpers.whole import random_tensor

B, A, S, D = 3, 4, 7, 5
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0] * S, [0, 1, 2, 3, 4, 5, -1]])
MASKS = {
    "no mask": None,
    "segments": segment_mask(SEGMENTS, SEGMENTS),
    "one mask for all": SEGMENTS[:1, None, None] >= 0,
}


def make_inputs(dtype=torch.float64):
    """Return query, key and value in one tensor, as the layer makes them, and the bias."""
    return [
        random_tensor(1, S, B, A, 3, D).to(dtype).requires_grad_(),
        random_tensor(2, A, 2 * S - 1).to(dtype).requires_grad_(),
    ]


def split_heads(packed):
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


def run_with_gradients(function, dtype=torch.float64):
    """Return the output of ``function(query, key, value, by_distance)`` and the gradients."""
    packed, by_distance = make_inputs(dtype)
    y = function(*split_heads(packed), by_distance)
    y.backward(random_tensor(3, B, A, S, D).to(dtype))
    return [y.detach(), packed.grad, by_distance.grad]


def bind_attention(mask, is_causal):
    """Return our function with everything but the tensors."""
    return lambda q, k, v, bias: biased_attention(q, k, v, mask_future(bias) if is_causal else bias, mask=mask)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [1, 3 * S * S, 9 * S * S, 2**20], ids=["a head", "3 heads", "2 samples", "all"])
@pytest.mark.parametrize("saved_limit", [0, 2**24], ids=["made twice", "kept"])
@pytest.mark.parametrize("name", MASKS)
def test_output_and_gradients_match_formula(name, saved_limit, block, is_causal, monkeypatch):
    monkeypatch.setattr(ops_biased_attention, "BLOCK_SCORES", block)
    monkeypatch.setattr(ops_biased_attention, "MAX_SAVED_PROBABILITIES", saved_limit)
    mask = MASKS[name]
    if name == "one mask for all":
        mask = mask | torch.eye(S, dtype=torch.bool)
    expected = run_with_gradients(lambda *tensors: formula(*tensors, mask, is_causal))
    actual = run_with_gradients(bind_attention(mask, is_causal))
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (actual_tensor - expected_tensor).abs().max() <= 1e-13 * expected_tensor.abs().max()


@pytest.mark.parametrize("name", ["no mask", "segments"])
def test_unblocked_path_matches_blocked_path(name, monkeypatch):
    blocked = run_with_gradients(bind_attention(MASKS[name], True))
    monkeypatch.setattr(ops_biased_attention, "is_blocked", lambda *_: False)
    unblocked = run_with_gradients(bind_attention(MASKS[name], True))
    for actual, expected in zip(unblocked, blocked, strict=True):
        assert (actual - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_dropout_drops_probabilities():
    packed, by_distance = make_inputs()
    torch.manual_seed(0)
    dropped = biased_attention(*split_heads(packed), by_distance, dropout=0.5)
    assert (dropped - biased_attention(*split_heads(packed), by_distance)).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(biased_attention(*split_heads(packed), by_distance, dropout=0.5), dropped)


@pytest.mark.parametrize("use_blocks", [True, False])
def test_cross_lengths_without_bias_match_formula(use_blocks, monkeypatch):
    monkeypatch.setattr(ops_biased_attention, "is_blocked", lambda *_: use_blocks)
    mask = torch.rand(B, 1, 3, S, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, 0, 1] = False
    results = []
    for function in (
        lambda q, k, v: biased_attention(q, k, v, mask=mask),
        lambda q, k, v: (q @ k.transpose(2, 3) + additive_mask(mask, q.dtype)).softmax(-1) @ v,
    ):
        leaves = [random_tensor(i, B, A, size, D).requires_grad_() for i, size in enumerate((3, S, S))]
        y = function(*leaves)
        grad = random_tensor(4, B, A, 3, D)
        grad[0, :, 1] = 0.0
        y.backward(grad)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        assert (y[0, :, 1] - leaves[2][0].mean(dim=1)).abs().max() <= 1e-14, "what may look nowhere looks everywhere"
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_probabilities_are_saved_up_to_limit(monkeypatch):
    def saved_numel():
        numels = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: numels.append(x.numel()) or x, lambda x: x):
            packed, by_distance = make_inputs()
            biased_attention(*split_heads(packed), by_distance)
        return sum(numels)

    base_numel = 3 * B * A * S * D + A * (2 * S - 1)
    assert saved_numel() == base_numel + B * A * S * S
    monkeypatch.setattr(ops_biased_attention, "MAX_SAVED_PROBABILITIES", B * A * S * S - 1)
    assert saved_numel() == base_numel


def test_spread_fills_diagonals_and_gradient_sums_them():
    by_distance = random_tensor(5, A, 2 * S - 1).requires_grad_()
    matrix = expand_bias(by_distance)
    assert matrix.shape == (A, S, S)
    weights = random_tensor(6, A, S, S)
    matrix.backward(weights)
    for k in range(2 * S - 1):
        assert (matrix.diagonal(k - S + 1, 1, 2) == by_distance[:, k, None]).all()
        diagonal_sums = weights.diagonal(k - S + 1, 1, 2).sum(dim=-1)
        assert (by_distance.grad[:, k] - diagonal_sums).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_matches_up_to_rounding(dtype):
    expected = run_with_gradients(lambda *tensors: formula(*tensors, None, False))
    for actual_tensor, expected_tensor in zip(
        run_with_gradients(bind_attention(None, False), dtype), expected, strict=True
    ):
        assert actual_tensor.dtype == dtype
        assert (actual_tensor - expected_tensor).norm() <= 4 * torch.finfo(dtype).eps * expected_tensor.norm()


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
def test_compiler_sees_one_valid_operator(has_bias, name):
    query, key, value = (random_tensor(i, B, A, S, D).requires_grad_() for i in range(3))
    bias = random_tensor(4, 2 * S - 1, A).t().requires_grad_() if has_bias else None  # in memory as the layer's
    masked_out = None if MASKS[name] is None else ~MASKS[name]
    torch.library.opcheck(ops_biased_attention._forward, (query, key, value, bias, masked_out, True))
    targets = []

    def record(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    tensors = [query, key, value] if bias is None else [query, key, value, bias]
    compiled = torch.compile(biased_attention, backend=record, dynamic=False)
    outcomes = []
    for function in (biased_attention, compiled):
        y = function(query, key, value, bias, mask=MASKS[name])
        outcomes.append([y.detach(), *torch.autograd.grad(y, tensors, random_tensor(5, B, A, S, D))])
    assert all(torch.equal(eager_out, compiled_out) for eager_out, compiled_out in zip(*outcomes, strict=True))
    assert sum("megatron_tds.biased_attention" in target for target in targets) == 1
    assert not any("bmm" in target for target in targets)


@pytest.mark.parametrize("saved_limit", [0, 2**24], ids=["made twice", "kept"])
def test_flop_counter_counts_all_products(saved_limit, monkeypatch):
    monkeypatch.setattr(ops_biased_attention, "MAX_SAVED_PROBABILITIES", saved_limit)
    with FlopCounterMode(display=False) as counter:
        run_with_gradients(bind_attention(None, False))
    assert counter.get_total_flops() == (6 if saved_limit else 7) * 2 * B * A * S * S * D
