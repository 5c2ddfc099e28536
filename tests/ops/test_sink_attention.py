"""Attention with sinks equals the formula in fp64: values and the gradients of query, key, value and sinks."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.ops import document_attention, flex_attention
from megatron.ops.attention import document_mask
from megatron.ops.document_attention import document_starts
from megatron.ops.flex_attention import flex_document_attention
from megatron.ops.sink_attention import sink_attention
from tests.helpers.documents import (
    NUM_HEADS,
    draw_document_lengths,
    expand_block_mask,
    make_attention_inputs,
    max_difference,
    segment_ids_from_lengths,
)

TOLERANCE = 1e-12
LENGTH = 150
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 5}, "cap": {"cap": 2.0}, "scale": {"scale": 0.7},
    "all": {"window": 70, "cap": 3.0, "scale": 0.5},
}  # fmt: skip
ROWS = st.lists(draw_document_lengths(LENGTH, 100), min_size=1, max_size=2)


def make_sinks(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a sink for each head, from one that takes nothing to one that takes nearly everything."""
    return torch.linspace(-2.0, 9.0, NUM_HEADS).to(dtype).requires_grad_()


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor, *,
    cap: float = 0.0, scale: float | None = None, drop: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return the context, given the mask of visible keys [b or 1, 1, s, s_k]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    exponentials = scores.exp() * mask
    probabilities = exponentials / (exponentials.sum(-1, keepdim=True) + sinks.exp().view(-1, 1, 1))
    return (probabilities if drop is None else drop(probabilities)) @ value


