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
from megatron.planner.machine import Link, device
from megatron.planner.time_model import Group, Traffic

A100 = replace(device("a100-80g"), intra=Link.of(100e9, 1e-6), inter=Link.of(10e9, 1e-5))
L, H, S, V = 8, 1024, 512, 8192
SIZES = {"num_layers": L, "hidden_size": H, "num_attention_heads": 16, "seq_length": S, "vocab_size": V}
PLANNER = Planner(config_from_values({**SIZES, "max_position_embeddings": S}), A100)


def estimate(**how: object) -> Estimate:
    return PLANNER.estimate(Layout(**how))  # type: ignore[arg-type]


def test_tensor_ranks_sum_four_times_a_layer_and_at_both_ends() -> None:
    found = estimate(tensor=4, micro_batch_size=2, num_micro_batches=3).traffic[TENSOR]
    hidden = 2 * S * H * 2
    small = 3 * 2 * S * 4
    assert found.bytes == pytest.approx(3 * 2 * 3 / 4 * (hidden * (4 * L + 2) + small))
    again = estimate(tensor=4, micro_batch_size=2, num_micro_batches=3, recompute="full").traffic[TENSOR]
    assert again.bytes - found.bytes == pytest.approx(3 * 2 * 3 / 4 * hidden * 2 * L)
    assert estimate(tensor=1).traffic[TENSOR] == Traffic()


def test_sequence_parallelism_joins_the_input_once_more_in_backward() -> None:
    """Four halves of a sum in a layer's forward, six in its backward; around the head and the embedding one sum each.

    Of backward, the gradient of a row layer's output is waited for; of products for weights only those of column layers
    run beside a sum, 7 of 12 numbers of a GPT's layer.
    """
    how = {"tensor": 4, "micro_batch_size": 2, "num_micro_batches": 3}
    plain, cut = estimate(**how), estimate(**how, sequence_parallel=True)
    hidden = 2 * S * H * 2
    small = 3 * 2 * S * 4
    assert cut.traffic[TENSOR].bytes == pytest.approx(3 * 3 / 4 * (hidden * (10 * L + 2 * 2) + 2 * small))
    layer = PLANNER.units(plain.layout)[1]
    assert 0.5 < layer.columns / layer.weights < 0.65
    free = replace(A100, intra=Link.of(1e5, 0.0))  # sums last longer than all products
    shown = Planner(PLANNER.config, free).estimate(Layout(**how, sequence_parallel=True)).traffic[TENSOR]
    assert shown.hidden_s == pytest.approx(3 * L * 2 * layer.columns)
    whole = Planner(PLANNER.config, free).estimate(Layout(**how)).traffic[TENSOR]
    assert whole.hidden_s == pytest.approx(3 * L * layer.columns)
    fast = Planner(PLANNER.config, replace(A100, intra=Link.of(1e15, 0.0)))
    sums, parts = (fast.estimate(Layout(**how, sequence_parallel=is_cut)).traffic[TENSOR] for is_cut in (False, True))
    assert sums.hidden_s == pytest.approx(3 * L * 3 / 4 * 4 * hidden / 1e15)
    assert parts.hidden_s == pytest.approx(3 * L * 3 / 4 * 4 * hidden / 1e15)


@pytest.mark.parametrize(
    "how",
    [{"is_compiled": True}, {"pipe": 2, "schedule": "zb-h1", "num_micro_batches": 4}],
    ids=["compiled", "weights put off"],
)
def test_what_products_keep_joined_is_not_joined_once_more_and_hides_nothing(how: dict[str, object]) -> None:
    """So for layers that compile, or put weights off: sums and parts of sums send the same bytes, one after another."""
    how = {"tensor": 4, "micro_batch_size": 2, **how}
    plain, cut = estimate(**how).traffic[TENSOR], estimate(**how, sequence_parallel=True).traffic[TENSOR]
    small = 3 * 2 * S * 4  # of the loss, which is not cut
    assert cut.bytes == pytest.approx(plain.bytes, abs=8 * small)
    assert plain.hidden_s == cut.hidden_s == 0.0


def test_a_hidden_state_crosses_each_boundary_there_and_back() -> None:
    hidden = 2 * S * H * 2
    found = estimate(pipe=4, micro_batch_size=2, num_micro_batches=8).traffic[PIPELINE]
    assert found.bytes == 2 * 8 * hidden
    chunked = estimate(pipe=4, micro_batch_size=2, num_micro_batches=8, chunks=2, schedule="interleaved")
    assert chunked.traffic[PIPELINE].bytes == 2 * 8 * hidden * 7 / 4
    cut = estimate(pipe=2, tensor=4, micro_batch_size=2, num_micro_batches=8, sequence_parallel=True)
    assert cut.traffic[PIPELINE].bytes == 2 * 8 * hidden / 4


