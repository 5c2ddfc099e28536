"""Attention against its formula, and the masks of documents."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.ops import biased_attention
from megatron.ops.attention import (
    additive_mask,
    attention,
    document_mask,
    mask_value,
    positions_in_segments,
    segment_mask,
)
from tests.helpers.whole import random_tensor

B, A, S, D = 2, 3, 6, 4
Q, K, V = (random_tensor(seed, B, A, S, D) for seed in (1, 2, 3))
SCALE = 1 / math.sqrt(D)
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def formula(mask, scale=SCALE):
    scores = (Q @ K.transpose(-1, -2)) * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ V


def run_with_gradients(output_of):
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    y = output_of(*leaves)
    y.backward(random_tensor(4, B, A, S, D))
    return [y.detach(), *(x.grad for x in leaves)]


def test_causal_matches_explicit_mask_forward_and_backward():
    causal = run_with_gradients(lambda q, k, v: attention(q, k, v))
    explicit = run_with_gradients(lambda q, k, v: attention(q, k, v, mask=CAUSAL.expand(B, 1, S, S)))
    assert all((a - b).abs().max() <= 1e-14 for a, b in zip(causal, explicit, strict=True))
    assert (causal[0] - formula(CAUSAL)).abs().max() <= 1e-14


def test_default_scale_is_inverse_sqrt_head_size():
    assert (attention(Q, K, V, scale=0.3) - formula(CAUSAL, 0.3)).abs().max() <= 1e-14


def test_positions_do_not_attend_to_later_ones():
    changed = K.clone()
    changed[:, :, 4] += 1.0
    assert torch.equal(attention(Q, changed, V)[:, :, :4], attention(Q, K, V)[:, :, :4])


def test_document_mask_is_causal_within_documents():
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    mask = document_mask(ids)
    assert mask.shape == (2, 1, S, S) and mask.dtype == torch.bool
    for b in range(2):
        for i in range(S):
            for j in range(S):
                assert mask[b, 0, i, j] == (j <= i and ids[b, i] == ids[b, j])


def test_document_matches_standalone_attention():
    ids = torch.tensor([[0, 0, 1, 1, 1, 1]]).expand(B, S)
    y = attention(Q, K, V, mask=document_mask(ids))
    for span in (slice(0, 2), slice(2, 6)):
        standalone = attention(Q[:, :, span], K[:, :, span], V[:, :, span])
        assert (y[:, :, span] - standalone).abs().max() <= 1e-14


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_dropout_drops_probabilities_and_defaults_to_zero(mask):
    torch.manual_seed(0)
    dropped = attention(Q, K, V, mask=mask, dropout=0.5)
    plain = attention(Q, K, V, mask=mask)
    assert (dropped - plain).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(attention(Q, K, V, mask=mask, dropout=0.5), dropped)


def test_attention_without_mask_is_causal_by_default():
    full_mask = torch.ones(S, S, dtype=torch.bool)
    assert (attention(Q, K, V, is_causal=False) - formula(full_mask)).abs().max() <= 1e-14
    assert torch.equal(attention(Q, K, V, is_causal=True), attention(Q, K, V))


def test_segment_mask_matches_equal_segments():
    queries, keys = torch.tensor([[0, 0, 1, -1]]), torch.tensor([[0, 1, 1, 1, -1, -1]])
    mask = segment_mask(queries, keys)
    assert mask.shape == (1, 1, 4, 6) and mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0, 0, 0]] * 2 + [[0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_additive_mask_matches_bool_mask_without_nan(dtype):
    mask = CAUSAL.clone().expand(B, 1, S, S).clone()
    mask[0, 0, 3] = False
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (Q, K, V)]
    y = attention(*leaves, mask=additive_mask(mask, dtype))
    y.sum().backward()
    assert all(x.isfinite().all() for x in (y, *(leaf.grad for leaf in leaves)))
    if dtype == torch.float64:
        assert (y[1] - formula(CAUSAL)[1]).abs().max() <= 1e-14
        assert (y[0, :, 3] - V[0].mean(dim=1)).abs().max() <= 1e-14


@pytest.mark.parametrize("mask_type", ["a mask", "numbers", "a bias by distance", "no mask"])
def test_masked_attention_disables_cudnn(mask_type, monkeypatch):
    """Seen by what torch is told as its kernel is called: a CPU has none of these."""
    backend_flags, original = [], F.scaled_dot_product_attention

    def recording_attention(*args, **kwargs):
        backend_flags.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording_attention)
    monkeypatch.setattr(biased_attention, "is_blocked", lambda x: False)
    mask = CAUSAL.expand(B, 1, S, S)
    if mask_type == "a bias by distance":
        biased_attention.biased_attention(Q, K, V, random_tensor(5, A, 2 * S - 1), mask=mask)
    else:
        attention(Q, K, V, mask={"a mask": mask, "numbers": additive_mask(mask, Q.dtype), "no mask": None}[mask_type])
    assert backend_flags == [(mask_type == "no mask", True)]
    assert torch.backends.cuda.cudnn_sdp_enabled(), "and behind it all is as it was"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lowest_mask_value_stays_finite_in_scores(dtype):
    assert (torch.full((), -100.0, dtype=dtype) + mask_value(dtype)).isfinite()
    assert (torch.full((), mask_value(dtype), dtype=torch.float32) * math.log2(math.e)).isfinite()
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    y = attention(10 * Q.to(dtype), -10 * Q.to(dtype), V.to(dtype), mask=mask, drop=lambda p: p)
    assert y.isfinite().all()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_positions_restart_in_each_document(lengths):
    ids = [document_idx for document_idx, length in enumerate(lengths) for _ in range(length)]
    expected = [position for length in lengths for position in range(length)]
    segments = torch.tensor([ids, [0] * len(ids)])
    assert positions_in_segments(segments).tolist() == [expected, list(range(len(ids)))]


def test_padding_is_a_segment():
    assert positions_in_segments(torch.tensor([[3, 3, 3, -1, -1]])).tolist() == [[0, 1, 2, 0, 1]]
