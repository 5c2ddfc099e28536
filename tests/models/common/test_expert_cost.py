"""Costs of layers with experts: parameters of published models by hand, bytes that a half keeps, rows that it sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.config import Config, ModelConfig, parse
from megatron.costs.decoder_cost import DecoderCosts
from megatron.costs.expert_cost import exchanged_bytes
from megatron.costs.memory import State, Zero
from megatron.models.common import parameters, router
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.experts import MoE
from megatron.models.common.model_args import ModelArgs, model_args_from
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.transformer import MLP
from megatron.models.registry import costs_of
from megatron.mpu.expert_parallel import Exchange
from megatron.mpu.groups import Group, build_grid
from megatron.mpu.random import checkpoint
from megatron.mpu.topology import Topology
from megatron.ops.grouped import Slots
from megatron.planner.layout import Layout
from megatron.planner.machine import device
from megatron.planner.time_model import Messages
from megatron.training import initialize
from megatron.training.callbacks.speed_monitor import Rates
from megatron.training.start_table import count_parameters
from tests.helpers.count_bytes import bytes_kept
from tests.helpers.harness import run_ranks

MIXTRAL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ff-hidden-size 14336 "
    "--vocab-size 32000 --num-experts 8 --moe-router-topk 2"
)
QWEN3_30B_A3B = (
    "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 "
    "--ff-hidden-size 6144 --vocab-size 151936 --qk-norm head --num-experts 128 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 768"
)


def config_of(words: str, world: int = 1) -> Config:
    line = f"{words} --seq-length 4096 --max-position-embeddings 4096 --data-path none --device cpu"
    return parse(line.split(), world_size=world, env={}, family="llama")


def by_hand(h: int, layers: int, heads: tuple[int, int, int], experts: tuple[int, int, int], v: int) -> tuple[int, int]:
    """Return total and active parameters: attention, router and two norms of a layer, its experts; two tables, a norm.

    Args:
        heads: size of all queries and of all keys together, parameters of their norms.
        experts: their number, how many of them a token goes through, their size.
    """
    queries, keys, norms = heads
    number, k, f = experts
    beside = layers * (2 * h * (queries + keys) + norms + 2 * h + number * h) + 2 * v * h + h
    return beside + layers * number * 3 * h * f, beside + layers * k * 3 * h * f


BY_HAND = by_hand(4096, 32, (4096, 1024, 0), (8, 2, 14336), 32000)
"""Of Mixtral."""


@pytest.mark.parametrize(
    ("words", "counts", "published"),
    [
        (MIXTRAL, BY_HAND, (46.7, 12.9)),
        (QWEN3_30B_A3B, by_hand(2048, 48, (4096, 512, 2 * 128), (128, 8, 768), 151936), (30.5, 3.3)),
    ],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B"],
)
def test_total_and_active_parameters_are_those_that_are_published(
    words: str, counts: tuple[int, int], published: tuple[float, float]
) -> None:
    """Jiang et al. 2024, "Mixtral of experts"; Qwen team 2025, "Qwen3 technical report", table 2."""
    costs = costs_of(config_of(words))
    assert (costs.num_parameters, costs.num_active_parameters) == counts
    assert [abs(count / 1e9 - size) < 0.06 for count, size in zip(counts, published, strict=True)] == [True, True]
    four = costs_of(config_of(f"{words} --expert-model-parallel-size 4", 4))
    assert (four.num_parameters, four.num_active_parameters) == counts, "whichever rank has them"
    assert four.flops_per_sample == costs.flops_per_sample


def test_flops_and_mfu_count_active_parameters() -> None:
    """6 FLOPs of each that is in a product, and of scores 6 L a d s; the input table is in none."""
    config = config_of(MIXTRAL)
    total, active = BY_HAND
    of_token = 6 * (active - 32000 * 4096) + 6 * 32 * 4096 * 4096
    assert costs_of(config).flops_per_sample == 4096 * of_token
    assert Rates(config, 1e12, [total]).flops_per_sample == 4096 * of_token


SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 24, "max_position_embeddings": 16,
    "kv_hidden_size": 8, "ff_hidden_size": 32, "hidden_bias": False, "num_experts": 8, "moe_ffn_hidden_size": 16,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "with losses": {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05, "activation": "gated-silu"},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk": 4, "activation": "relu"},
    "sigmoid, shared, gate": {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_z_loss_coeff": 0.05,
        "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True, "activation": "gated-silu",
    },
    "first dense": {"moe_layer_freq": "[0,1]", "moe_shared_expert_intermediate_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_parameters_are_those_of_the_model_that_is_built_on_every_rank(name: str) -> None:
    sizes = ModelConfig(**{**SIZES, **KINDS[name]})
    for tensor, ranks, cuts in ((1, 1, True), (2, 1, True), (1, 4, True), (2, 2, True), (2, 2, False)):
        place = ParallelContext(
            Group(tuple(range(tensor)), 0), expert=Group(tuple(range(ranks)), 0), cuts_experts=cuts,
            sequence_parallel=not cuts,
        )  # fmt: skip
        model = DecoderModel(model_args_from(sizes), place)
        costs = DecoderCosts(sizes, 16, expert=ranks, cuts_experts=cuts)
        assert costs.stage_parameters([0, 5], tensor) == [sum(each.numel() for each in model.parameters())]
        apart = sum(each.numel() for key, each in model.named_parameters() if ".experts." in key) * (ranks > 1)
        assert costs.stage_apart([0, 5], tensor) == [apart]
        assert costs.num_parameters == DecoderCosts(sizes, 16).num_parameters


# What a half keeps for its backward: what autograd holds, and the lists of rows that operations remember.


@contextmanager
def lists_kept() -> Iterator[list[torch.Tensor]]:
    """Yield the orders and places that are made within."""
    found: list[torch.Tensor] = []

    def recorded(kind: type[Slots] | type[Exchange]) -> Any:
        make = kind.of

        def of(*args: Any, **how: Any) -> Any:
            made = make(*args, **how)
            found.extend((made.order, made.place))
            return made

        return patch.object(kind, "of", of)

    with recorded(Slots), recorded(Exchange):
        yield found


def half_of(ranks: int, rank: int, dtype: torch.dtype, **settings: Any) -> MoE:
    """Return the experts of a rank, all of whose tokens go to each in turn."""
    place = ParallelContext()
    if ranks > 1:
        place = ParallelContext(expert=build_grid(Topology(pipe=1, data=ranks, tensor=1, expert=ranks), rank).expert)
    moe = MoE(ModelArgs(**{**SIZES, **settings}), place, MLP)
    parameters.initialize(moe.named_parameters(), seed=3, rule=parameters.gpt2_rule(0.5, 1))
    return moe.to(dtype)


FIRST_OF = router.first_of


def even(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Stand for ``router.first_of``: what it keeps, and an even load."""
    found = FIRST_OF(scores, number)
    numbers = torch.arange(found.numel()).view(found.shape)
    return found.copy_(numbers % scores.shape[-1])


