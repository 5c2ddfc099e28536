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
from megatron.ops.document_attention import attention_by_length, document_starts, document_stops
from tests.helpers.documents import (
    SIZE,
    SLOPES,
    by_formula,
    by_sequence,
    gradients,
    inputs_of,
    lengths_of,
    segments_of,
    worst,
)

NEAR = 1e-12
POISONED = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 5}, "cap": {"cap": 2.0}, "ALiBi": {"slopes": SLOPES}, "scale": {"scale": 0.7},
    "all": {"window": 70, "cap": 3.0, "slopes": SLOPES, "scale": 0.5},
}  # fmt: skip
ROWS = st.lists(lengths_of(150, 100), min_size=1, max_size=3)


@pytest.mark.usefixtures("poisoned_memory")
@given(lengths=ROWS, length=st.sampled_from([1, 7, 64, 150]), form=st.sampled_from(list(FORMS)))
@example(lengths=[[1, 70, 5, 3, 90], [100, 1]], length=150, form="all")
@example(lengths=[[1, 70, 5, 3, 90], [100, 1]], length=150, form="window")
@settings(max_examples=40, **POISONED)
def test_documents_of_any_lengths_equal_a_mask_in_values_and_gradients(
    lengths: list[list[int]], length: int, form: str
) -> None:
    ids, inputs = torch.stack([segments_of(each, length) for each in lengths]), inputs_of(len(lengths), length)
    found = document_attention.document_attention(*inputs[:3], document_starts(ids), **FORMS[form])
    wanted = by_formula(*inputs[:3], ids, **FORMS[form])
    assert worst(gradients(found, inputs), gradients(wanted, inputs)) <= NEAR


@given(
    lengths=ROWS, places=st.tuples(st.integers(0, 149), st.integers(1, 150)), form=st.sampled_from(list(FORMS)),
    by_length=st.booleans(),
)  # fmt: skip
@example(lengths=[[9, 60, 3, 40]], places=(30, 140), form="plain", by_length=True)
@example(lengths=[[9, 60, 3, 40]], places=(30, 140), form="all", by_length=False)
@settings(max_examples=25, deadline=None)
def test_queries_of_a_piece_see_the_keys_of_the_whole(
    lengths: list[list[int]], places: tuple[int, int], form: str, by_length: bool
) -> None:
    """As on a rank of context parallelism: a document may have begun on another one."""
    ids, inputs = torch.stack([segments_of(each, 150) for each in lengths]), inputs_of(len(lengths), 150)
    first, stop = min(places), max(*places, min(places) + 1)
    query, key, value, factor = inputs
    piece, starts = query[:, :, first:stop], document_starts(ids)[:, first:stop]
    how = FORMS[form]
    if by_length and how.keys() <= {"window"}:
        with on_a_device(4):
            found = attention_by_length(piece, key, value, starts, first=first, window=how.get("window", 0), scale=0.3)
        how = {**how, "scale": 0.3}
    else:
        found = document_attention.document_attention(piece, key, value, starts, first=first, **how)
    wanted = by_formula(query, key, value, ids, **how)[:, :, first:stop]
    own = [query, key, value, factor[:, :, first:stop]]
    assert worst(gradients(found, own), gradients(wanted, own)) <= NEAR


def test_heads_in_turns_have_their_own_slopes() -> None:
    ids, inputs = segments_of([50, 3], 150).expand(2, -1), inputs_of(2, 150)
    with patch.object(document_attention, "CACHED", 1):
        found = document_attention.document_attention(*inputs[:3], document_starts(ids), slopes=SLOPES)
        made = gradients(found, inputs)
    assert worst(made, gradients(by_formula(*inputs[:3], ids, slopes=SLOPES), inputs)) <= NEAR


def on_a_device(short: int) -> Any:
    """Return within what the way of CUDA goes sequence by sequence, with documents of at most ``short`` by windows."""
    return patch.multiple(document_attention, varlen_attention=by_sequence, SHORT=short, CUT=4 * short)


@given(
    lengths=st.lists(lengths_of(60, 40), min_size=1, max_size=3), length=st.sampled_from([1, 5, 60]),
    short=st.sampled_from([1, 4, 16]), window=st.sampled_from([0, 3, 20]),
)  # fmt: skip
@example(lengths=[[1, 7, 3, 8, 5, 1, 1, 4], [9, 12, 30]], length=60, short=4, window=0)
@example(lengths=[[1, 7, 3, 8, 5, 1, 1, 4], [9, 12, 30]], length=60, short=16, window=3)
@settings(max_examples=30, deadline=None)
def test_the_way_of_cuda_equals_a_mask_in_values_and_gradients(
    lengths: list[list[int]], length: int, short: int, window: int
) -> None:
    ids, inputs = torch.stack([segments_of(each, length) for each in lengths]), inputs_of(len(lengths), length)
    with on_a_device(short):
        found = attention_by_length(*inputs[:3], document_starts(ids), first=0, window=window, scale=SIZE**-0.5)
    wanted = by_formula(*inputs[:3], ids, window=window)
    assert worst(gradients(found, inputs), gradients(wanted, inputs)) <= NEAR


