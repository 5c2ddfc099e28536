"""Maximum attention logits against the full matrix of logits, and their bound."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron.ops import attention_logits
from megatron.ops.attention import mask_value
from megatron.ops.attention_logits import logit_bounds, max_logits

SHAPES = {
    "short": (7, 7, 4, 2),
    "several tiles": (200, 200, 4, 4),
    "last queries": (130, 300, 4, 1),
    "last queries, fewer than a tile": (40, 90, 2, 2),
}
"""Name -> numbers of queries, keys, heads and key groups."""
SCALE = 0.3


def make_inputs(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys of two samples, and all their logits [b, a, s, s_k]."""
    num_queries, num_keys, num_heads, num_groups = shape
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, num_queries, num_heads, 6, generator=generator, dtype=torch.float64).transpose(1, 2)
    key = torch.randn(2, num_groups, num_keys, 6, generator=generator, dtype=torch.float64)
    logits = query @ key.repeat_interleave(num_heads // num_groups, dim=1).transpose(2, 3) * SCALE
    return query, key, logits


def visible_pairs(
    num_queries: int, num_keys: int, window: int, *, has_documents: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the visible pairs [b, s, s_k] of the last queries of a sequence, and the starts of documents."""
    positions, keys = torch.arange(num_keys - num_queries, num_keys), torch.arange(num_keys)
    is_visible = (keys <= positions[:, None]).expand(2, num_queries, num_keys)
    if window:
        is_visible = is_visible & (keys >= positions[:, None] - window)
    if not has_documents:
        return is_visible, None
    starts = torch.stack((positions // 5 * 5, positions // 33 * 33)).int()
    return is_visible & (keys >= starts[:, :, None]), starts


@pytest.mark.parametrize("name", SHAPES)
def test_maxima_equal_those_of_all_logits(name: str) -> None:
    query, key, logits = make_inputs(SHAPES[name])
    num_queries, num_keys, num_heads, _ = SHAPES[name]
    first = num_keys - num_queries
    for window, has_documents in product((0, 3, 40), (False, True)):
        is_visible, starts = visible_pairs(num_queries, num_keys, window, has_documents=has_documents)
        expected = logits.masked_fill(~is_visible.unsqueeze(1), -torch.inf).amax((0, 2, 3))
        bias = -9 * torch.rand(2, num_heads, num_queries, num_keys, dtype=torch.float64)
        bias = bias.masked_fill(~is_visible.unsqueeze(1), mask_value(torch.float64))
        maxima = {
            "positions": max_logits(query, key, scale=SCALE, starts=starts, first=first, window=window),
            "mask": max_logits(query, key, scale=SCALE, mask=is_visible.unsqueeze(1)),
            "mask with a bias": max_logits(query, key, scale=SCALE, mask=bias),
        }
        for form, actual in maxima.items():
            torch.testing.assert_close(actual, expected, atol=1e-14, rtol=0, msg=f"{form}, {window}, {has_documents}")
        bounds = logit_bounds(query, key, torch.arange(first, num_keys), scale=SCALE)
        assert (bounds >= expected).all()


def test_bound_is_that_of_causal_pairs() -> None:
    query, key, _ = make_inputs(SHAPES["short"])
    expected = [
        max(
            (query[sample, head, i].norm() * key[sample, head // 2, j].norm()).item() * SCALE
            for sample in range(2)
            for i in range(7)
            for j in range(i + 1)
        )
        for head in range(4)
    ]
    actual = logit_bounds(query, key, torch.arange(7), scale=SCALE)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=0)


def test_head_without_visible_pair_has_no_maximum() -> None:
    query, key, _ = make_inputs(SHAPES["short"])
    mask = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
    assert max_logits(query, key, scale=SCALE, mask=mask).tolist() == [-torch.inf] * 4


def test_16_bit_products_are_not_rounded() -> None:
    query, key, _ = make_inputs(SHAPES["short"])
    query, key = query.bfloat16(), key.bfloat16()
    logits = query.double() @ key.double().repeat_interleave(2, dim=1).transpose(2, 3)
    expected = logits.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf).amax((0, 2, 3))
    actual = max_logits(query, key, scale=1.0)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


def test_memory_is_that_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    product_of = attention_logits._product

    def recorded_product(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = product_of(queries, keys)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(attention_logits, "_product", recorded_product)
    monkeypatch.setattr(attention_logits, "MAX_SCORES_CPU", 64 * 200)
    query, key, logits = make_inputs(SHAPES["several tiles"])
    maxima = max_logits(query, key, scale=SCALE)
    expected = logits.masked_fill(~torch.ones(200, 200, dtype=torch.bool).tril(), -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(maxima, expected, atol=1e-14, rtol=0)
    assert max(sizes) <= 64 * 200