def values_and_grads(context: torch.Tensor, leaves: list[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
    return [context, *torch.autograd.grad((context * factor).sum(), leaves)]


def visible_keys(ids: torch.Tensor, window: int = 0) -> torch.Tensor:
    positions = torch.arange(ids.shape[1])
    is_near = positions.unsqueeze(1) - positions <= window
    return document_mask(ids) & is_near if window else document_mask(ids)


@given(lengths=ROWS, places=st.tuples(st.integers(0, 149), st.integers(1, 150)), form=st.sampled_from(list(FORMS)))
@example(lengths=[[1, 70, 5, 3, 90], [100, 1]], places=(0, 150), form="all")
@example(lengths=[[9, 60, 3, 40]], places=(30, 140), form="window")
@settings(max_examples=12, deadline=None)
def test_documents_and_query_shards_match_formula(lengths: list[list[int]], places: tuple[int, int], form: str) -> None:
    """Each query counts its sink once, also if its document began on another context rank."""
    ids = torch.stack([segment_ids_from_lengths(document_lengths, LENGTH) for document_lengths in lengths])
    (query, key, value, factor), sinks = make_attention_inputs(len(lengths), LENGTH), make_sinks()
    first, stop = min(places), max(*places, min(places) + 1)
    options = {**FORMS[form]}
    actual = document_attention.document_attention(
        query[:, :, first:stop], key, value, document_starts(ids)[:, first:stop], first=first, sinks=sinks, **options
    )
    mask = visible_keys(ids, options.pop("window", 0))
    expected = formula(query, key, value, sinks, mask, **options)[:, :, first:stop]
    check = partial(values_and_grads, leaves=[query, key, value, sinks], factor=factor[:, :, first:stop])
    assert max_difference(check(actual), check(expected)) <= TOLERANCE


def test_head_blocks_use_their_sinks() -> None:
    ids, (query, key, value, factor) = torch.zeros(2, LENGTH, dtype=torch.long), make_attention_inputs(2, LENGTH)
    sinks = make_sinks()
    check = partial(values_and_grads, leaves=[query, key, value, sinks], factor=factor)
    with patch.object(document_attention, "CACHED_SCORES", 1):
        actual = check(document_attention.document_attention(query, key, value, document_starts(ids), sinks=sinks))
    assert max_difference(actual, check(formula(query, key, value, sinks, visible_keys(ids)))) <= TOLERANCE


@pytest.mark.parametrize("first", [0, 37])
def test_causal_attention_of_last_positions_matches_formula(first: int) -> None:
    (query, key, value, factor), sinks = make_attention_inputs(2, LENGTH), make_sinks()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    actual = sink_attention(query[:, :, first:], key, value, sinks=sinks)
    expected = formula(query, key, value, sinks, mask)[:, :, first:]
    check = partial(values_and_grads, leaves=[query, key, value, sinks], factor=factor[:, :, first:])
    assert max_difference(check(actual), check(expected)) <= TOLERANCE


@pytest.mark.parametrize("mask_type", ["bool", "additive", "dropped"])
def test_masks_and_dropout_match_formula(mask_type: str) -> None:
    ids = torch.stack([segment_ids_from_lengths(lengths, 20) for lengths in ([3, 9, 8], [20])])
    (query, key, value, factor), sinks, mask = make_attention_inputs(2, 20), make_sinks(), visible_keys(ids, 6)
    is_kept = torch.rand(2, NUM_HEADS, 20, 20, generator=torch.Generator().manual_seed(0)) < 0.7
    drop = (lambda probabilities: probabilities * is_kept / 0.7) if mask_type == "dropped" else None
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min / 2)
    given_mask = bias if mask_type == "additive" else mask
    actual = sink_attention(query, key, value, sinks=sinks, mask=given_mask, drop=drop, cap=2.0)
    expected = formula(query, key, value, sinks, mask, drop=drop, cap=2.0)
    check = partial(values_and_grads, leaves=[query, key, value, sinks], factor=factor)
    assert max_difference(check(actual), check(expected)) <= TOLERANCE


@pytest.mark.parametrize("score", [0.0, 3.0, 80.0])
def test_extreme_sinks_are_finite(score: float) -> None:
    """A sink far below the scores changes nothing, and one far above them takes everything, without NaN."""
    (query, key, value, factor) = make_attention_inputs(1, 70)
    starts = torch.zeros(1, 70, dtype=torch.int32)
    plain = document_attention.document_attention(query * score, key, value, starts)
    for sink, expected in ((-1e4, plain), (1e4, torch.zeros_like(plain))):
        sinks = torch.full((NUM_HEADS,), sink, dtype=torch.float64, requires_grad=True)
        context = sink_attention(query * score, key, value, sinks=sinks)
        assert max_difference([context], [expected]) <= TOLERANCE
        grads = torch.autograd.grad((context * factor).sum(), [query, key, value, sinks])
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_close_and_keeps_dtypes(dtype: torch.dtype) -> None:
    (query, key, value, factor), sinks = make_attention_inputs(1, 70), make_sinks()
    leaves = [x.detach().to(dtype).requires_grad_() for x in (query, key, value)]
    low_sinks = make_sinks(dtype)
    results = values_and_grads(sink_attention(*leaves, sinks=low_sinks), [*leaves, low_sinks], factor.to(dtype))
    assert {result.dtype for result in results} == {dtype}
    expected = values_and_grads(sink_attention(query, key, value, sinks=sinks), [query, key, value, sinks], factor)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for result, reference in zip(results, expected, strict=True):
        assert (result.double() - reference).norm() <= tolerance * reference.norm()


# The kernel for CUDA: torch's flex_attention returns the log-sum-exp, from which the effect of the sinks follows.


def reference_flex_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, score_mod: Any, block_mask: Any,
    scale: float | None, enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Reference for ``flexible_attention_with_lse`` that has gradients on a CPU."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, None, torch.arange(scores.shape[1]).view(-1, 1, 1), None, None)
    scores = scores.masked_fill(~expand_block_mask(block_mask), float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("form", FORMS)
def test_rescaled_flex_attention_matches_formula(form: str) -> None:
    ids = torch.stack([segment_ids_from_lengths(lengths, 300) for lengths in ([260, 1, 30, 9], [3, 290])])
    (query, key, value, factor), sinks, options = make_attention_inputs(2, 300), make_sinks(), {**FORMS[form]}
    with patch.object(flex_attention, "flexible_attention_with_lse", reference_flex_with_lse):
        actual = flex_document_attention(query, key, value, document_starts(ids), sinks=sinks, **options)
    expected = formula(query, key, value, sinks, visible_keys(ids, options.pop("window", 0)), **options)
    check = partial(values_and_grads, leaves=[query, key, value, sinks], factor=factor)
    assert max_difference(check(actual), check(expected)) <= TOLERANCE


@pytest.mark.slow  # torch traces it; the rescaling is in the short run
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_torch_flex_attention_returns_the_log_sum_exp() -> None:
    ids = torch.stack([segment_ids_from_lengths(lengths, 300) for lengths in ([260, 1, 30, 9], [3, 290])])
    (query, key, value, _), sinks = make_attention_inputs(2, 300), make_sinks()
    actual = flex_document_attention(query, key, value, document_starts(ids), sinks=sinks, window=5)
    assert max_difference([actual], [formula(query, key, value, sinks, visible_keys(ids, 5))]) <= TOLERANCE


def test_plain_kernels_are_not_selected_for_sinks() -> None:
    """FlashAttention's varlen interface has no gradient of the log-sum-exp."""
    with (
        patch.object(document_attention, "select_implementation", return_value=document_attention.FLEX) as select,
        patch.object(document_attention, "flex_document_attention") as flex,
    ):
        query = torch.empty(1, NUM_HEADS, 4, 8, device="meta")
        document_attention.document_attention(query, query, query, torch.zeros(1, 4), sinks=torch.zeros(NUM_HEADS))
    assert select.call_args.kwargs == {"is_plain": False} and flex.call_args.kwargs["sinks"] is not None
