"""Attention within documents by their lengths, forward and backward, against the formula with a mask written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.ops.document_attention import (
    FLEX,
    SHORT,
    document_attention,
    document_starts,
    document_stops,
    select_implementation,
)
from tests.gpu.near import assert_near, make_leaf, name_of, random_values, to_device
from tests.helpers.documents import SLOPES, reference_attention, segment_ids_from_lengths

pytestmark = pytest.mark.gpu
D, HEADS = 64, 4
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
ROWS = ([1, 300, 20, 700, 256, 257], [513, 3, 3, 3], [5, 1, 100, 256], [2000], [1])
"""Lengths of documents, over and over, the last one cut off: long and short ones, one document, one token each."""
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (HEADS, {}), "grouped": (2, {}), "window": (2, {"window": 300}), "small window": (HEADS, {"window": 3}),
    "ALiBi": (HEADS, {"slopes": SLOPES}), "cap": (2, {"cap": 2.0}),
    "all": (2, {"window": 300, "cap": 3.0, "slopes": SLOPES, "scale": 0.2}),
}  # fmt: skip
"""Name -> heads of keys, and what attention has beside."""


def skip_if_masked(
    torch_device: torch.device, dtype: torch.dtype, length: int, *, is_plain: bool, head_size: int = D
) -> None:
    """Skip a test on a device that keeps such documents apart by a mask."""
    if (
        select_implementation(torch.empty(0, dtype=dtype, device=torch_device), length, head_size, is_plain=is_plain)
        is None
    ):
        pytest.skip("documents are kept apart by a mask on this device")


def compare(
    ids: torch.Tensor, torch_device: torch.device, dtype: torch.dtype, groups: int, options: dict[str, Any],
    first_query: int = 0,
    is_causal: bool = True, head_size: int = D,
) -> None:  # fmt: skip
    """Compare values and gradients of the queries from ``first_query`` on with those of the formula in fp64."""
    b, s = ids.shape
    inputs = [random_values(i, b, heads, s, head_size, dtype=dtype) for i, heads in enumerate((HEADS, groups, groups))]
    factor = random_values(7, b, HEADS, s - first_query, head_size, dtype=dtype)
    query, key, value = (make_leaf(tensor, torch_device, dtype) for tensor in inputs)
    starts = document_starts(ids)
    ends = torch.stack((starts, document_stops(starts))).to(torch_device)[:, :, first_query:]
    boundaries = ends[:1] if is_causal else ends
    out = document_attention(query[:, :, first_query:], key, value, *boundaries, first=first_query, **options)
    out.backward(factor.to(torch_device, dtype))
    actual = {"output": out.detach(), "of query": query.grad, "of key": key.grad, "of value": value.grad}
    leaves = [make_leaf(tensor, torch.device("cpu"), torch.float64) for tensor in inputs]
    output = reference_attention(*leaves, ids, is_causal=is_causal, **options)[:, :, first_query:]
    output.backward(factor.double())
    assert_near(
        actual, dict(zip(actual, [output.detach(), *[leaf_tensor.grad for leaf_tensor in leaves]], strict=True)), dtype
    )


def make_segment_ids(length: int, divisor: int) -> torch.Tensor:
    return torch.stack(
        [
            segment_ids_from_lengths([-(-document_length // divisor) for document_length in lengths], length)
            for lengths in ROWS
        ]
    )


@pytest.mark.parametrize("dtype", (*SIXTEEN_BITS, torch.float32), ids=name_of)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_slice", [False, True], ids=["", "a piece"])
def test_document_attention_matches_formula(
    variant: str, is_slice: bool, dtype: torch.dtype, torch_device: torch.device, device_type: str
) -> None:
    groups, options = VARIANTS[variant]
    divisor = 1 if device_type == "cuda" else 10
    s, first_query = 1100 // divisor, 333 // divisor if is_slice else 0
    skip_if_masked(torch_device, dtype, s, is_plain=options.keys() <= {"window"})
    compare(make_segment_ids(s, divisor), torch_device, dtype, groups, options, first_query)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
@pytest.mark.parametrize(("length", "head_size"), [(64, 64), (128, 16), (384, 80), (512, 128), (300, 256)])
def test_short_sequences_and_other_head_sizes_match_formula(
    length: int, head_size: int, dtype: torch.dtype, torch_device: torch.device, device_type: str
) -> None:
    skip_if_masked(torch_device, dtype, length, is_plain=True, head_size=head_size)
    compare(make_segment_ids(length, 10), torch_device, dtype, 2, {}, head_size=head_size)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
def test_bidirectional_document_attention_matches_formula(
    dtype: torch.dtype, torch_device: torch.device, device_type: str
) -> None:
    """As in padded samples of BERT."""
    divisor = 1 if device_type == "cuda" else 10
    skip_if_masked(torch_device, dtype, 1100 // divisor, is_plain=False)
    compare(make_segment_ids(1100 // divisor, divisor), torch_device, dtype, HEADS, {}, is_causal=False)


def test_blocks_are_computed_without_score_matrix(torch_device: torch.device, device_type: str) -> None:
    """By what a step of ALiBi takes on CUDA, where a matrix of scores would be 1 GiB."""
    s = 16384
    x = torch.empty(0, dtype=torch.bfloat16, device=torch_device)
    if device_type != "cuda" or select_implementation(x, s, D, is_plain=False) != FLEX:
        pytest.skip("no flex_attention here")
    starts = to_device(document_starts(segment_ids_from_lengths([3000, 7], s).unsqueeze(0)), torch_device)
    inputs = [make_leaf(random_values(i, 1, 1, s, D), torch_device, torch.bfloat16) for i in range(3)]
    torch.cuda.reset_peak_memory_stats(torch_device)
    bytes_before = torch.cuda.memory_allocated(torch_device)
    document_attention(*inputs, starts, slopes=[0.1]).sum().backward()
    assert torch.cuda.max_memory_allocated(torch_device) - bytes_before < s * s // 4


def test_many_lengths_run_flash_attention_kernel(torch_device: torch.device, device_type: str) -> None:
    if device_type != "cuda":
        pytest.skip("a CPU goes by tiles")
    skip_if_masked(torch_device, torch.bfloat16, 3 * SHORT, is_plain=True)
    ids = segment_ids_from_lengths([700, 300, 5], 1100).unsqueeze(0)
    inputs = [make_leaf(random_values(i, 1, HEADS, 1100, D), torch_device, torch.bfloat16) for i in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        document_attention(*inputs, to_device(document_starts(ids), torch_device)).sum().backward()
    names = {event.name for event in profile.events() or []}
    assert any("flash_attention_forward" in name for name in names), sorted(names)
    assert any("flash_attention_backward" in name for name in names), sorted(names)
