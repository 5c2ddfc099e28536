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
from megatron.ops.flex_attention import BLOCK, attention_by_blocks
from tests.helpers.documents import (
    SLOPES,
    by_blocks,
    by_formula,
    gradients,
    inputs_of,
    lengths_of,
    mask_of,
    segments_of,
    worst,
)
from tests.ops.test_document_attention import FORMS, NEAR, graph_of, small_layer

LENGTH = 300
"""Two blocks and a rest."""
HOW: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
ROWS = st.lists(lengths_of(LENGTH, 290), min_size=1, max_size=2)
LONG = [[260, 1, 30, 9], [3, 290]]
TORCHS = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _more_graphs() -> Iterator[None]:
    """Torch compiles flex_attention for each shape even where it makes all scores."""
    with torch._dynamo.config.patch(recompile_limit=200, accumulated_recompile_limit=2000):
        yield


def ids_of(lengths: list[list[int]], length: int = LENGTH) -> torch.Tensor:
    return torch.stack([segments_of(each, length) for each in lengths])


def alone() -> Any:
    """Return within what the blocks alone are looked at, and gradients flow on a CPU."""
    return patch.object(flex_attention, "flexible_attention", by_blocks)


@given(lengths=ROWS, length=st.sampled_from([1, BLOCK, LENGTH]), form=st.sampled_from(list(FORMS)))
@example(lengths=LONG, length=LENGTH, form="plain")
@example(lengths=LONG, length=LENGTH, form="window")
@example(lengths=LONG, length=LENGTH, form="all")
@settings(max_examples=25, **HOW)
def test_documents_of_any_lengths_equal_a_mask_in_values_and_gradients(
    lengths: list[list[int]], length: int, form: str
) -> None:
    ids, inputs = ids_of(lengths, length), inputs_of(len(lengths), length)
    with alone():
        found = attention_by_blocks(*inputs[:3], document_starts(ids), **FORMS[form])
    wanted = by_formula(*inputs[:3], ids, **FORMS[form])
    assert worst(gradients(found, inputs), gradients(wanted, inputs)) <= NEAR


@given(
    lengths=ROWS,
    places=st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)),
    form=st.sampled_from(list(FORMS)),
)
@example(lengths=[[9, 160, 3, 40]], places=(30, 290), form="all")
@settings(max_examples=15, **HOW)
def test_queries_of_a_piece_see_the_keys_of_the_whole(
    lengths: list[list[int]], places: tuple[int, int], form: str
) -> None:
    """As on a rank of context parallelism: a document may have begun on another one."""
    ids, (query, key, value, factor) = ids_of(lengths), inputs_of(len(lengths), LENGTH)
    first, stop = min(places), max(*places, min(places) + 1)
    starts, piece = document_starts(ids)[:, first:stop], query[:, :, first:stop]
    with alone():
        found = attention_by_blocks(piece, key, value, starts, first=first, **FORMS[form])
    wanted = by_formula(query, key, value, ids, **FORMS[form])[:, :, first:stop]
    own = [query, key, value, factor[:, :, first:stop]]
    assert worst(gradients(found, own), gradients(wanted, own)) <= NEAR


@given(lengths=ROWS)
@example(lengths=LONG)
@settings(max_examples=8, **HOW)
def test_both_directions_within_documents_equal_a_mask(lengths: list[list[int]]) -> None:
    """As in padded samples of BERT, whose starts and stops are two rows of a tensor."""
    ids, inputs = ids_of(lengths), inputs_of(len(lengths), LENGTH)
    starts, stops = torch.stack((document_starts(ids), document_stops(document_starts(ids))))
    with alone():
        found = attention_by_blocks(*inputs[:3], starts, stops)
    wanted = by_formula(*inputs[:3], ids, is_causal=False)
    assert worst(gradients(found, inputs), gradients(wanted, inputs)) <= NEAR


