"""Causal attention in blocks against its formula: output and gradient, for blocks that fit and blocks that do not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.ops import causal_attention
from megatron.ops.attention import attention
from megatron.ops.causal_attention import _forward, causal_self_attention, split_packed
from tests.ops.causal import formula, make_packed, run_with_gradient

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
    monkeypatch.setattr(causal_attention, "queries_per_block", lambda size: min(size, 4))
    monkeypatch.setattr(causal_attention, "CACHED_SCORES", 3 * 4 * 11)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", SHAPES)
def test_output_and_gradient_match_formula(name: str) -> None:
    packed = make_packed(*SHAPES[name])
    for actual, expected in zip(
        run_with_gradient(causal_self_attention, packed), run_with_gradient(formula, packed), strict=True
    ):
        assert (actual - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_default_block_size_matches_torch_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    packed = make_packed(200, 2, 3, 8).float()
    reference = run_with_gradient(lambda x: attention(*split_packed(x)), packed.double())
    for actual, expected in zip(
        run_with_gradient(lambda x: _forward(x).permute(1, 2, 0, 3), packed), reference, strict=True
    ):
        assert actual.dtype == torch.float32
        assert (actual - expected).norm() <= 4 * torch.finfo(torch.float32).eps * expected.norm()


def test_large_scores_stay_finite() -> None:
    packed = make_packed(11, 1, 1, 4) * 1e3
    assert all(tensor.isfinite().all() for tensor in run_with_gradient(causal_self_attention, packed))


def test_later_tokens_do_not_affect_earlier_outputs() -> None:
    packed = make_packed(11, 2, 2, 4)
    changed = packed.clone()
    changed[7] += 1.0
    output, changed_output = causal_self_attention(packed), causal_self_attention(changed)
    assert torch.equal(output[:, :, :7], changed_output[:, :, :7])
    assert (output[:, :, 7:] != changed_output[:, :, 7:]).any(dim=-1).all()


def test_backward_saves_only_input() -> None:
    saved_ptrs = []
    packed = make_packed(*SHAPES["a rest"]).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_ptrs.append(x.data_ptr()) or x, lambda x: x):
        causal_self_attention(packed)
    assert saved_ptrs == [packed.data_ptr()]


def test_output_layout_matches_next_linear() -> None:
    packed = make_packed(*SHAPES["a rest"])
    assert causal_self_attention(packed).permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("dropout_kwargs", [{"dropout": 0.5}, {"drop": lambda probabilities: probabilities * 0.5}])
def test_dropout_falls_back_to_torch_attention(dropout_kwargs: dict[str, object]) -> None:
    packed = make_packed(*SHAPES["a rest"])
    torch.manual_seed(0)
    dropped = causal_self_attention(packed, **dropout_kwargs)
    torch.manual_seed(0)
    assert torch.equal(dropped, attention(*split_packed(packed), **dropout_kwargs))
    assert (dropped - causal_self_attention(packed)).abs().max() > 0.1


def test_16_bit_inputs_fall_back_to_torch_attention() -> None:
    packed = make_packed(*SHAPES["a rest"]).bfloat16()
    assert torch.equal(causal_self_attention(packed), attention(*split_packed(packed)))


def test_compiler_sees_one_operator() -> None:
    torch.library.opcheck(_forward, (make_packed(*SHAPES["a rest"]).requires_grad_(),))
    graphs = []

    def record(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    packed = make_packed(*SHAPES["a rest"])
    compiled = torch.compile(causal_self_attention, backend=record, dynamic=False)
    assert torch.equal(compiled(packed), causal_self_attention(packed))
    assert len(graphs) == 1 and any("megatron_tds.causal_self_attention" in name for name in graphs[0])


def test_flop_counter_counts_up_to_diagonal() -> None:
    """Two products in forward, five in backward, which makes the scores again: 2 FLOPs for each score and d."""
    s, b, a, d = SHAPES["a rest"]
    with FlopCounterMode(display=False) as counter:
        run_with_gradient(causal_self_attention, make_packed(s, b, a, d))
    assert counter.get_total_flops() == 7 * 2 * b * a * d * s * (s + 1) // 2