def kept_bytes(rank: int, ranks: int) -> dict[tuple[str, torch.dtype], int]:
    """Return the bytes that a half of each kind keeps on a rank."""
    found = {}
    for name, dtype in product(KINDS, (torch.float32, torch.bfloat16)):
        moe, x = half_of(ranks, rank, dtype, **KINDS[name]), torch.randn(16, 2, 32, dtype=dtype, requires_grad=True)
        with patch.object(router, "first_of", even), lists_kept() as lists, bytes_kept(moe) as kept:
            y = moe(x)
        del y
        kept |= {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in lists}
        found[name, dtype] = sum(kept.values())
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_half_keeps_what_is_counted(ranks: int) -> None:
    """But for some numbers of a token: sums that it is divided by, log-sum-exps, what weights were ahead of a scale."""
    for found in [kept_bytes(0, 1)] if ranks == 1 else run_ranks(ranks, kept_bytes, ranks):
        for (name, dtype), kept in found.items():
            costs = DecoderCosts(ModelConfig(**{**SIZES, **KINDS[name]}), 16, expert=ranks)
            read = 32 * 32 * dtype.itemsize
            counted = read + costs.experts.kept(32, 1, dtype.itemsize)
            assert abs(counted / kept - 1) < 0.025, (name, dtype, counted, kept)


# Rows on their way.

COUNTS = [[9, 0, 3, 1, 4, 4, 5, 6], [0, 0, 0, 32, 0, 0, 0, 0]]
"""Of 16 tokens with two choices, on each of two ranks."""


@contextmanager
def rows_sent(rank: int) -> Iterator[list[int]]:
    """Yield the bytes of each all-to-all within that go to other ranks."""
    found: list[int] = []
    call = dist.all_to_all_single

    def counted(output: Any, rows: Any, takes: list[int], gives: list[int], **how: Any) -> Any:
        found.append((sum(gives) - gives[rank]) * rows[:1].nbytes)
        return call(output, rows, takes, gives, **how)

    with patch.object(dist, "all_to_all_single", counted):
        yield found


LOADS = ("even", "recomputed", "uneven")