def test_layers_share_the_plan_of_a_micro_batch_and_the_next_one_has_its_own() -> None:
    starts, other = (document_starts(segments_of(lengths, 40).unsqueeze(0)) for lengths in ([3, 20], [7, 9]))
    with on_a_device(4), patch.object(document_attention, "_plan", wraps=document_attention._plan) as making:
        of = partial(plans.plan_of, making)
        for given_, window in ((starts, 0), (starts, 0), (starts, 5), (other, 0), (starts, 0), (starts, 5)):
            found = of(given_, None, 40, 0, window)
        assert making.call_count == 3
        for piece in (starts[:, :20], starts[:, 20:], starts[:, 20:], starts[:, :20]):  # a view of each layer
            of(piece, None, 40, 0, 0)
        assert making.call_count == 5
        starts.copy_(other)
        assert of(starts, None, 40, 0, 5).cu_query.ne(found.cu_query).any(), "they were overwritten"


def test_a_plan_is_gone_with_its_micro_batch() -> None:
    starts = document_starts(segments_of([3, 20], 40).unsqueeze(0))
    before = len(plans._plans)
    plans.plan_of(document_attention._plan, starts, None, 40, 0, 0)
    assert len(plans._plans) == before + 1
    del starts
    assert len(plans._plans) == before


def test_cu_seqlens_have_one_size_for_all_documents_and_hold_few_sequences() -> None:
    length, sizes = 8192, set()
    for lengths in ([1], [300, 1], [257], [length], [256, 257]):
        starts = document_starts(segments_of(lengths, length).expand(2, -1))
        positions = torch.arange(length, dtype=torch.int32)
        is_short = document_stops(starts) - starts <= document_attention.SHORT
        made = document_attention.cumulative_lengths(starts, is_short, positions, length)
        sizes |= {len(each) for each in made}
    assert len(sizes) == 1 and max(sizes) < 2 * length // 64


@given(lengths=ROWS, length=st.sampled_from([1, 40, 150]))
@settings(max_examples=15, deadline=None)
def test_both_directions_within_documents_equal_a_mask(lengths: list[list[int]], length: int) -> None:
    ids, inputs = torch.stack([segments_of(each, length) for each in lengths]), inputs_of(len(lengths), length)
    starts = document_starts(ids)
    found = document_attention.document_attention(*inputs[:3], starts, document_stops(starts))
    wanted = by_formula(*inputs[:3], ids, is_causal=False)
    assert worst(gradients(found, inputs), gradients(wanted, inputs)) <= NEAR


@given(lengths=ROWS)
@settings(max_examples=50, deadline=None)
def test_starts_and_stops_are_those_of_the_documents(lengths: list[list[int]]) -> None:
    ids = torch.stack([segments_of(each, 150) for each in lengths])
    starts, stops = document_starts(ids), document_stops(document_starts(ids))
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    assert starts.dtype == stops.dtype == torch.int32
    assert starts.equal(same.int().argmax(2).int()) and (stops - starts).equal(same.sum(2).int())


@pytest.mark.skipif(not causal_attention.is_built(), reason="needs a C++ compiler")
@pytest.mark.usefixtures("poisoned_memory")
@given(lengths=ROWS, length=st.sampled_from([1, 7, 64, 150]))
@example(lengths=[[1, 70, 5, 3, 90], [100, 1]], length=150)
@settings(max_examples=25, **POISONED)
def test_the_kernel_in_fp32_keeps_documents_apart(lengths: list[list[int]], length: int) -> None:
    ids = torch.stack([segments_of(each, length) for each in lengths])
    starts, generator = document_starts(ids), torch.Generator().manual_seed(0)
    packed = torch.randn(length, len(ids), 3, 3, 20, dtype=torch.float64, generator=generator)
    factor = torch.randn(len(ids), 3, length, 20, generator=generator)
    found = []
    for given_ in (packed.float().requires_grad_(), packed.requires_grad_()):
        context = causal_self_attention(given_, starts)
        found.append([context, *torch.autograd.grad((context * factor).sum(), [given_])])
    assert worst(*found) <= 1e-5