@TORCHS
@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f == "all" else pytest.mark.slow) for f in FORMS])
@torch.no_grad()
def test_torchs_own_makes_the_same_values(form: str) -> None:
    ids, (query, key, value, _) = ids_of(LONG), inputs_of(len(LONG), LENGTH)
    for first in (0, 170):
        piece, starts = query[:, :, first:], document_starts(ids)[:, first:]
        found = attention_by_blocks(piece, key, value, starts, first=first, **FORMS[form])
        wanted = by_formula(query, key, value, ids, **FORMS[form])[:, :, first:]
        assert float((found - wanted).abs().max()) <= NEAR


@given(lengths=st.lists(lengths_of(900, 600), min_size=1, max_size=2), window=st.sampled_from([0, 5, 200]))
@example(lengths=[[900]], window=0)
@example(lengths=[[5, 700]], window=200)
@settings(max_examples=15, **HOW)
def test_blocks_are_those_that_queries_see(lengths: list[list[int]], window: int) -> None:
    """In the lists of forward and of backward, a block once; those whose keys all are seen are told from the others."""
    length = 7 * BLOCK
    ids = ids_of(lengths, length)
    places = torch.arange(length)
    behind = places.unsqueeze(1) - places
    for stops in (None, document_stops(document_starts(ids))):
        plan = flex_attention._plan(document_starts(ids), stops, length, 0, window)
        wanted = (ids.unsqueeze(2) == ids.unsqueeze(1)) & ((behind <= window) if window else (behind <= length))
        wanted = wanted & (behind >= 0) if stops is None else wanted
        assert mask_of(plan.blocks)[:, 0].equal(wanted) and mask_of(plan.blocks, by_keys=True)[:, 0].equal(wanted)
        by_block = wanted.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))
        counts = plan.blocks.kv_num_blocks + plan.blocks.full_kv_num_blocks
        assert plan.blocks.full_kv_num_blocks[:, 0].equal(by_block.all(4).all(2).sum(2).int())
        assert counts[:, 0].equal(by_block.any(4).any(2).sum(2).int()), "no block more than needed"


def test_a_plan_is_a_thousandth_of_a_mask() -> None:
    """Its lists have 4 (s / 128)^2 numbers, all else some of each token."""
    sizes = {}
    for length in (2048, 8192):
        plan = flex_attention._plan(document_starts(ids_of([[700, 3, 1200]], length)), None, length, 0, 0)
        low, high = (cell.cell_contents for cell in plan.blocks.mask_mod.__closure__ or ())
        tensors = [x for x in plan.blocks.as_tuple() if isinstance(x, torch.Tensor)]
        assert len(tensors) == 8
        lists, of_tokens = (sum(x.nbytes for x in each) for each in (tensors, (low, high, plan.positions)))
        assert of_tokens <= 12 * length
        sizes[length] = lists
    assert sizes[8192] <= 8192**2 / 1000 and sizes[8192] <= 2 * 8 * 8192


def test_layers_share_the_plan_of_a_micro_batch_which_is_gone_with_it() -> None:
    ids, (query, key, value, _) = ids_of(LONG, BLOCK), inputs_of(len(LONG), BLOCK)
    known = len(plans._plans)
    pair = torch.stack((document_starts(ids), document_stops(document_starts(ids))))
    make, made = flex_attention._plan, []

    def making(*how: Any) -> Any:
        made.append(how[2:])
        return make(*how)

    with alone(), patch.object(flex_attention, "_plan", making):
        for window in (0, 9, 0):
            attention_by_blocks(query, key, value, *pair, window=window)
            attention_by_blocks(query, key, value, pair[0], window=window)
        assert len(made) == 4
        pair[1].copy_(pair[1].flip(1))
        attention_by_blocks(query, key, value, pair[0])
        assert len(made) == 5 and len(plans._plans) == known + 1
        for _ in range(2):
            attention_by_blocks(query, key, value, pair[0], pair[1].clone())
        assert len(made) == 7 and len(plans._plans) == known + 1, "stops of their own are not kept track of"
    del pair
    assert len(plans._plans) == known


