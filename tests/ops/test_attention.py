"""Attention against its formula, and the masks of documents."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.ops import biased_attention
from megatron.ops.attention import additive, attention, document_mask, lowest, positions_in_segments, segment_mask
from tests.helpers.whole import random

B, A, S, D = 2, 3, 6, 4
Q, K, V = (random(seed, B, A, S, D) for seed in (1, 2, 3))
ROOT = 1 / math.sqrt(D)
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def formula(mask, scale=ROOT):
    scores = (Q @ K.transpose(-1, -2)) * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ V


def gradients(output_of):
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    y = output_of(*leaves)
    y.backward(random(4, B, A, S, D))
    return [y.detach(), *(x.grad for x in leaves)]


def test_causal_equals_the_explicit_mask_forward_and_backward():
    causal = gradients(lambda q, k, v: attention(q, k, v))
    explicit = gradients(lambda q, k, v: attention(q, k, v, mask=CAUSAL.expand(B, 1, S, S)))
    assert all((a - b).abs().max() <= 1e-14 for a, b in zip(causal, explicit, strict=True))
    assert (causal[0] - formula(CAUSAL)).abs().max() <= 1e-14


def test_scale_is_one_over_the_root_of_the_head_size_unless_given():
    assert (attention(Q, K, V, scale=0.3) - formula(CAUSAL, 0.3)).abs().max() <= 1e-14


def test_no_position_sees_a_later_one():
    changed = K.clone()
    changed[:, :, 4] += 1.0
    assert torch.equal(attention(Q, changed, V)[:, :, :4], attention(Q, K, V)[:, :, :4])


def test_a_document_mask_is_causal_within_documents():
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    mask = document_mask(ids)
    assert mask.shape == (2, 1, S, S) and mask.dtype == torch.bool
    for b in range(2):
        for i in range(S):
            for j in range(S):
                assert mask[b, 0, i, j] == (j <= i and ids[b, i] == ids[b, j])


def test_a_document_is_read_as_if_it_stood_alone():
    ids = torch.tensor([[0, 0, 1, 1, 1, 1]]).expand(B, S)
    y = attention(Q, K, V, mask=document_mask(ids))
    for part in (slice(0, 2), slice(2, 6)):
        alone = attention(Q[:, :, part], K[:, :, part], V[:, :, part])
        assert (y[:, :, part] - alone).abs().max() <= 1e-14


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_dropout_drops_probabilities_and_none_is_the_default(mask):
    torch.manual_seed(0)
    dropped = attention(Q, K, V, mask=mask, dropout=0.5)
    plain = attention(Q, K, V, mask=mask)
    assert (dropped - plain).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(attention(Q, K, V, mask=mask, dropout=0.5), dropped)


def test_without_mask_attention_is_causal_unless_it_is_told_otherwise():
    everywhere = torch.ones(S, S, dtype=torch.bool)
    assert (attention(Q, K, V, is_causal=False) - formula(everywhere)).abs().max() <= 1e-14
    assert torch.equal(attention(Q, K, V, is_causal=True), attention(Q, K, V))


def test_a_segment_mask_joins_equal_segments_of_two_sequences():
    queries, keys = torch.tensor([[0, 0, 1, -1]]), torch.tensor([[0, 1, 1, 1, -1, -1]])
    mask = segment_mask(queries, keys)
    assert mask.shape == (1, 1, 4, 6) and mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0, 0, 0]] * 2 + [[0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_additive_mask_is_the_same_mask_and_gives_no_nan_where_all_is_hidden(dtype):
    mask = CAUSAL.clone().expand(B, 1, S, S).clone()
    mask[0, 0, 3] = False
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (Q, K, V)]
    y = attention(*leaves, mask=additive(mask, dtype))
    y.sum().backward()
    assert all(x.isfinite().all() for x in (y, *(leaf.grad for leaf in leaves)))
    if dtype == torch.float64:
        assert (y[1] - formula(CAUSAL)[1]).abs().max() <= 1e-14
        assert (y[0, :, 3] - V[0].mean(dim=1)).abs().max() <= 1e-14


@pytest.mark.parametrize("call", ["a mask", "numbers", "a bias by distance", "no mask"])
def test_a_mask_never_goes_to_cudnn(call, monkeypatch):
    """Seen by what torch is told as its kernel is called: a CPU has none of these."""
    seen, plain = [], F.scaled_dot_product_attention

    def watched(*args, **kwargs):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return plain(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(biased_attention, "is_blocked", lambda x: False)
    mask = CAUSAL.expand(B, 1, S, S)
    if call == "a bias by distance":
        biased_attention.biased_attention(Q, K, V, random(5, A, 2 * S - 1), mask=mask)
    else:
        attention(Q, K, V, mask={"a mask": mask, "numbers": additive(mask, Q.dtype), "no mask": None}[call])
    assert seen == [(call == "no mask", True)]
    assert torch.backends.cuda.cudnn_sdp_enabled(), "and behind it all is as it was"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_hides_stays_finite_with_a_score_and_in_powers_of_two(dtype):
    assert (torch.full((), -100.0, dtype=dtype) + lowest(dtype)).isfinite()
    assert (torch.full((), lowest(dtype), dtype=torch.float32) * math.log2(math.e)).isfinite()
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    y = attention(10 * Q.to(dtype), -10 * Q.to(dtype), V.to(dtype), mask=mask, drop=lambda p: p)
    assert y.isfinite().all()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_positions_start_anew_in_each_document(lengths):
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    expected = [place for length in lengths for place in range(length)]
    segments = torch.tensor([numbers, [0] * len(numbers)])
    assert positions_in_segments(segments).tolist() == [expected, list(range(len(numbers)))]


def test_padding_is_a_segment_too():
    assert positions_in_segments(torch.tensor([[3, 3, 3, -1, -1]])).tolist() == [[0, 1, 2, 0, 1]]
