"""Attention within documents by their lengths, forward and backward, against the formula with a mask written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.ops.document_attention import BLOCKS, SHORT, document_attention, document_starts, document_stops, way_of
from tests.gpu.near import assert_near, leaf, moved, name_of, noise
from tests.helpers.documents import SLOPES, by_formula, segments_of

pytestmark = pytest.mark.gpu
D, HEADS = 64, 4
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
ROWS = ([1, 300, 20, 700, 256, 257], [513, 3, 3, 3], [5, 1, 100, 256], [2000], [1])
"""Lengths of documents, over and over, the last one cut off: long and short ones, one document, one token each."""
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (HEADS, {}), "grouped": (2, {}), "window": (2, {"window": 300}), "small window": (HEADS, {"window": 3}),
    "ALiBi": (HEADS, {"slopes": SLOPES}), "cap": (2, {"cap": 2.0}),
    "all": (2, {"window": 300, "cap": 3.0, "slopes": SLOPES, "scale": 0.2}),
}  # fmt: skip
"""Name -> heads of keys, and what attention has beside."""


def has_way(place: torch.device, dtype: torch.dtype, length: int, *, is_plain: bool, head_size: int = D) -> None:
    """Skip a test on a device that keeps such documents apart by a mask."""
    if way_of(torch.empty(0, dtype=dtype, device=place), length, head_size, is_plain=is_plain) is None:
        pytest.skip("documents are kept apart by a mask on this device")


def compare(
    ids: torch.Tensor, place: torch.device, dtype: torch.dtype, groups: int, how: dict[str, Any], first: int = 0,
    is_causal: bool = True, head_size: int = D,
) -> None:  # fmt: skip
    """Compare values and gradients of the queries from ``first`` on with those of the formula in fp64."""
    b, s = ids.shape
    parts = [noise(i, b, heads, s, head_size, dtype=dtype) for i, heads in enumerate((HEADS, groups, groups))]
    factor = noise(7, b, HEADS, s - first, head_size, dtype=dtype)
    query, key, value = (leaf(part, place, dtype) for part in parts)
    starts = document_starts(ids)
    ends = torch.stack((starts, document_stops(starts))).to(place)[:, :, first:]
    known = ends[:1] if is_causal else ends
    out = document_attention(query[:, :, first:], key, value, *known, first=first, **how)
    out.backward(factor.to(place, dtype))
    found = {"output": out.detach(), "of query": query.grad, "of key": key.grad, "of value": value.grad}
    leaves = [leaf(part, torch.device("cpu"), torch.float64) for part in parts]
    whole = by_formula(*leaves, ids, is_causal=is_causal, **how)[:, :, first:]
    whole.backward(factor.double())
    assert_near(found, dict(zip(found, [whole.detach(), *[each.grad for each in leaves]], strict=True)), dtype)


def ids_of(length: int, smaller: int) -> torch.Tensor:
    return torch.stack([segments_of([-(-each // smaller) for each in lengths], length) for lengths in ROWS])


@pytest.mark.parametrize("dtype", (*SIXTEEN_BITS, torch.float32), ids=name_of)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_piece", [False, True], ids=["", "a piece"])
def test_documents_by_length_are_the_formula(
    form: str, is_piece: bool, dtype: torch.dtype, place: torch.device, kind: str
) -> None:
    groups, how = FORMS[form]
    smaller = 1 if kind == "cuda" else 10
    s, first = 1100 // smaller, 333 // smaller if is_piece else 0
    has_way(place, dtype, s, is_plain=how.keys() <= {"window"})
    compare(ids_of(s, smaller), place, dtype, groups, how, first)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
@pytest.mark.parametrize(("length", "head_size"), [(64, 64), (128, 16), (384, 80), (512, 128), (300, 256)])
def test_short_sequences_and_other_heads_are_the_formula(
    length: int, head_size: int, dtype: torch.dtype, place: torch.device, kind: str
) -> None:
    has_way(place, dtype, length, is_plain=True, head_size=head_size)
    compare(ids_of(length, 10), place, dtype, 2, {}, head_size=head_size)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
def test_both_directions_within_documents_are_the_formula(dtype: torch.dtype, place: torch.device, kind: str) -> None:
    """As in padded samples of BERT."""
    smaller = 1 if kind == "cuda" else 10
    has_way(place, dtype, 1100 // smaller, is_plain=False)
    compare(ids_of(1100 // smaller, smaller), place, dtype, HEADS, {}, is_causal=False)


def test_blocks_are_computed_without_scores_in_memory(place: torch.device, kind: str) -> None:
    """By what a step of ALiBi takes on CUDA, where a matrix of scores would be 1 GiB."""
    s = 16384
    x = torch.empty(0, dtype=torch.bfloat16, device=place)
    if kind != "cuda" or way_of(x, s, D, is_plain=False) != BLOCKS:
        pytest.skip("no flex_attention here")
    starts = moved(document_starts(segments_of([3000, 7], s).unsqueeze(0)), place)
    parts = [leaf(noise(i, 1, 1, s, D), place, torch.bfloat16) for i in range(3)]
    torch.cuda.reset_peak_memory_stats(place)
    before = torch.cuda.memory_allocated(place)
    document_attention(*parts, starts, slopes=[0.1]).sum().backward()
    assert torch.cuda.max_memory_allocated(place) - before < s * s // 4


def test_the_kernel_that_runs_is_flash_attention_for_many_lengths(place: torch.device, kind: str) -> None:
    if kind != "cuda":
        pytest.skip("a CPU goes by tiles")
    has_way(place, torch.bfloat16, 3 * SHORT, is_plain=True)
    ids = segments_of([700, 300, 5], 1100).unsqueeze(0)
    parts = [leaf(noise(i, 1, HEADS, 1100, D), place, torch.bfloat16) for i in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        document_attention(*parts, moved(document_starts(ids), place)).sum().backward()
    names = {event.name for event in profile.events() or []}
    assert any("flash_attention_forward" in name for name in names), sorted(names)
    assert any("flash_attention_backward" in name for name in names), sorted(names)
