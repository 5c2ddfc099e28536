"""Attention within documents by their lengths, forward and backward, against the formula with a mask written out."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.document_attention import SHORT, document_attention, document_starts, takes_documents
from tests.gpu.near import assert_near, leaf, moved, name_of, noise
from tests.helpers.documents import by_formula, segments_of

pytestmark = pytest.mark.gpu
D, HEADS = 64, 4
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
ROWS = ([1, 300, 20, 700, 256, 257], [513, 3, 3, 3], [5, 1, 100, 256], [2000], [1])
"""Lengths of documents, over and over, the last one cut off: long and short ones, one document, one token each."""
FORMS = {"plain": (HEADS, 0), "grouped": (2, 0), "window": (2, 300), "small window": (HEADS, 3)}


@pytest.fixture(autouse=True)
def _has_it(place: torch.device) -> None:
    if not takes_documents(torch.empty(0, dtype=torch.bfloat16, device=place), 3 * SHORT, D):
        pytest.skip("documents are kept apart by a mask on this device")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=name_of)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_piece", [False, True], ids=["", "a piece"])
def test_documents_by_length_are_the_formula(
    form: str, is_piece: bool, dtype: torch.dtype, place: torch.device, kind: str
) -> None:
    groups, window = FORMS[form]
    smaller = 1 if kind == "cuda" else 10
    s, first = 1100 // smaller, 333 // smaller if is_piece else 0
    ids = torch.stack([segments_of([-(-each // smaller) for each in lengths], s) for lengths in ROWS])
    parts = [noise(i, len(ids), heads, s, D, dtype=dtype) for i, heads in enumerate((HEADS, groups, groups))]
    factor = noise(7, len(ids), HEADS, s - first, D, dtype=dtype)
    query, key, value = (leaf(part, place, dtype) for part in parts)
    starts = moved(document_starts(ids), place)[:, first:]
    out = document_attention(query[:, :, first:], key, value, starts, first=first, window=window)
    out.backward(factor.to(place, dtype))
    found = {"output": out.detach(), "of query": query.grad, "of key": key.grad, "of value": value.grad}
    leaves = [leaf(part, torch.device("cpu"), torch.float64) for part in parts]
    whole = by_formula(*leaves, ids, window=window)[:, :, first:]
    whole.backward(factor.double())
    wanted = dict(zip(found, [whole.detach(), *[each.grad for each in leaves]], strict=True))
    assert_near(found, wanted, dtype)


def test_the_kernel_that_runs_is_flash_attention_for_many_lengths(place: torch.device, kind: str) -> None:
    if kind != "cuda":
        pytest.skip("a CPU goes by tiles")
    ids = segments_of([700, 300, 5], 1100).unsqueeze(0)
    parts = [leaf(noise(i, 1, HEADS, 1100, D), place, torch.bfloat16) for i in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        document_attention(*parts, moved(document_starts(ids), place)).sum().backward()
    names = {event.name for event in profile.events() or []}
    assert any("flash_attention_forward" in name for name in names), sorted(names)
    assert any("flash_attention_backward" in name for name in names), sorted(names)