def sent_bytes(rank: int) -> dict[str, list[int]]:
    """Return what a forward and a backward of a half send."""
    own = torch.tensor([e for e, number in enumerate(COUNTS[rank]) for _ in range(number)]).view(16, 1, 2)
    found = {}
    for load in LOADS:
        moe, x = half_of(2, rank, torch.float32), torch.randn(16, 1, 32, requires_grad=True)
        choose = (lambda scores, number: own) if load == "uneven" else even
        with patch.object(router, "first_of", choose), rows_sent(rank) as found[load]:
            y = checkpoint(moe.place.streams, moe, x) if load == "recomputed" else moe(x)
            y.sum().backward()
    return found


@pytest.fixture(scope="module")
def sent() -> list[dict[str, list[int]]]:
    return run_ranks(2, sent_bytes)


@pytest.mark.parametrize(("load", "times"), [("even", 4), ("recomputed", 6)])
def test_an_even_load_sends_what_the_planner_says(load: str, times: int, sent: list[dict[str, list[int]]]) -> None:
    costs = DecoderCosts(ModelConfig(**{**SIZES, "num_layers": 1}), 16, expert=2)
    layout = Layout(data=2, expert=2, dtype="fp32", recompute="full" if times == 6 else "none")
    every = [one.bytes for one in Messages(costs, device("h100-80g")).experts(layout)]
    assert every == [0, times * 16 * 2 * 32 * 4 / 2, 0, 0]
    for found in sent:
        assert sum(found[load]) == every[1] and len(found[load]) == times


def test_an_uneven_load_sends_the_rows_of_others_there_and_back(sent: list[dict[str, list[int]]]) -> None:
    assert [sum(found["uneven"]) for found in sent] == [exchanged_bytes(COUNTS, rank, 32, 4) for rank in range(2)]
    assert exchanged_bytes(COUNTS, 0, 32, 4) == 2 * (19 + 32) * 32 * 4
    assert exchanged_bytes([[4] * 8] * 2, 1, 32, 4) == sum(sent[1]["even"])


def counted_parameters(rank: int, words: str) -> list[int]:
    config = parse(words.split(), world_size=2, family="llama").with_vocab(24)
    here = initialize.start(config)
    module = DecoderModel(model_args_from(config.model), ParallelContext(expert=here.grid.expert))
    return count_parameters(module, here)


def test_the_start_table_counts_the_experts_of_all_ranks() -> None:
    """Else the run would not know its model, and count FLOPs of as many parameters as a rank has."""
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --num-experts 8 --data-path none "
        "--moe-ffn-hidden-size 16 --device cpu --expert-model-parallel-size 2"
    )
    costs = costs_of(parse(words.split(), world_size=2, family="llama").with_vocab(24))
    for total, held in run_ranks(2, counted_parameters, words):
        assert total == costs.num_parameters and [held] == costs.stage_parameters([0, 5])
        assert held < total


# States of experts that ranks share out are cut over those with the same alone.


@pytest.mark.parametrize(("dtype", "whole", "shared"), [("bf16", 6, 12), ("fp32", 8, 8)])
def test_states_of_experts_are_cut_over_their_replicas(dtype: str, whole: int, shared: int) -> None:
    costs = DecoderCosts(ModelConfig(**SIZES), 16, expert=4)
    (memory,) = costs.memory_per_stage([0, 5], micro_batch_size=1, dtype=dtype, zero=Zero(1, 8))
    (held,), (apart,) = costs.stage_parameters([0, 5]), costs.stage_apart([0, 5])
    assert memory.weights + memory.gradients + memory.optimizer == (
        whole * held + shared * (held - apart) // 8 + shared * apart // 2
    )
    alone = State.of(dtype, "adamw").memory(held, 0, 0, Zero(1, 4), apart=apart, ranks=4)
    assert alone.optimizer == shared * (held - apart) // 4 + shared * apart, "nobody else has these experts"
    (plain,) = costs.memory_per_stage([0, 5], micro_batch_size=1, dtype=dtype, zero=Zero(0, 8))
    assert plain.optimizer == shared * held


def test_a_backward_holds_the_gradients_of_all_weights_of_a_product() -> None:
    """Of many experts with few rows more than what was kept; with several ranks those of a rank's experts."""
    sizes = ModelConfig(**{**SIZES, "activation": "gated-silu"})
    for ranks in (1, 2):
        work = DecoderCosts(sizes, 1, expert=ranks).experts.work(1, 1, 4)
        assert work == 4 * (32 + 2 * 16 * 32 * 8 // ranks + 2 * 16 * (2 - 4))
    rows = DecoderCosts(sizes, 10**4).experts.work(10**4, 1, 4)
    assert rows == 4 * 10**4 * (32 + 2 * 2 * 32), "two gradients of what went back"
