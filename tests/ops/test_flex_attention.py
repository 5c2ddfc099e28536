"""Documents by torch's flex_attention: its values on a CPU, where it has no backward, its blocks, and its graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron import torch_compat
from megatron.costs import decoder_cost
from megatron.models.common.attention import SelfAttention
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.ops import document_attention, flex_attention, plans
from megatron.ops.document_attention import document_starts, document_stops
from megatron.ops.flex_attention import BLOCK, flex_document_attention
from tests.helpers.documents import (
    SLOPES,
    draw_document_lengths,
    expand_block_mask,
    make_attention_inputs,
    max_difference,
    output_and_grads,
    reference_attention,
    reference_flex_attention,
    segment_ids_from_lengths,
)
from tests.ops.test_document_attention import FORMS, TOLERANCE, compile_to_graph, small_layer_fields

LENGTH = 300
"""Two blocks and a rest."""
SETTINGS_KWARGS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
ROWS = st.lists(draw_document_lengths(LENGTH, 290), min_size=1, max_size=2)
LONG_ROWS = [[260, 1, 30, 9], [3, 290]]
ALLOW_UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _more_graphs() -> Iterator[None]:
    """Torch compiles flex_attention for each shape even where it makes all scores."""
    with torch._dynamo.config.patch(recompile_limit=200, accumulated_recompile_limit=2000):
        yield


def make_segment_ids(lengths: list[list[int]], length: int = LENGTH) -> torch.Tensor:
    return torch.stack([segment_ids_from_lengths(document_lengths, length) for document_lengths in lengths])


def with_block_reference() -> Any:
    """Return within what the blocks alone are looked at, and gradients flow on a CPU."""
    return patch.object(flex_attention, "flexible_attention", reference_flex_attention)


@given(lengths=ROWS, length=st.sampled_from([1, BLOCK, LENGTH]), form=st.sampled_from(list(FORMS)))
@example(lengths=LONG_ROWS, length=LENGTH, form="plain")
@example(lengths=LONG_ROWS, length=LENGTH, form="window")
@example(lengths=LONG_ROWS, length=LENGTH, form="all")
@settings(max_examples=25, **SETTINGS_KWARGS)
def test_documents_match_mask_in_values_and_gradients(lengths: list[list[int]], length: int, form: str) -> None:
    ids, inputs = make_segment_ids(lengths, length), make_attention_inputs(len(lengths), length)
    with with_block_reference():
        actual = flex_document_attention(*inputs[:3], document_starts(ids), **FORMS[form])
    expected = reference_attention(*inputs[:3], ids, **FORMS[form])
    assert max_difference(output_and_grads(actual, inputs), output_and_grads(expected, inputs)) <= TOLERANCE


@given(
    lengths=ROWS,
    places=st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)),
    form=st.sampled_from(list(FORMS)),
)
@example(lengths=[[9, 160, 3, 40]], places=(30, 290), form="all")
@settings(max_examples=15, **SETTINGS_KWARGS)
def test_query_shard_attends_to_full_keys(lengths: list[list[int]], places: tuple[int, int], form: str) -> None:
    """As on a rank of context parallelism: a document may have begun on another one."""
    ids, (query, key, value, factor) = make_segment_ids(lengths), make_attention_inputs(len(lengths), LENGTH)
    first, stop = min(places), max(*places, min(places) + 1)
    starts, local_query = document_starts(ids)[:, first:stop], query[:, :, first:stop]
    with with_block_reference():
        actual = flex_document_attention(local_query, key, value, starts, first=first, **FORMS[form])
    expected = reference_attention(query, key, value, ids, **FORMS[form])[:, :, first:stop]
    local_inputs = [query, key, value, factor[:, :, first:stop]]
    assert max_difference(output_and_grads(actual, local_inputs), output_and_grads(expected, local_inputs)) <= TOLERANCE


@given(lengths=ROWS)
@example(lengths=LONG_ROWS)
@settings(max_examples=8, **SETTINGS_KWARGS)
def test_bidirectional_documents_match_mask(lengths: list[list[int]]) -> None:
    """As in padded samples of BERT, whose starts and stops are two rows of a tensor."""
    ids, inputs = make_segment_ids(lengths), make_attention_inputs(len(lengths), LENGTH)
    starts, stops = torch.stack((document_starts(ids), document_stops(document_starts(ids))))
    with with_block_reference():
        actual = flex_document_attention(*inputs[:3], starts, stops)
    expected = reference_attention(*inputs[:3], ids, is_causal=False)
    assert max_difference(output_and_grads(actual, inputs), output_and_grads(expected, inputs)) <= TOLERANCE


@ALLOW_UNCOMPILED
@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f == "all" else pytest.mark.slow) for f in FORMS])
@torch.no_grad()
def test_torch_flex_attention_matches_formula(form: str) -> None:
    ids, (query, key, value, _) = make_segment_ids(LONG_ROWS), make_attention_inputs(len(LONG_ROWS), LENGTH)
    for first in (0, 170):
        local_query, starts = query[:, :, first:], document_starts(ids)[:, first:]
        actual = flex_document_attention(local_query, key, value, starts, first=first, **FORMS[form])
        expected = reference_attention(query, key, value, ids, **FORMS[form])[:, :, first:]
        assert float((actual - expected).abs().max()) <= TOLERANCE


@given(lengths=st.lists(draw_document_lengths(900, 600), min_size=1, max_size=2), window=st.sampled_from([0, 5, 200]))
@example(lengths=[[900]], window=0)
@example(lengths=[[5, 700]], window=200)
@settings(max_examples=15, **SETTINGS_KWARGS)
def test_block_mask_covers_exactly_visible_keys(lengths: list[list[int]], window: int) -> None:
    """In the lists of forward and of backward, a block once; those whose keys all are seen are told from the others."""
    length = 7 * BLOCK
    ids = make_segment_ids(lengths, length)
    positions = torch.arange(length)
    distance = positions.unsqueeze(1) - positions
    for stops in (None, document_stops(document_starts(ids))):
        plan = flex_attention._plan(document_starts(ids), stops, length, 0, window)
        expected = (ids.unsqueeze(2) == ids.unsqueeze(1)) & ((distance <= window) if window else (distance <= length))
        expected = expected & (distance >= 0) if stops is None else expected
        assert expand_block_mask(plan.blocks)[:, 0].equal(expected) and expand_block_mask(plan.blocks, by_keys=True)[
            :, 0
        ].equal(expected)
        blocks = expected.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))
        counts = plan.blocks.kv_num_blocks + plan.blocks.full_kv_num_blocks
        assert plan.blocks.full_kv_num_blocks[:, 0].equal(blocks.all(4).all(2).sum(2).int())
        assert counts[:, 0].equal(blocks.any(4).any(2).sum(2).int()), "no block more than needed"


def test_plan_is_a_thousandth_of_mask_size() -> None:
    """Its lists have 4 (s / 128)^2 numbers, all else some of each token."""
    bytes_by_length = {}
    for length in (2048, 8192):
        plan = flex_attention._plan(document_starts(make_segment_ids([[700, 3, 1200]], length)), None, length, 0, 0)
        low, high = (cell.cell_contents for cell in plan.blocks.mask_mod.__closure__ or ())
        tensors = [x for x in plan.blocks.as_tuple() if isinstance(x, torch.Tensor)]
        assert len(tensors) == 8
        list_bytes, token_bytes = (
            sum(x.nbytes for x in tensor_group) for tensor_group in (tensors, (low, high, plan.positions))
        )
        assert token_bytes <= 12 * length
        bytes_by_length[length] = list_bytes
    assert bytes_by_length[8192] <= 8192**2 / 1000 and bytes_by_length[8192] <= 2 * 8 * 8192


def test_layers_share_plan_freed_with_micro_batch() -> None:
    ids, (query, key, value, _) = make_segment_ids(LONG_ROWS, BLOCK), make_attention_inputs(len(LONG_ROWS), BLOCK)
    num_plans = len(plans._plans)
    starts_and_stops = torch.stack((document_starts(ids), document_stops(document_starts(ids))))
    original_plan, calls = flex_attention._plan, []

    def recording_plan(*plan_args: Any) -> Any:
        calls.append(plan_args[2:])
        return original_plan(*plan_args)

    with with_block_reference(), patch.object(flex_attention, "_plan", recording_plan):
        for window in (0, 9, 0):
            flex_document_attention(query, key, value, *starts_and_stops, window=window)
            flex_document_attention(query, key, value, starts_and_stops[0], window=window)
        assert len(calls) == 4
        starts_and_stops[1].copy_(starts_and_stops[1].flip(1))
        flex_document_attention(query, key, value, starts_and_stops[0])
        assert len(calls) == 5 and len(plans._plans) == num_plans + 1
        for _ in range(2):
            flex_document_attention(query, key, value, starts_and_stops[0], starts_and_stops[1].clone())
        assert len(calls) == 7 and len(plans._plans) == num_plans + 1, "stops of their own are not kept track of"
    del starts_and_stops
    assert len(plans._plans) == num_plans


@pytest.mark.slow  # the graph itself is compared below, a compiled layer in test_document_attention.py
@torch.no_grad()
def test_compiled_layer_is_one_graph_with_flex_attention() -> None:
    fields = {**small_layer_fields(LENGTH), "position_embedding_type": "alibi", "attn_logit_softcapping": 2.0}
    layer = SelfAttention(ModelArgs(**fields, num_query_groups=1), ParallelContext(), 0)
    layer.document_function = partial(flex_document_attention, **layer.document_function.keywords)  # type: ignore[attr-defined]
    code = compile_to_graph(layer, torch.ones(LENGTH, 1, 16), document_starts(make_segment_ids([[3, 50]])))
    assert "torch.ops.higher_order.flex_attention" in code or "flex_attention(" in code
    starts_and_stops = torch.stack(
        (document_starts(make_segment_ids(LONG_ROWS)), document_stops(document_starts(make_segment_ids(LONG_ROWS))))
    )
    key = torch.ones(2, 2, LENGTH, 8)
    assert "flex_attention" in compile_to_graph(
        lambda x, starts_and_stops: flex_document_attention(x, key, key, *starts_and_stops), key, starts_and_stops
    )


@torch.no_grad()
def test_micro_batches_share_one_graph_per_shape() -> None:
    torch._dynamo.reset()
    graphs = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch_compat.compiled_flex_attention(record)
    with patch.object(flex_attention, "flexible_attention", compiled):
        for lengths, length, window, first in (
            ([3, 20], 130, 0, 0), ([7, 100], 130, 0, 0), ([9], 130, 5, 0), ([9], 130, 0, 1), ([9], 300, 0, 0)
        ):  # fmt: skip
            (query, key, value, _), starts = (
                make_attention_inputs(1, length),
                document_starts(make_segment_ids([lengths], length)),
            )
            actual = flex_document_attention(
                query[:, :, first:], key, value, starts[:, first:], first=first, window=window, slopes=SLOPES
            )
            expected = reference_attention(
                query, key, value, make_segment_ids([lengths], length), window=window, slopes=SLOPES
            )
            assert float((actual - expected[:, :, first:]).abs().max()) <= TOLERANCE
    assert len(graphs) == 2, "one for each shape, in whole blocks"


def test_recompile_limit_prefers_flex_attention_option() -> None:
    def old_compile(function: Any, *, backend: Any, dynamic: bool, fullgraph: bool) -> str:
        assert not dynamic and fullgraph
        return "compiled"

    compile_flex = torch_compat.compiled_flex_attention.__wrapped__
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_flex("eager")
        assert torch._dynamo.config.recompile_limit == 8
        with patch.object(torch, "compile", old_compile):
            assert compile_flex("eager") == "compiled"
        assert torch._dynamo.config.recompile_limit == torch_compat.MAX_GRAPHS


@pytest.mark.parametrize(
    ("dtype", "length", "head_size", "is_plain", "expected_path"),
    [
        (torch.bfloat16, 2048, 64, True, "FlashAttention"),
        (torch.bfloat16, 2048, 64, False, "flex_attention"),
        (torch.bfloat16, 512, 64, True, "flex_attention"),
        (torch.bfloat16, 2048, 20, True, "flex_attention"),
        (torch.float32, 2048, 64, True, "flex_attention"),
        (torch.float64, 2048, 64, True, None),
        (torch.float32, 2048, 8, True, None),
        (torch.float32, 2048, 512, True, None),
    ],
)
def test_cases_without_flash_attention_use_blocks_with_triton(
    dtype: torch.dtype, length: int, head_size: int, is_plain: bool, expected_path: str | None
) -> None:
    x = torch.empty(0, dtype=dtype, device="meta")

    def has_flash(query_dtype: torch.dtype, *_: Any) -> bool:
        return query_dtype in (torch.bfloat16, torch.float16)

    with patch.multiple(document_attention, DEVICE_TYPE="meta", _has_flash=has_flash, has_triton=lambda: True):
        assert document_attention.select_implementation(x, length, head_size, is_plain=is_plain) == expected_path
        with patch.object(document_attention, "has_triton", lambda: False):
            path_without_triton = document_attention.select_implementation(x, length, head_size, is_plain=is_plain)
    assert path_without_triton == (expected_path if expected_path == "FlashAttention" else None)
    assert (flex_attention.MIN_HEAD_SIZE, flex_attention.MAX_HEAD_SIZE) == decoder_cost.FLEX_HEAD_SIZES, (
        "planning knows it"
    )
    assert document_attention.select_implementation(x, length, head_size, is_plain=is_plain) is None, (
        "a device without kernels"
    )