@pytest.mark.slow  # the graph itself is compared below, a compiled layer in test_document_attention.py
@torch.no_grad()
def test_a_compiled_layer_is_one_graph_with_torchs_operator() -> None:
    sizes = {**small_layer(LENGTH), "position_embedding_type": "alibi", "attn_logit_softcapping": 2.0}
    layer = SelfAttention(ModelArgs(**sizes, num_query_groups=1), ParallelContext(), 0)
    layer.within_documents = partial(attention_by_blocks, **layer.within_documents.keywords)  # type: ignore[attr-defined]
    code = graph_of(layer, torch.ones(LENGTH, 1, 16), document_starts(ids_of([[3, 50]])))
    assert "torch.ops.higher_order.flex_attention" in code or "flex_attention(" in code
    pair = torch.stack((document_starts(ids_of(LONG)), document_stops(document_starts(ids_of(LONG)))))
    key = torch.ones(2, 2, LENGTH, 8)
    assert "flex_attention" in graph_of(lambda x, pair: attention_by_blocks(x, key, key, *pair), key, pair)


@torch.no_grad()
def test_micro_batches_share_a_graph_and_shapes_have_their_own() -> None:
    torch._dynamo.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch_compat.compiled_flex_attention(keep)
    with patch.object(flex_attention, "flexible_attention", compiled):
        for lengths, length, window, first in (
            ([3, 20], 130, 0, 0), ([7, 100], 130, 0, 0), ([9], 130, 5, 0), ([9], 130, 0, 1), ([9], 300, 0, 0)
        ):  # fmt: skip
            (query, key, value, _), starts = inputs_of(1, length), document_starts(ids_of([lengths], length))
            found = attention_by_blocks(
                query[:, :, first:], key, value, starts[:, first:], first=first, window=window, slopes=SLOPES
            )
            wanted = by_formula(query, key, value, ids_of([lengths], length), window=window, slopes=SLOPES)
            assert float((found - wanted[:, :, first:]).abs().max()) <= NEAR
    assert len(graphs) == 2, "one for each shape, in whole blocks"


def test_the_limit_of_graphs_is_flex_attentions_own_where_torch_has_one() -> None:
    def older(function: Any, *, backend: Any, dynamic: bool, fullgraph: bool) -> str:
        assert not dynamic and fullgraph
        return "compiled"

    make = torch_compat.compiled_flex_attention.__wrapped__
    with torch._dynamo.config.patch(recompile_limit=8):
        make("eager")
        assert torch._dynamo.config.recompile_limit == 8
        with patch.object(torch, "compile", older):
            assert make("eager") == "compiled"
        assert torch._dynamo.config.recompile_limit == torch_compat.MOST_GRAPHS


@pytest.mark.parametrize(
    ("dtype", "length", "head_size", "is_plain", "way"),
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
def test_what_flash_attention_lacks_goes_by_blocks_with_triton(
    dtype: torch.dtype, length: int, head_size: int, is_plain: bool, way: str | None
) -> None:
    x = torch.empty(0, dtype=dtype, device="meta")

    def has_flash(kind: torch.dtype, *_: Any) -> bool:
        return kind in (torch.bfloat16, torch.float16)

    with patch.multiple(document_attention, KIND="meta", _has_flash=has_flash, has_triton=lambda: True):
        assert document_attention.way_of(x, length, head_size, is_plain=is_plain) == way
        with patch.object(document_attention, "has_triton", lambda: False):
            found = document_attention.way_of(x, length, head_size, is_plain=is_plain)
    assert found == (way if way == "FlashAttention" else None)
    assert (flex_attention.LEAST, flex_attention.MOST) == decoder_cost.HEADS_IN_BLOCKS, "planning knows it"
    assert document_attention.way_of(x, length, head_size, is_plain=is_plain) is None, "a device without kernels"
