"""Attention within documents by where they begin equals attention with a mask, in fp64, and needs no s x s memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from megatron import torch_compat
from megatron.costs import decoder_cost
from megatron.models.common.attention import SelfAttention
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.ops import causal_attention, document_attention, plans
from megatron.ops.causal_attention import causal_self_attention
from megatron.ops.document_attention import document_starts, document_stops, varlen_document_attention
from tests.helpers.documents import (
    HEAD_DIM,
    SLOPES,
    draw_document_lengths,
    make_attention_inputs,
    max_difference,
    output_and_grads,
    reference_attention,
    reference_varlen_attention,
    segment_ids_from_lengths,
)

TOLERANCE = 1e-12
POISONED_SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 5}, "cap": {"cap": 2.0}, "ALiBi": {"slopes": SLOPES}, "scale": {"scale": 0.7},
    "all": {"window": 70, "cap": 3.0, "slopes": SLOPES, "scale": 0.5},
}  # fmt: skip
ROWS = st.lists(draw_document_lengths(150, 100), min_size=1, max_size=3)


@pytest.mark.usefixtures("poisoned_memory")
@given(lengths=ROWS, length=st.sampled_from([1, 7, 64, 150]), form=st.sampled_from(list(FORMS)))
@example(lengths=[[1, 70, 5, 3, 90], [100, 1]], length=150, form="all")
@example(lengths=[[1, 70, 5, 3, 90], [100, 1]], length=150, form="window")
@settings(max_examples=40, **POISONED_SETTINGS)
def test_documents_match_mask_in_values_and_gradients(lengths: list[list[int]], length: int, form: str) -> None:
    ids, inputs = (
        torch.stack([segment_ids_from_lengths(document_lengths, length) for document_lengths in lengths]),
        make_attention_inputs(len(lengths), length),
    )
    actual = document_attention.document_attention(*inputs[:3], document_starts(ids), **FORMS[form])
    expected = reference_attention(*inputs[:3], ids, **FORMS[form])
    assert max_difference(output_and_grads(actual, inputs), output_and_grads(expected, inputs)) <= TOLERANCE


@pytest.mark.parametrize("value_size", [HEAD_DIM - 3, HEAD_DIM + 2])
def test_values_may_have_another_size_than_keys(value_size: int) -> None:
    """Zeros that pad the smaller heads change neither the output nor the gradients of the other elements."""
    ids = torch.stack([segment_ids_from_lengths(lengths, 150) for lengths in ([1, 70, 5, 3, 90], [100, 60])])
    query, key, _, _ = make_attention_inputs(2, 150)
    value = torch.randn(*key.shape[:3], value_size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    results = []
    for size in (0, max(value_size, HEAD_DIM)):
        inputs = [
            torch.nn.functional.pad(x.detach(), (0, max(size - x.shape[-1], 0))).requires_grad_()
            for x in (query, key, value)
        ]
        output = document_attention.document_attention(*inputs, document_starts(ids), scale=0.4, cap=2.0, window=70)
        output[..., :value_size].sin().sum().backward()
        grads = [x.grad[..., :length] for x, length in zip(inputs, (HEAD_DIM, HEAD_DIM, value_size), strict=True)]
        results.append([output.detach()[..., :value_size], *grads])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= TOLERANCE


@given(
    lengths=ROWS, places=st.tuples(st.integers(0, 149), st.integers(1, 150)), form=st.sampled_from(list(FORMS)),
    by_length=st.booleans(),
)  # fmt: skip
@example(lengths=[[9, 60, 3, 40]], places=(30, 140), form="plain", by_length=True)
@example(lengths=[[9, 60, 3, 40]], places=(30, 140), form="all", by_length=False)
@settings(max_examples=25, deadline=None)
def test_query_shard_attends_to_full_keys(
    lengths: list[list[int]], places: tuple[int, int], form: str, by_length: bool
) -> None:
    """As on a rank of context parallelism: a document may have begun on another one."""
    ids, inputs = (
        torch.stack([segment_ids_from_lengths(document_lengths, 150) for document_lengths in lengths]),
        make_attention_inputs(len(lengths), 150),
    )
    first, stop = min(places), max(*places, min(places) + 1)
    query, key, value, factor = inputs
    local_query, starts = query[:, :, first:stop], document_starts(ids)[:, first:stop]
    form_kwargs = FORMS[form]
    if by_length and form_kwargs.keys() <= {"window"}:
        with cuda_path(4):
            actual = varlen_document_attention(
                local_query, key, value, starts, first=first, window=form_kwargs.get("window", 0), scale=0.3
            )
        form_kwargs = {**form_kwargs, "scale": 0.3}
    else:
        actual = document_attention.document_attention(local_query, key, value, starts, first=first, **form_kwargs)
    expected = reference_attention(query, key, value, ids, **form_kwargs)[:, :, first:stop]
    local_inputs = [query, key, value, factor[:, :, first:stop]]
    assert max_difference(output_and_grads(actual, local_inputs), output_and_grads(expected, local_inputs)) <= TOLERANCE


def test_head_blocks_use_their_slopes() -> None:
    ids, inputs = segment_ids_from_lengths([50, 3], 150).expand(2, -1), make_attention_inputs(2, 150)
    with patch.object(document_attention, "CACHED_SCORES", 1):
        actual = document_attention.document_attention(*inputs[:3], document_starts(ids), slopes=SLOPES)
        grads = output_and_grads(actual, inputs)
    assert (
        max_difference(grads, output_and_grads(reference_attention(*inputs[:3], ids, slopes=SLOPES), inputs))
        <= TOLERANCE
    )


def cuda_path(short_limit: int) -> Any:
    """Return a patch that runs the CUDA path on this device, with windows for documents up to ``short_limit``."""
    return patch.multiple(
        document_attention,
        varlen_attention=reference_varlen_attention,
        SHORT=short_limit,
        MAX_RUN_TOKENS=4 * short_limit,
    )


@given(
    lengths=st.lists(draw_document_lengths(60, 40), min_size=1, max_size=3), length=st.sampled_from([1, 5, 60]),
    short=st.sampled_from([1, 4, 16]), window=st.sampled_from([0, 3, 20]),
)  # fmt: skip
@example(lengths=[[1, 7, 3, 8, 5, 1, 1, 4], [9, 12, 30]], length=60, short=4, window=0)
@example(lengths=[[1, 7, 3, 8, 5, 1, 1, 4], [9, 12, 30]], length=60, short=16, window=3)
@settings(max_examples=30, deadline=None)
def test_cuda_path_matches_mask_in_values_and_gradients(
    lengths: list[list[int]], length: int, short: int, window: int
) -> None:
    ids, inputs = (
        torch.stack([segment_ids_from_lengths(document_lengths, length) for document_lengths in lengths]),
        make_attention_inputs(len(lengths), length),
    )
    with cuda_path(short):
        actual = varlen_document_attention(
            *inputs[:3], document_starts(ids), first=0, window=window, scale=HEAD_DIM**-0.5
        )
    expected = reference_attention(*inputs[:3], ids, window=window)
    assert max_difference(output_and_grads(actual, inputs), output_and_grads(expected, inputs)) <= TOLERANCE


def test_layers_share_plan_per_micro_batch() -> None:
    starts, other_starts = (
        document_starts(segment_ids_from_lengths(lengths, 40).unsqueeze(0)) for lengths in ([3, 20], [7, 9])
    )
    with cuda_path(4), patch.object(document_attention, "_plan", wraps=document_attention._plan) as plan_fn:
        get_plan = partial(plans.get_plan, plan_fn)
        for case_starts, window in ((starts, 0), (starts, 0), (starts, 5), (other_starts, 0), (starts, 0), (starts, 5)):
            actual = get_plan(case_starts, None, 40, 0, window)
        assert plan_fn.call_count == 3
        for view in (starts[:, :20], starts[:, 20:], starts[:, 20:], starts[:, :20]):  # a view of each layer
            get_plan(view, None, 40, 0, 0)
        assert plan_fn.call_count == 5
        starts.copy_(other_starts)
        assert get_plan(starts, None, 40, 0, 5).cu_query.ne(actual.cu_query).any(), "they were overwritten"


def test_plan_is_freed_with_its_micro_batch() -> None:
    starts = document_starts(segment_ids_from_lengths([3, 20], 40).unsqueeze(0))
    before = len(plans._plans)
    plans.get_plan(document_attention._plan, starts, None, 40, 0, 0)
    assert len(plans._plans) == before + 1
    del starts
    assert len(plans._plans) == before


def test_cu_seqlens_have_constant_small_size() -> None:
    length, numels = 8192, set()
    for lengths in ([1], [300, 1], [257], [length], [256, 257]):
        starts = document_starts(segment_ids_from_lengths(lengths, length).expand(2, -1))
        positions = torch.arange(length, dtype=torch.int32)
        is_short = document_stops(starts) - starts <= document_attention.SHORT
        cu_seqlens = document_attention.cumulative_lengths(starts, is_short, positions, length)
        numels |= {len(tensor) for tensor in cu_seqlens}
    assert len(numels) == 1 and max(numels) < 2 * length // 64


@given(lengths=ROWS, length=st.sampled_from([1, 40, 150]))
@settings(max_examples=15, deadline=None)
def test_bidirectional_documents_match_mask(lengths: list[list[int]], length: int) -> None:
    ids, inputs = (
        torch.stack([segment_ids_from_lengths(document_lengths, length) for document_lengths in lengths]),
        make_attention_inputs(len(lengths), length),
    )
    starts = document_starts(ids)
    actual = document_attention.document_attention(*inputs[:3], starts, document_stops(starts))
    expected = reference_attention(*inputs[:3], ids, is_causal=False)
    assert max_difference(output_and_grads(actual, inputs), output_and_grads(expected, inputs)) <= TOLERANCE


@given(lengths=ROWS)
@settings(max_examples=50, deadline=None)
def test_starts_and_stops_match_documents(lengths: list[list[int]]) -> None:
    ids = torch.stack([segment_ids_from_lengths(document_lengths, 150) for document_lengths in lengths])
    starts, stops = document_starts(ids), document_stops(document_starts(ids))
    is_same_document = ids.unsqueeze(2) == ids.unsqueeze(1)
    assert starts.dtype == stops.dtype == torch.int32
    assert starts.equal(is_same_document.int().argmax(2).int()) and (stops - starts).equal(
        is_same_document.sum(2).int()
    )


@pytest.mark.skipif(not causal_attention.is_built(), reason="needs a C++ compiler")
@pytest.mark.usefixtures("poisoned_memory")
@given(lengths=ROWS, length=st.sampled_from([1, 7, 64, 150]))
@example(lengths=[[1, 70, 5, 3, 90], [100, 1]], length=150)
@settings(max_examples=25, **POISONED_SETTINGS)
def test_fp32_kernel_separates_documents(lengths: list[list[int]], length: int) -> None:
    ids = torch.stack([segment_ids_from_lengths(document_lengths, length) for document_lengths in lengths])
    starts, generator = document_starts(ids), torch.Generator().manual_seed(0)
    packed = torch.randn(length, len(ids), 3, 3, 20, dtype=torch.float64, generator=generator)
    factor = torch.randn(len(ids), 3, length, 20, generator=generator)
    results = []
    for x in (packed.float().requires_grad_(), packed.requires_grad_()):
        context = causal_self_attention(x, starts)
        results.append([context, *torch.autograd.grad((context * factor).sum(), [x])])
    assert max_difference(*results) <= 1e-5


@pytest.mark.skipif(not causal_attention.is_built(), reason="needs a C++ compiler")
def test_single_document_is_bitwise_equal_to_none() -> None:
    packed = torch.randn(150, 2, 3, 3, 20, generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(2, 150, dtype=torch.int32)
    assert causal_self_attention(packed, starts).equal(causal_self_attention(packed))


def compile_to_graph(function: Callable[..., Any], *inputs: Any) -> str:
    """Return the one graph that ``function`` is compiled to; it is not run."""
    graphs: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return lambda *_: [torch.zeros(())]

    torch._dynamo.reset()
    torch.compile(function, backend=record, fullgraph=True, dynamic=False)(*inputs)
    (code,) = graphs
    return code


def test_compiled_layer_is_one_graph_on_both_devices() -> None:
    starts = document_starts(segment_ids_from_lengths([3, 50], 70).unsqueeze(0))
    fields = {**small_layer_fields(70), "position_embedding_type": "alibi", "num_query_groups": 1}
    layer = SelfAttention(ModelArgs(**fields), ParallelContext(), 0)
    assert "megatron_tds.document_attention" in compile_to_graph(layer, torch.ones(70, 1, 16), starts)
    query, key = torch.ones(1, 4, 70, 8), torch.ones(1, 2, 70, 8)
    on_cuda = partial(varlen_document_attention, first=0, window=0, scale=0.3)
    assert "_varlen_attn" in compile_to_graph(on_cuda, query, key, key, starts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_attention_uses_fp32_softmax(dtype: torch.dtype) -> None:
    ids = segment_ids_from_lengths([30, 1, 40], 100).unsqueeze(0)
    inputs = [x.detach().to(dtype) for x in make_attention_inputs(1, 100)]
    actual = document_attention.document_attention(*inputs[:3], document_starts(ids), slopes=SLOPES)
    expected = reference_attention(*[x.double() for x in inputs[:3]], ids, slopes=SLOPES)
    assert actual.dtype == dtype and (actual.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps


def test_operator_passes_opcheck() -> None:
    inputs, starts = make_attention_inputs(1, 70), document_starts(segment_ids_from_lengths([3, 50], 70).unsqueeze(0))
    torch.library.opcheck(
        torch.ops.megatron_tds.document_attention.default,
        (*inputs[:3], starts, None, SLOPES, 0, 9, 0.3, 2.0, None),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that are in memory at once while ``run`` works, beside what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    current = peak = 0
    for event in prof.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


def small_layer_fields(length: int) -> dict[str, Any]:
    """Return the sizes of a layer of two heads."""
    return {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8,
        "max_position_embeddings": length, "kv_hidden_size": 8, "ff_hidden_size": 8,
    }  # fmt: skip


def layer_bytes(length: int, lengths: list[int], **changes: Any) -> int:
    """Return ``peak_bytes`` of a step of one layer of attention with documents of ``lengths``."""
    args = ModelArgs(**small_layer_fields(length), **changes)
    layer, masks = SelfAttention(args, ParallelContext(), 0).eval(), Masks(args, ParallelContext())
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    x, ids = torch.ones(length, 1, 16, requires_grad=True), segment_ids_from_lengths(lengths, length).unsqueeze(0)
    return peak_bytes(lambda: layer(x, masks.get_mask(x, ids)).sum().backward())


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"num_query_groups": 1, "position_embedding_type": "alibi"}],
    ids=["kernel", "tiles"],
)
def test_memory_grows_linearly_with_length(changes: dict[str, Any]) -> None:
    short_bytes, long_bytes = (layer_bytes(length, [700, 3, 1200], **changes) for length in (2048, 8192))
    assert long_bytes / short_bytes < 4.5 and long_bytes < 8192**2 / 4
    masked_bytes = layer_bytes(2048, [700], attention_dropout=0.1, **changes)
    assert masked_bytes > 2048**2 and masked_bytes > 3 * short_bytes, "a mask is seen by this count"


def test_keys_are_repeated_without_torch_gqa_support() -> None:
    """Torch 2.11; with the groups in the call from 2.12 on."""
    calls: list[tuple[int, dict[str, Any]]] = []

    def varlen_attn(query: Any, key: torch.Tensor, value: Any, *lengths: Any, **kwargs: Any) -> None:
        calls.append((key.shape[1], kwargs))

    query, key = torch.ones(6, 4, 8), torch.ones(6, 2, 8)
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    assert torch_compat.HAS_GROUPS
    for has_groups in (True, False):
        with (
            patch("torch.nn.attention.varlen.varlen_attn", varlen_attn),
            patch.object(torch_compat, "HAS_GROUPS", has_groups),
        ):
            torch_compat.varlen_attention(query, key, key, cu_seqlens, cu_seqlens, 6, 6, scale=0.5, window=3)
    assert calls == [
        (2, {"enable_gqa": True, "scale": 0.5, "window_size": (3, 0)}),
        (4, {"scale": 0.5, "window_size": (3, 0)}),
    ]


def test_planner_and_cuda_path_use_same_minimum_length() -> None:
    assert decoder_cost.MIN_VARLEN_LENGTH == 2 * document_attention.SHORT