@pytest.mark.parametrize(("stage", "of_parameter"), [(0, 2 * 4), (1, 4 + 2), (2, 3 * 4 + 2), (3, 3 * 4 + 3 * 2 * 2)])
def test_replicas_sum_gradients_and_gather_weights_as_their_stage_of_zero_says(stage: int, of_parameter: int) -> None:
    found = estimate(data=8, num_micro_batches=3, zero_stage=stage).traffic[DATA]
    assert found.bytes == pytest.approx(7 / 8 * of_parameter * PLANNER.costs.num_parameters)


def test_weights_of_zero_3_come_behind_forward_and_backward_on_a_gpu() -> None:
    quick = Planner(PLANNER.config, replace(A100, intra=Link.of(1e15, 0.0)))
    slow = Planner(PLANNER.config, replace(A100, intra=Link.of(1e3, 0.0)))
    layout = Layout(data=8, num_micro_batches=3, zero_stage=3)
    hidden = quick.estimate(layout).traffic[DATA]
    assert hidden.exposed_s == pytest.approx(0.0) and hidden.seconds > 0
    covered = slow.estimate(layout).traffic[DATA].hidden_s  # all that a GPU computes, and no more
    assert covered == pytest.approx(3 * slow.estimate(replace(layout, data=1, zero_stage=0)).step_s / 3, rel=0.1)


def test_a_group_in_a_node_has_its_links_and_one_across_nodes_those_of_the_cards() -> None:
    assert Group.of(A100, 8, 1, 64).summed(1e9).seconds == pytest.approx(3e-6 + 2 * 7 / 8 * 1e9 / 100e9)
    assert Group.of(A100, 16, 1, 64).summed(1e9).seconds == pytest.approx(4e-5 + 2 * 15 / 16 * 1e9 / 80e9)
    assert Group.of(A100, 4, 8, 64).summed(1e9).seconds == pytest.approx(2e-5 + 2 * 3 / 4 * 1e9 / 10e9)
    assert Group.of(A100, 4, 4, 64).gathered(1e9).seconds == pytest.approx(2e-5 + 3 / 4 * 1e9 / 20e9)
    slow = replace(A100, intra=Link.of(20e9, 1e-6))
    assert Group.of(slow, 16, 1, 64).sent(1e9).seconds == pytest.approx(1e-5 + 1e9 / 20e9)
    assert Group.of(A100, 1, 4, 64).summed(1e9) == Traffic() == Group.of(A100, 1, 4, 64).sent(1e9)
    across, inside = Group.of(A100, 3, 2, 24), Group.of(A100, 3, 2, 6)  # of 24 ranks in steps of 6, one leaves its node
    assert across.link == A100.inter and inside.link == A100.intra


def test_sums_hide_behind_the_last_backward_and_those_of_activations_behind_weights() -> None:
    shown = estimate(data=8, overlap_grad_reduce=False, num_micro_batches=4)
    hidden = estimate(data=8, num_micro_batches=4)
    assert shown.traffic[DATA].hidden_s == 0 < hidden.traffic[DATA].hidden_s <= hidden.traffic[DATA].seconds
    assert hidden.step_s == pytest.approx(shown.step_s - hidden.traffic[DATA].hidden_s)
    beside, apart = (estimate(tensor=8, micro_batch_size=8, overlaps_tensor=is_on) for is_on in (True, False))
    assert apart.traffic[TENSOR].hidden_s == 0 < beside.traffic[TENSOR].hidden_s
    assert beside.traffic[TENSOR].hidden_s <= beside.traffic[TENSOR].seconds / 2 + 1e-9
    split = estimate(tensor=4, pipe=2, num_micro_batches=8, schedule="zb-h1")
    assert split.traffic[TENSOR].hidden_s == 0
    assert math.isclose(sum(beside.parts.values()), beside.step_s)


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 1)])
def test_context_ranks_gather_keys_and_values_twice_or_exchange_heads(recompute: str, again: int) -> None:
    """Keys and values of 2 s h numbers, of one in a way; of heads queries, keys, values and context, s h / c each."""
    how = {"context": 4, "data": 2, "micro_batch_size": 2, "num_micro_batches": 3, "recompute": recompute}
    of_layer = 2 * S * H * 2
    for comm, sent in (("all_gather", 3 * 2 * of_layer), ("a2a", (2 + again) * 4 * of_layer / 4)):
        more = {"context_parallel_size": 4, "cp_comm_type": comm}
        planner = Planner(config_from_values({**SIZES, **more, "max_position_embeddings": S}), A100)
        found = planner.estimate(Layout(**how, cuts_heads=comm == "a2a"))  # type: ignore[arg-type]
        assert found.traffic[CONTEXT].bytes == pytest.approx(3 * L * 3 / 4 * sent)
        assert sum(found.parts.values()) == pytest.approx(found.step_s) and found.parts[CONTEXT] > 0
        assert found.traffic[DATA].bytes == pytest.approx(estimate(data=8).traffic[DATA].bytes), "over data x context"
        assert (
            planner.memory(found.layout)[0].activations
            < PLANNER.memory(replace(found.layout, context=1))[0].activations
        )
    assert CONTEXT not in estimate().traffic


