"""Causal attention in blocks against its formula: output and gradient, for blocks that fit and blocks that do not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.ops import causal_attention
from megatron.ops.attention import attention
from megatron.ops.causal_attention import _forward, causal_self_attention, heads_of
from tests.ops.causal import formula, outcome, packed_of

SHAPES = {
    "one position": (1, 2, 1, 4),
    "less than a block": (3, 1, 2, 5),
    "whole blocks": (8, 1, 7, 4),
    "a rest": (11, 3, 5, 6),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on blocks of 4 queries, whose scores of 3 heads with 11 keys fit: 7 heads with 8 keys are 4 and 3."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(causal_attention, "queries_of_block", lambda size: min(size, 4))
    monkeypatch.setattr(causal_attention, "CACHED", 3 * 4 * 11)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_the_formula_and_so_does_the_gradient(name: str) -> None:
    packed = packed_of(*SHAPES[name])
    for own, wanted in zip(outcome(causal_self_attention, packed), outcome(formula, packed), strict=True):
        assert (own - wanted).abs().max() <= 1e-13 * wanted.abs().max()


def test_a_block_of_its_own_size_is_torchs_attention_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    packed = packed_of(200, 2, 3, 8).float()
    wide = outcome(lambda x: attention(*heads_of(x)), packed.double())
    for own, wanted in zip(outcome(lambda x: _forward(x).permute(1, 2, 0, 3), packed), wide, strict=True):
        assert own.dtype == torch.float32
        assert (own - wanted).norm() <= 4 * torch.finfo(torch.float32).eps * wanted.norm()


def test_scores_too_large_for_exp_give_numbers() -> None:
    packed = packed_of(11, 1, 1, 4) * 1e3
    assert all(each.isfinite().all() for each in outcome(causal_self_attention, packed))


def test_a_later_token_changes_nothing_before_it() -> None:
    packed = packed_of(11, 2, 2, 4)
    other = packed.clone()
    other[7] += 1.0
    one, two = causal_self_attention(packed), causal_self_attention(other)
    assert torch.equal(one[:, :, :7], two[:, :, :7])
    assert (one[:, :, 7:] != two[:, :, 7:]).any(dim=-1).all()


def test_nothing_is_kept_but_what_came_in() -> None:
    kept = []
    packed = packed_of(*SHAPES["a rest"]).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        causal_self_attention(packed)
    assert kept == [packed.data_ptr()]


def test_the_output_lies_as_the_next_product_reads_it() -> None:
    packed = packed_of(*SHAPES["a rest"])
    assert causal_self_attention(packed).permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("how", [{"dropout": 0.5}, {"drop": lambda probabilities: probabilities * 0.5}])
def test_dropped_probabilities_go_by_torchs_attention(how: dict[str, object]) -> None:
    packed = packed_of(*SHAPES["a rest"])
    torch.manual_seed(0)
    dropped = causal_self_attention(packed, **how)
    torch.manual_seed(0)
    assert torch.equal(dropped, attention(*heads_of(packed), **how))
    assert (dropped - causal_self_attention(packed)).abs().max() > 0.1


def test_16_bits_go_by_torchs_attention() -> None:
    packed = packed_of(*SHAPES["a rest"]).bfloat16()
    assert torch.equal(causal_self_attention(packed), attention(*heads_of(packed)))


def test_a_compiler_sees_one_operator() -> None:
    torch.library.opcheck(_forward, (packed_of(*SHAPES["a rest"]).requires_grad_(),))
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    packed = packed_of(*SHAPES["a rest"])
    compiled = torch.compile(causal_self_attention, backend=keep, dynamic=False)
    assert torch.equal(compiled(packed), causal_self_attention(packed))
    assert len(graphs) == 1 and any("megatron_tds.causal_self_attention" in name for name in graphs[0])


def test_its_products_are_counted_up_to_the_diagonal() -> None:
    """Two products in forward, five in backward, which makes the scores again: 2 FLOPs for each score and d."""
    s, b, a, d = SHAPES["a rest"]
    with FlopCounterMode(display=False) as counter:
        outcome(causal_self_attention, packed_of(s, b, a, d))
    assert counter.get_total_flops() == 7 * 2 * b * a * d * s * (s + 1) // 2