@pytest.mark.skipif(not causal_attention.is_built(), reason="needs a C++ compiler")
def test_one_document_has_the_bits_of_none_at_all() -> None:
    packed = torch.randn(150, 2, 3, 3, 20, generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(2, 150, dtype=torch.int32)
    assert causal_self_attention(packed, starts).equal(causal_self_attention(packed))


def graph_of(function: Callable[..., Any], *inputs: Any) -> str:
    """Return the one graph that ``function`` is compiled to; it is not run."""
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return lambda *_: [torch.zeros(())]

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    (code,) = graphs
    return code


def test_compiled_layers_are_one_graph_on_both_devices() -> None:
    starts = document_starts(segments_of([3, 50], 70).unsqueeze(0))
    sizes = {**small_layer(70), "position_embedding_type": "alibi", "num_query_groups": 1}
    layer = SelfAttention(ModelArgs(**sizes), ParallelContext(), 0)
    assert "megatron_tds.document_attention" in graph_of(layer, torch.ones(70, 1, 16), starts)
    query, key = torch.ones(1, 4, 70, 8), torch.ones(1, 2, 70, 8)
    on_cuda = partial(attention_by_length, first=0, window=0, scale=0.3)
    assert "_varlen_attn" in graph_of(on_cuda, query, key, key, starts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_have_softmax_in_32(dtype: torch.dtype) -> None:
    ids = segments_of([30, 1, 40], 100).unsqueeze(0)
    inputs = [x.detach().to(dtype) for x in inputs_of(1, 100)]
    found = document_attention.document_attention(*inputs[:3], document_starts(ids), slopes=SLOPES)
    wanted = by_formula(*[x.double() for x in inputs[:3]], ids, slopes=SLOPES)
    assert found.dtype == dtype and (found.double() - wanted).abs().max() <= 4 * torch.finfo(dtype).eps


def test_it_is_an_operator_with_shapes_and_gradients() -> None:
    inputs, starts = inputs_of(1, 70), document_starts(segments_of([3, 50], 70).unsqueeze(0))
    torch.library.opcheck(
        torch.ops.megatron_tds.document_attention.default,
        (*inputs[:3], starts, None, SLOPES, 0, 9, 0.3, 2.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def bytes_of(run: Callable[[], Any]) -> int:
    """Return the most bytes that are in memory at once while ``run`` works, beside what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def small_layer(length: int) -> dict[str, Any]:
    """Return the sizes of a layer of two heads."""
    return {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8,
        "max_position_embeddings": length, "kv_hidden_size": 8, "ff_hidden_size": 8,
    }  # fmt: skip


def layer_bytes(length: int, lengths: list[int], **changes: Any) -> int:
    """Return ``bytes_of`` of a step of one layer of attention with documents of ``lengths``."""
    sizes = ModelArgs(**small_layer(length), **changes)
    layer, masks = SelfAttention(sizes, ParallelContext(), 0).eval(), Masks(sizes, ParallelContext())
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    x, ids = torch.ones(length, 1, 16, requires_grad=True), segments_of(lengths, length).unsqueeze(0)
    return bytes_of(lambda: layer(x, masks.of(x, ids)).sum().backward())


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"num_query_groups": 1, "position_embedding_type": "alibi"}],
    ids=["kernel", "tiles"],
)
def test_bytes_grow_with_the_length_and_not_with_its_square(changes: dict[str, Any]) -> None:
    short, long = (layer_bytes(length, [700, 3, 1200], **changes) for length in (2048, 8192))
    assert long / short < 4.5 and long < 8192**2 / 4
    masked = layer_bytes(2048, [700], attention_dropout=0.1, **changes)
    assert masked > 2048**2 and masked > 3 * short, "a mask is seen by this count"


def test_keys_are_repeated_for_a_torch_that_knows_no_groups() -> None:
    """Torch 2.11; with the groups in the call from 2.12 on."""
    calls: list[tuple[int, dict[str, Any]]] = []

    def varlen_attn(query: Any, key: torch.Tensor, value: Any, *lengths: Any, **how: Any) -> None:
        calls.append((key.shape[1], how))

    query, key = torch.ones(6, 4, 8), torch.ones(6, 2, 8)
    ends = torch.tensor([0, 6], dtype=torch.int32)
    assert torch_compat.HAS_GROUPS
    for has_groups in (True, False):
        with (
            patch("torch.nn.attention.varlen.varlen_attn", varlen_attn),
            patch.object(torch_compat, "HAS_GROUPS", has_groups),
        ):
            torch_compat.varlen_attention(query, key, key, ends, ends, 6, 6, scale=0.5, window=3)
    assert calls == [
        (2, {"enable_gqa": True, "scale": 0.5, "window_size": (3, 0)}),
        (4, {"scale": 0.5, "window_size": (3, 0)}),
    ]


def test_planning_knows_from_what_length_on_cuda_goes_by_length() -> None:
    assert decoder_cost.SHORTEST_BY_LENGTH == 2 * document_attention.SHORT