def crosses_nodes(groups: list[list[int]], devices_per_node: int) -> bool:
    return any(len({rank // devices_per_node for rank in group}) > 1 for group in groups)


def config_on(context: int, **sizes: int) -> Config:
    """Return the configuration of the model of these tests with sequences split over ``context`` ranks."""
    return config_from_values({**SIZES, "max_position_embeddings": S, "context_parallel_size": context, **sizes})


GRIDS = [
    (t, p, d, c) for t, p, d, c in itertools.product((1, 2, 4), repeat=4) if t * p * d * c in (4, 8, 16, 32) and c < 4
]


@pytest.mark.parametrize("devices_per_node", [2, 6, 8])
def test_messages_along_an_axis_leave_the_node_where_a_group_of_the_topology_does(devices_per_node: int) -> None:
    """With links between nodes that are as fast as those within one, only groups that stay inside take as long."""
    within = replace(A100, devices_per_node=devices_per_node, inter=A100.intra)
    across = replace(within, inter=Link.of(1e6, 1e-2))
    planners = {c: [Planner(config_on(c), machine) for machine in (within, across)] for c in (1, 2)}
    axes = {TENSOR: ("tensor",), PIPELINE: ("pipe",), CONTEXT: ("context",), DATA: ("data", "context")}
    crossed = set()
    for t, p, d, c in GRIDS:
        layout = Layout(tensor=t, pipe=p, data=d, context=c, num_micro_batches=p)
        fast, slow = (planner.estimate(layout).traffic for planner in planners[c])
        topology = Topology(pipe=p, data=d, tensor=t, context=c)
        for kind, axis in axes.items():
            if fast.get(kind, Traffic()).bytes == 0:
                continue
            leaves = crosses_nodes(topology.groups(*axis), devices_per_node)
            assert (slow[kind].seconds > 2 * fast[kind].seconds) == leaves, (layout, kind)
            crossed.add((kind, leaves))
    assert {(PIPELINE, True), (DATA, True), (TENSOR, False)} <= crossed  # and in some parametrization every other pair


@pytest.mark.parametrize("expert", [2, 4])
def test_messages_of_experts_leave_the_node_where_their_group_does(expert: int) -> None:
    sizes = {"num_experts": 4, "moe_ffn_hidden_size": 512, "moe_router_topk": 2}
    within = replace(A100, devices_per_node=4, inter=A100.intra)
    machines = within, replace(within, inter=Link.of(1e6, 1e-2))
    planners = {c: [Planner(config_on(c, **sizes), machine) for machine in machines] for c in (1, 2)}
    seen = set()
    for t, d, c in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)):
        if d * c % expert:
            continue
        layout = Layout(tensor=t, data=d, context=c, expert=expert, sequence_parallel=t > 1)
        fast, slow = (sum(sent.seconds for sent in planner.rows(layout)) for planner in planners[c])
        topology = Topology(pipe=1, data=d, tensor=t, context=c, expert=expert)
        leaves = crosses_nodes(topology.expert_groups(), 4)
        assert (slow > 2 * fast) == leaves, layout
        seen.add(leaves)
    assert seen == {True, False}


def test_a_pipeline_of_two_nodes_with_context_ranks_sends_between_them() -> None:
    """16 ranks on nodes of 8 (tp 2, cp 2, dp 2, pp 2): neighbouring stages are 8 ranks apart."""
    machine = replace(A100, devices_per_node=8)
    layout = Layout(tensor=2, pipe=2, data=2, context=2, num_micro_batches=2)
    sent = Planner(config_on(2), machine).estimate(layout).traffic[PIPELINE]
    message = 1e-5 + S * H * 2 / 2 / 10e9
    assert sent.seconds == pytest.approx(2 * 2 * message)
