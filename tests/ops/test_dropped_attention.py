"""Attention whose probabilities are dropped by a function of the caller's equals torch's own where that drops none."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.attention import attention, document_mask, segment_mask
from megatron.ops.biased_attention import biased_attention, without_future
from tests.helpers.whole import random

B, A, S, D = 2, 3, 7, 4
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 1, 1, 1, 1, -1, -1]])


def inputs():
    return [random(seed, B, A, S, D).requires_grad_() for seed in (1, 2, 3)]


def keep_all(probabilities):
    assert probabilities.shape == (B, A, S, S)
    return probabilities


def outcome(function, *others, **how):
    """Return output and gradients."""
    tensors = [*inputs(), *others]
    output = function(*tensors, **how)
    (output * random(9, B, A, S, D)).sum().backward()
    return [output.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize(
    "how",
    [{}, {"mask": document_mask(SEGMENTS)}, {"mask": segment_mask(SEGMENTS, SEGMENTS), "is_causal": False}]
    + [{"is_causal": False}, {"scale": 1.0}, {"mask": random(5, B, 1, S, S)}],
    ids=["causal", "documents", "segments", "both directions", "unscaled", "added"],
)
def test_attention_that_drops_nothing_is_torchs(how):
    for ours, theirs in zip(outcome(attention, drop=keep_all, **how), outcome(attention, **how), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mask", [None, segment_mask(SEGMENTS, SEGMENTS)], ids=["", "segments"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_biased_attention_that_drops_nothing_is_torchs(has_bias, mask):
    def run(**how):
        others = [random(6, A, 2 * S - 1).requires_grad_()] if has_bias else []
        return outcome(biased_attention, *others, mask=mask, **how)

    for ours, theirs in zip(run(drop=keep_all), run(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_what_is_dropped_is_not_read():
    query, key, value = inputs()
    first_alone = attention(query, key, value, is_causal=False, drop=lambda p: p * (torch.arange(S) == 0))
    weight = torch.softmax(query @ key.transpose(2, 3) * D**-0.5, dim=-1)[..., :1]
    assert torch.allclose(first_alone, weight * value[:, :, :1], rtol=0, atol=1e-13)


def test_a_query_that_may_look_nowhere_gives_numbers():
    nowhere = torch.zeros(B, 1, S, S, dtype=torch.bool)
    for function in (attention, biased_attention):
        assert function(*inputs(), mask=nowhere, drop=keep_all).isfinite().all()


def test_probabilities_are_fp32_where_the_rest_has_16_bits():
    seen = []
    narrow = [x.detach().bfloat16() for x in inputs()]
    output = biased_attention(
        *narrow, without_future(random(6, A, 2 * S - 1)).bfloat16(), drop=lambda p: seen.append(p) or p
    )
    assert seen[0].dtype == torch.float32 and output.dtype == torch.bfloat16
    wide = biased_attention(
        *[x.float() for x in narrow], without_future(random(6, A, 2 * S - 1)).float(), drop=keep_all
    )
    assert (output.float() - wide).abs().max() <= 0.03
