"""Attention whose probabilities are dropped by a function of the caller's equals torch's own where that drops none."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.attention import attention, document_mask, segment_mask
from megatron.ops.biased_attention import biased_attention, mask_future
from tests.helpers.whole import random_tensor

B, A, S, D = 2, 3, 7, 4
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 1, 1, 1, 1, -1, -1]])


def make_inputs():
    return [random_tensor(seed, B, A, S, D).requires_grad_() for seed in (1, 2, 3)]


def keep_all(probabilities):
    assert probabilities.shape == (B, A, S, S)
    return probabilities


def run_with_gradients(function, *extra_tensors, **attention_kwargs):
    """Return output and gradients."""
    tensors = [*make_inputs(), *extra_tensors]
    output = function(*tensors, **attention_kwargs)
    (output * random_tensor(9, B, A, S, D)).sum().backward()
    return [output.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize(
    "attention_kwargs",
    [{}, {"mask": document_mask(SEGMENTS)}, {"mask": segment_mask(SEGMENTS, SEGMENTS), "is_causal": False}]
    + [{"is_causal": False}, {"scale": 1.0}, {"mask": random_tensor(5, B, 1, S, S)}],
    ids=["causal", "documents", "segments", "both directions", "unscaled", "added"],
)
def test_attention_with_identity_drop_matches_torch(attention_kwargs):
    for actual, expected in zip(
        run_with_gradients(attention, drop=keep_all, **attention_kwargs),
        run_with_gradients(attention, **attention_kwargs),
        strict=True,
    ):
        assert torch.allclose(actual, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mask", [None, segment_mask(SEGMENTS, SEGMENTS)], ids=["", "segments"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_biased_attention_with_identity_drop_matches_torch(has_bias, mask):
    def run(**attention_kwargs):
        extra_tensors = [random_tensor(6, A, 2 * S - 1).requires_grad_()] if has_bias else []
        return run_with_gradients(biased_attention, *extra_tensors, mask=mask, **attention_kwargs)

    for actual, expected in zip(run(drop=keep_all), run(), strict=True):
        assert torch.allclose(actual, expected, rtol=0, atol=1e-12)


def test_dropped_probabilities_do_not_contribute():
    query, key, value = make_inputs()
    first_key_only = attention(query, key, value, is_causal=False, drop=lambda p: p * (torch.arange(S) == 0))
    weight = torch.softmax(query @ key.transpose(2, 3) * D**-0.5, dim=-1)[..., :1]
    assert torch.allclose(first_key_only, weight * value[:, :, :1], rtol=0, atol=1e-13)


def test_fully_masked_query_gives_finite_output():
    all_masked = torch.zeros(B, 1, S, S, dtype=torch.bool)
    for function in (attention, biased_attention):
        assert function(*make_inputs(), mask=all_masked, drop=keep_all).isfinite().all()


def test_probabilities_are_fp32_with_16_bit_inputs():
    probabilities = []
    bf16_inputs = [x.detach().bfloat16() for x in make_inputs()]
    output = biased_attention(
        *bf16_inputs,
        mask_future(random_tensor(6, A, 2 * S - 1)).bfloat16(),
        drop=lambda p: probabilities.append(p) or p,
    )
    assert probabilities[0].dtype == torch.float32 and output.dtype == torch.bfloat16
    expected = biased_attention(
        *[x.float() for x in bf16_inputs], mask_future(random_tensor(6, A, 2 * S - 1)).float(), drop=keep_all
    )
    assert (output.float() - expected).abs().max() <= 0.03
