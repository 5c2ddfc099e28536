"""Messages of a step against the formulas written out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from megatron.arguments import config_from_values
from megatron.config import Config
from megatron.mpu.topology import Topology
from megatron.planner.estimate import CONTEXT, DATA, PIPELINE, TENSOR, Estimate, Planner
from megatron.planner.layout import Layout
from megatron.planner.machine import Link, gpu_machine
from megatron.planner.time_model import Group, Traffic

A100 = replace(gpu_machine("a100-80g"), intra=Link.uniform(100e9, 1e-6), inter=Link.uniform(10e9, 1e-5))
L, H, S, V = 8, 1024, 512, 8192
MODEL_VALUES = {"num_layers": L, "hidden_size": H, "num_attention_heads": 16, "seq_length": S, "vocab_size": V}
PLANNER = Planner(config_from_values({**MODEL_VALUES, "max_position_embeddings": S}), A100)


def estimate_layout(**kwargs: object) -> Estimate:
    return PLANNER.estimate(Layout(**kwargs))  # type: ignore[arg-type]


def test_tensor_parallel_all_reduces_four_times_per_layer() -> None:
    traffic = estimate_layout(tensor=4, micro_batch_size=2, num_micro_batches=3).traffic[TENSOR]
    hidden_bytes = 2 * S * H * 2
    loss_bytes = 3 * 2 * S * 4
    assert traffic.bytes == pytest.approx(3 * 2 * 3 / 4 * (hidden_bytes * (4 * L + 2) + loss_bytes))
    recompute_traffic = estimate_layout(tensor=4, micro_batch_size=2, num_micro_batches=3, recompute="full").traffic[
        TENSOR
    ]
    assert recompute_traffic.bytes - traffic.bytes == pytest.approx(3 * 2 * 3 / 4 * hidden_bytes * 2 * L)
    assert estimate_layout(tensor=1).traffic[TENSOR] == Traffic()


def test_sequence_parallel_gathers_input_again_in_backward() -> None:
    """Four halves of a sum in a layer's forward, six in its backward; around the head and the embedding one sum each.

    Of backward, the gradient of a row layer's output is waited for; of products for weights only those of column layers
    run beside a sum, 7 of 12 numbers of a GPT's layer.
    """
    layout_kwargs = {"tensor": 4, "micro_batch_size": 2, "num_micro_batches": 3}
    unsharded, sharded = estimate_layout(**layout_kwargs), estimate_layout(**layout_kwargs, sequence_parallel=True)
    hidden_bytes = 2 * S * H * 2
    loss_bytes = 3 * 2 * S * 4
    assert sharded.traffic[TENSOR].bytes == pytest.approx(
        3 * 3 / 4 * (hidden_bytes * (10 * L + 2 * 2) + 2 * loss_bytes)
    )
    layer = PLANNER.unit_seconds(unsharded.layout)[1]
    assert 0.5 < layer.column_weight_grads / layer.weight_grads < 0.65
    slow_link = replace(A100, intra=Link.uniform(1e5, 0.0))  # sums last longer than all products
    sharded_traffic = (
        Planner(PLANNER.config, slow_link).estimate(Layout(**layout_kwargs, sequence_parallel=True)).traffic[TENSOR]
    )
    assert sharded_traffic.hidden_s == pytest.approx(3 * L * 2 * layer.column_weight_grads)
    unsharded_traffic = Planner(PLANNER.config, slow_link).estimate(Layout(**layout_kwargs)).traffic[TENSOR]
    assert unsharded_traffic.hidden_s == pytest.approx(3 * L * layer.column_weight_grads)
    fast_planner = Planner(PLANNER.config, replace(A100, intra=Link.uniform(1e15, 0.0)))
    all_reduce_traffic, reduce_scatter_traffic = (
        fast_planner.estimate(Layout(**layout_kwargs, sequence_parallel=is_sharded)).traffic[TENSOR]
        for is_sharded in (False, True)
    )
    assert all_reduce_traffic.hidden_s == pytest.approx(3 * L * 3 / 4 * 4 * hidden_bytes / 1e15)
    assert reduce_scatter_traffic.hidden_s == pytest.approx(3 * L * 3 / 4 * 4 * hidden_bytes / 1e15)


@pytest.mark.parametrize(
    "layout_kwargs",
    [{"is_compiled": True}, {"pipe": 2, "schedule": "zb-h1", "num_micro_batches": 4}],
    ids=["compiled", "weights put off"],
)
def test_saved_gathered_inputs_hide_no_traffic(layout_kwargs: dict[str, object]) -> None:
    """So for layers that compile, or put weights off: sums and parts of sums send the same bytes, one after another."""
    layout_kwargs = {"tensor": 4, "micro_batch_size": 2, **layout_kwargs}
    unsharded, sharded = (
        estimate_layout(**layout_kwargs).traffic[TENSOR],
        estimate_layout(**layout_kwargs, sequence_parallel=True).traffic[TENSOR],
    )
    loss_bytes = 3 * 2 * S * 4  # of the loss, which is not cut
    assert sharded.bytes == pytest.approx(unsharded.bytes, abs=8 * loss_bytes)
    assert unsharded.hidden_s == sharded.hidden_s == 0.0


def test_pipeline_sends_hidden_state_in_both_directions() -> None:
    hidden_bytes = 2 * S * H * 2
    traffic = estimate_layout(pipe=4, micro_batch_size=2, num_micro_batches=8).traffic[PIPELINE]
    assert traffic.bytes == 2 * 8 * hidden_bytes
    chunked = estimate_layout(pipe=4, micro_batch_size=2, num_micro_batches=8, chunks=2, schedule="interleaved")
    assert chunked.traffic[PIPELINE].bytes == 2 * 8 * hidden_bytes * 7 / 4
    sharded = estimate_layout(pipe=2, tensor=4, micro_batch_size=2, num_micro_batches=8, sequence_parallel=True)
    assert sharded.traffic[PIPELINE].bytes == 2 * 8 * hidden_bytes / 4


@pytest.mark.parametrize(("stage", "param_bytes"), [(0, 2 * 4), (1, 4 + 2), (2, 3 * 4 + 2), (3, 3 * 4 + 3 * 2 * 2)])
def test_data_parallel_bytes_match_zero_stage(stage: int, param_bytes: int) -> None:
    traffic = estimate_layout(data=8, num_micro_batches=3, zero_stage=stage).traffic[DATA]
    assert traffic.bytes == pytest.approx(7 / 8 * param_bytes * PLANNER.costs.num_parameters)


def test_zero3_gathers_overlap_forward_and_backward_on_gpu() -> None:
    fast_planner = Planner(PLANNER.config, replace(A100, intra=Link.uniform(1e15, 0.0)))
    slow_planner = Planner(PLANNER.config, replace(A100, intra=Link.uniform(1e3, 0.0)))
    layout = Layout(data=8, num_micro_batches=3, zero_stage=3)
    traffic = fast_planner.estimate(layout).traffic[DATA]
    assert traffic.exposed_s == pytest.approx(0.0) and traffic.seconds > 0
    hidden_s = slow_planner.estimate(layout).traffic[DATA].hidden_s  # all that a GPU computes, and no more
    assert hidden_s == pytest.approx(
        3 * slow_planner.estimate(replace(layout, data=1, zero_stage=0)).step_s / 3, rel=0.1
    )


def test_group_uses_node_links_or_network_cards() -> None:
    assert Group.on_machine(A100, 8, 1, 64).all_reduce(1e9).seconds == pytest.approx(3e-6 + 2 * 7 / 8 * 1e9 / 100e9)
    assert Group.on_machine(A100, 16, 1, 64).all_reduce(1e9).seconds == pytest.approx(4e-5 + 2 * 15 / 16 * 1e9 / 80e9)
    assert Group.on_machine(A100, 4, 8, 64).all_reduce(1e9).seconds == pytest.approx(2e-5 + 2 * 3 / 4 * 1e9 / 10e9)
    assert Group.on_machine(A100, 4, 4, 64).all_gather(1e9).seconds == pytest.approx(2e-5 + 3 / 4 * 1e9 / 20e9)
    slow = replace(A100, intra=Link.uniform(20e9, 1e-6))
    assert Group.on_machine(slow, 16, 1, 64).send(1e9).seconds == pytest.approx(1e-5 + 1e9 / 20e9)
    assert Group.on_machine(A100, 1, 4, 64).all_reduce(1e9) == Traffic() == Group.on_machine(A100, 1, 4, 64).send(1e9)
    inter_node, intra_node = (
        Group.on_machine(A100, 3, 2, 24),
        Group.on_machine(A100, 3, 2, 6),
    )  # of 24 ranks in steps of 6, one leaves its node
    assert inter_node.link == A100.inter and intra_node.link == A100.intra


def test_grad_and_tensor_reduces_overlap_backward() -> None:
    exposed = estimate_layout(data=8, overlap_grad_reduce=False, num_micro_batches=4)
    overlapped = estimate_layout(data=8, num_micro_batches=4)
    assert exposed.traffic[DATA].hidden_s == 0 < overlapped.traffic[DATA].hidden_s <= overlapped.traffic[DATA].seconds
    assert overlapped.step_s == pytest.approx(exposed.step_s - overlapped.traffic[DATA].hidden_s)
    tensor_overlapped, tensor_exposed = (
        estimate_layout(tensor=8, micro_batch_size=8, overlaps_tensor=is_on) for is_on in (True, False)
    )
    assert tensor_exposed.traffic[TENSOR].hidden_s == 0 < tensor_overlapped.traffic[TENSOR].hidden_s
    assert tensor_overlapped.traffic[TENSOR].hidden_s <= tensor_overlapped.traffic[TENSOR].seconds / 2 + 1e-9
    split = estimate_layout(tensor=4, pipe=2, num_micro_batches=8, schedule="zb-h1")
    assert split.traffic[TENSOR].hidden_s == 0
    assert math.isclose(sum(tensor_overlapped.seconds_by_activity.values()), tensor_overlapped.step_s)


@pytest.mark.parametrize(("recompute", "num_recomputes"), [("none", 0), ("full", 1)])
def test_context_parallel_gathers_kv_or_exchanges_heads(recompute: str, num_recomputes: int) -> None:
    """Keys and values of 2 s h numbers, of one in a way; of heads queries, keys, values and context, s h / c each."""
    layout_kwargs = {"context": 4, "data": 2, "micro_batch_size": 2, "num_micro_batches": 3, "recompute": recompute}
    layer_bytes = 2 * S * H * 2
    for comm_type, sent_bytes in (
        ("all_gather", 3 * 2 * layer_bytes),
        ("a2a", (2 + num_recomputes) * 4 * layer_bytes / 4),
    ):
        overrides = {"context_parallel_size": 4, "cp_comm_type": comm_type}
        planner = Planner(config_from_values({**MODEL_VALUES, **overrides, "max_position_embeddings": S}), A100)
        result = planner.estimate(Layout(**layout_kwargs))  # type: ignore[arg-type]
        assert result.traffic[CONTEXT].bytes == pytest.approx(3 * L * 3 / 4 * sent_bytes)
        assert (
            sum(result.seconds_by_activity.values()) == pytest.approx(result.step_s)
            and result.seconds_by_activity[CONTEXT] > 0
        )
        assert result.traffic[DATA].bytes == pytest.approx(estimate_layout(data=8).traffic[DATA].bytes), (
            "over data x context"
        )
        assert (
            planner.memory(result.layout)[0].activations
            < PLANNER.memory(replace(result.layout, context=1))[0].activations
        )
    assert CONTEXT not in estimate_layout().traffic


def crosses_nodes(groups: list[list[int]], devices_per_node: int) -> bool:
    return any(len({rank // devices_per_node for rank in group}) > 1 for group in groups)


def config_with_context(context: int, **overrides: int) -> Config:
    """Return the configuration of the model of these tests with sequences split over ``context`` ranks."""
    return config_from_values(
        {**MODEL_VALUES, "max_position_embeddings": S, "context_parallel_size": context, **overrides}
    )


GRIDS = [
    (t, p, d, c) for t, p, d, c in itertools.product((1, 2, 4), repeat=4) if t * p * d * c in (4, 8, 16, 32) and c < 4
]


@pytest.mark.parametrize("devices_per_node", [2, 6, 8])
def test_axis_traffic_uses_network_iff_group_spans_nodes(devices_per_node: int) -> None:
    """With links between nodes that are as fast as those within one, only groups that stay inside take as long."""
    intra_node = replace(A100, devices_per_node=devices_per_node, inter=A100.intra)
    inter_node = replace(intra_node, inter=Link.uniform(1e6, 1e-2))
    planners = {c: [Planner(config_with_context(c), machine) for machine in (intra_node, inter_node)] for c in (1, 2)}
    axes = {TENSOR: ("tensor",), PIPELINE: ("pipe",), CONTEXT: ("context",), DATA: ("data", "context")}
    seen = set()
    for t, p, d, c in GRIDS:
        layout = Layout(tensor=t, pipe=p, data=d, context=c, num_micro_batches=p)
        fast, slow = (planner.estimate(layout).traffic for planner in planners[c])
        topology = Topology(pipe=p, data=d, tensor=t, context=c)
        for traffic_type, axis in axes.items():
            if fast.get(traffic_type, Traffic()).bytes == 0:
                continue
            is_inter_node = crosses_nodes(topology.groups(*axis), devices_per_node)
            assert (slow[traffic_type].seconds > 2 * fast[traffic_type].seconds) == is_inter_node, (
                layout,
                traffic_type,
            )
            seen.add((traffic_type, is_inter_node))
    assert {(PIPELINE, True), (DATA, True), (TENSOR, False)} <= seen  # and in some parametrization every other pair


@pytest.mark.parametrize("expert", [2, 4])
def test_expert_traffic_uses_network_iff_group_spans_nodes(expert: int) -> None:
    overrides = {"num_experts": 4, "moe_ffn_hidden_size": 512, "moe_router_topk": 2}
    intra_node = replace(A100, devices_per_node=4, inter=A100.intra)
    machines = intra_node, replace(intra_node, inter=Link.uniform(1e6, 1e-2))
    planners = {c: [Planner(config_with_context(c, **overrides), machine) for machine in machines] for c in (1, 2)}
    seen = set()
    for t, d, c in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)):
        if d * c % expert:
            continue
        layout = Layout(tensor=t, data=d, context=c, expert=expert, sequence_parallel=t > 1)
        fast, slow = (sum(traffic.seconds for traffic in planner.expert_traffic(layout)) for planner in planners[c])
        topology = Topology(pipe=1, data=d, tensor=t, context=c, expert=expert)
        is_inter_node = crosses_nodes(topology.expert_groups(), 4)
        assert (slow > 2 * fast) == is_inter_node, layout
        seen.add(is_inter_node)
    assert seen == {True, False}


def test_two_node_pipeline_with_context_uses_network() -> None:
    """16 ranks on nodes of 8 (tp 2, cp 2, dp 2, pp 2): neighbouring stages are 8 ranks apart."""
    machine = replace(A100, devices_per_node=8)
    layout = Layout(tensor=2, pipe=2, data=2, context=2, num_micro_batches=2)
    traffic = Planner(config_with_context(2), machine).estimate(layout).traffic[PIPELINE]
    message_s = 1e-5 + S * H * 2 / 2 / 10e9
    assert traffic.seconds == pytest.approx(2 * 2 * message_s)
