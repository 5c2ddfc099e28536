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
from megatron.planner.machine import gpu_machine
from megatron.planner.time_model import CommunicationModel
from megatron.training import initialize
from megatron.training.callbacks.speed_monitor import Rates
from megatron.training.start_table import count_parameters
from tests.helpers.count_bytes import count_saved_bytes
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


def make_config(flags: str, world_size: int = 1) -> Config:
    line = f"{flags} --seq-length 4096 --max-position-embeddings 4096 --data-path none --device cpu"
    return parse(line.split(), world_size=world_size, env={}, family="llama")


def count_by_hand(
    h: int, layers: int, heads: tuple[int, int, int], experts: tuple[int, int, int], v: int
) -> tuple[int, int]:
    """Return total and active parameters: attention, router and two norms of a layer, its experts; two tables, a norm.

    Args:
        heads: size of all queries and of all keys together, parameters of their norms.
        experts: their number, how many of them a token goes through, their size.
    """
    queries, keys, norms = heads
    num_experts, top_k, ffn_size = experts
    shared = layers * (2 * h * (queries + keys) + norms + 2 * h + num_experts * h) + 2 * v * h + h
    return shared + layers * num_experts * 3 * h * ffn_size, shared + layers * top_k * 3 * h * ffn_size


MIXTRAL_COUNTS = count_by_hand(4096, 32, (4096, 1024, 0), (8, 2, 14336), 32000)
"""Of Mixtral."""


@pytest.mark.parametrize(
    ("flags", "counts", "published"),
    [
        (MIXTRAL, MIXTRAL_COUNTS, (46.7, 12.9)),
        (QWEN3_30B_A3B, count_by_hand(2048, 48, (4096, 512, 2 * 128), (128, 8, 768), 151936), (30.5, 3.3)),
    ],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B"],
)
def test_parameter_counts_match_published_models(
    flags: str, counts: tuple[int, int], published: tuple[float, float]
) -> None:
    """Jiang et al. 2024, "Mixtral of experts"; Qwen team 2025, "Qwen3 technical report", table 2."""
    costs = costs_of(make_config(flags))
    assert (costs.num_parameters, costs.num_active_parameters) == counts
    assert [
        abs(count / 1e9 - published_count) < 0.06 for count, published_count in zip(counts, published, strict=True)
    ] == [True, True]
    sharded = costs_of(make_config(f"{flags} --expert-model-parallel-size 4", 4))
    assert (sharded.num_parameters, sharded.num_active_parameters) == counts, "whichever rank has them"
    assert sharded.flops_per_sample == costs.flops_per_sample


def test_flops_and_mfu_use_active_parameters() -> None:
    """6 FLOPs of each that is in a product, and of scores 6 L a d s; the input table is in none."""
    config = make_config(MIXTRAL)
    total, active = MIXTRAL_COUNTS
    per_token = 6 * (active - 32000 * 4096) + 6 * 32 * 4096 * 4096
    assert costs_of(config).flops_per_sample == 4096 * per_token
    assert Rates(config, 1e12, [total]).flops_per_sample == 4096 * per_token


MODEL_FIELDS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 24, "max_position_embeddings": 16,
    "kv_hidden_size": 8, "ff_hidden_size": 32, "hidden_bias": False, "num_experts": 8, "moe_ffn_hidden_size": 16,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "with losses": {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05, "activation": "gated-silu"},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk": 4, "activation": "relu"},
    "sigmoid, shared, gate": {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_z_loss_coeff": 0.05,
        "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True, "activation": "gated-silu",
    },
    "residual": {"moe_use_residual": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "residual, biases": {"moe_use_residual": True, "hidden_bias": True, "activation": "gated-silu"},
    "first dense": {"moe_layer_freq": "[0,1]", "moe_shared_expert_intermediate_size": 8},
    "biases": {
        "hidden_bias": True, "moe_shared_expert_intermediate_size": 8, "activation": "gated-quick-gelu",
        "activation_func_clamp_value": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_count_matches_built_model_on_every_rank(name: str) -> None:
    model_config = ModelConfig(**{**MODEL_FIELDS, **VARIANTS[name]})
    for tensor, num_ranks, expert_tensor in (
        (1, 1, 1),
        (2, 1, 2),
        (1, 4, 1),
        (2, 2, 2),
        (2, 2, 1),
        (2, 1, 1),
        (4, 2, 2),
    ):
        parallel = ParallelContext(
            Group(tuple(range(tensor)), 0),
            expert=Group(tuple(range(num_ranks)), 0),
            expert_tensor=Group(tuple(range(expert_tensor)), 0),
            sequence_parallel=expert_tensor < tensor,
        )
        model = DecoderModel(model_args_from(model_config), parallel)
        costs = DecoderCosts(model_config, 16, expert=num_ranks, expert_tensor=expert_tensor)
        assert costs.stage_parameters([0, 5], tensor) == [sum(parameter.numel() for parameter in model.parameters())]
        num_expert_parameters = sum(
            parameter.numel() for key, parameter in model.named_parameters() if ".experts." in key
        ) * (num_ranks > 1 or expert_tensor < tensor)
        assert costs.stage_distributed_parameters([0, 5], tensor) == [num_expert_parameters]
        assert costs.num_parameters == DecoderCosts(model_config, 16).num_parameters


# What a half keeps for its backward: what autograd holds, and the lists of rows that operations remember.


@contextmanager
def record_saved_lists() -> Iterator[list[torch.Tensor]]:
    """Yield the orders that are computed in the block, and their inverses."""
    saved: list[torch.Tensor] = []

    def patch_constructor(cls: type[Slots] | type[Exchange], name: str, inverse: str) -> Any:
        construct = getattr(cls, name)

        def recording_construct(*args: Any, **kwargs: Any) -> Any:
            result = construct(*args, **kwargs)
            saved.extend((result.order, getattr(result, inverse)))
            return result

        return patch.object(cls, name, recording_construct)

    with (
        patch_constructor(Slots, "from_experts", "slot_of_choice"),
        patch_constructor(Exchange, "from_counts", "inverse_order"),
    ):
        yield saved


def make_moe_layer(num_ranks: int, rank: int, dtype: torch.dtype, **settings: Any) -> MoE:
    """Return the experts of a rank, all of whose tokens go to each in turn."""
    parallel = ParallelContext()
    if num_ranks > 1:
        parallel = ParallelContext(
            expert=build_grid(Topology(pipe=1, data=num_ranks, tensor=1, expert=num_ranks), rank).expert
        )
    moe = MoE(ModelArgs(**{**MODEL_FIELDS, **settings}), parallel, MLP)
    parameters.initialize(moe.named_parameters(), seed=3, rule=parameters.gpt2_rule(0.5, 1))
    return moe.to(dtype)


ORIGINAL_TOP_INDICES = router.top_indices


def route_evenly(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Stand for ``router.top_indices``: save the same tensors, with an even load."""
    experts = ORIGINAL_TOP_INDICES(scores, top_k)
    order = torch.arange(experts.numel()).view(experts.shape)
    return experts.copy_(order % scores.shape[-1])


def saved_bytes(rank: int, num_ranks: int) -> dict[tuple[str, torch.dtype], int]:
    """Return the bytes that a half of each kind keeps on a rank."""
    totals = {}
    for name, dtype in product(VARIANTS, (torch.float32, torch.bfloat16)):
        moe, x = (
            make_moe_layer(num_ranks, rank, dtype, **VARIANTS[name]),
            torch.randn(16, 2, 32, dtype=dtype, requires_grad=True),
        )
        with (
            patch.object(router, "top_indices", route_evenly),
            record_saved_lists() as lists,
            count_saved_bytes(moe) as saved,
        ):
            y = moe(x)
        del y
        saved |= {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in lists}
        totals[name, dtype] = sum(saved.values())
    return totals


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_saved_bytes_match_moe_costs(num_ranks: int) -> None:
    """But for some numbers of a token: sums that it is divided by, log-sum-exps, what weights were ahead of a scale."""
    for totals in [saved_bytes(0, 1)] if num_ranks == 1 else run_ranks(num_ranks, saved_bytes, num_ranks):
        for (name, dtype), saved in totals.items():
            costs = DecoderCosts(ModelConfig(**{**MODEL_FIELDS, **VARIANTS[name]}), 16, expert=num_ranks)
            input_bytes = 32 * 32 * dtype.itemsize
            estimated = input_bytes + costs.experts.saved_bytes(32, 1, dtype.itemsize)
            assert abs(estimated / saved - 1) < 0.015, (name, dtype, estimated, saved)


# Rows on their way.

COUNTS = [[9, 0, 3, 1, 4, 4, 5, 6], [0, 0, 0, 32, 0, 0, 0, 0]]
"""Of 16 tokens with two choices, on each of two ranks."""


@contextmanager
def record_sent_bytes(rank: int) -> Iterator[list[int]]:
    """Yield the bytes of each all-to-all within that go to other ranks."""
    num_bytes: list[int] = []
    original_all_to_all = dist.all_to_all_single

    def recording_all_to_all(
        output: Any, rows: Any, output_splits: list[int], input_splits: list[int], **kwargs: Any
    ) -> Any:
        num_bytes.append((sum(input_splits) - input_splits[rank]) * rows[:1].nbytes)
        return original_all_to_all(output, rows, output_splits, input_splits, **kwargs)

    with patch.object(dist, "all_to_all_single", recording_all_to_all):
        yield num_bytes


LOADS = ("even", "recomputed", "uneven")


def sent_bytes(rank: int) -> dict[str, list[int]]:
    """Return what a forward and a backward of a half send."""
    choices = torch.tensor([expert_idx for expert_idx, count in enumerate(COUNTS[rank]) for _ in range(count)]).view(
        16, 1, 2
    )
    traffic = {}
    for load in LOADS:
        moe, x = make_moe_layer(2, rank, torch.float32), torch.randn(16, 1, 32, requires_grad=True)
        choose = (lambda scores, count: choices) if load == "uneven" else route_evenly
        with patch.object(router, "top_indices", choose), record_sent_bytes(rank) as traffic[load]:
            y = checkpoint(moe.parallel.streams, moe, x) if load == "recomputed" else moe(x)
            y.sum().backward()
    return traffic


@pytest.fixture(scope="module")
def traffic_by_rank() -> list[dict[str, list[int]]]:
    return run_ranks(2, sent_bytes)


@pytest.mark.parametrize(("load", "num_exchanges"), [("even", 4), ("recomputed", 6)])
def test_even_load_traffic_matches_planner(
    load: str, num_exchanges: int, traffic_by_rank: list[dict[str, list[int]]]
) -> None:
    costs = DecoderCosts(ModelConfig(**{**MODEL_FIELDS, "num_layers": 1}), 16, expert=2)
    layout = Layout(data=2, expert=2, dtype="fp32", recompute="full" if num_exchanges == 6 else "none")
    planned = [message.bytes for message in CommunicationModel(costs, gpu_machine("h100-80g")).expert_traffic(layout)]
    assert planned == [0, num_exchanges * 16 * 2 * 32 * 4 / 2, 0, 0]
    for traffic in traffic_by_rank:
        assert sum(traffic[load]) == planned[1] and len(traffic[load]) == num_exchanges


def test_uneven_load_traffic_counts_remote_rows_both_ways(traffic_by_rank: list[dict[str, list[int]]]) -> None:
    assert [sum(traffic["uneven"]) for traffic in traffic_by_rank] == [
        exchanged_bytes(COUNTS, rank, 32, 4) for rank in range(2)
    ]
    assert exchanged_bytes(COUNTS, 0, 32, 4) == 2 * (19 + 32) * 32 * 4
    assert exchanged_bytes([[4] * 8] * 2, 1, 32, 4) == sum(traffic_by_rank[1]["even"])


def count_rank_parameters(rank: int, flags: str, world_size: int) -> list[int]:
    config = parse(flags.split(), world_size=world_size, family="llama").with_vocab(24)
    world = initialize.start(config)
    grid = world.grid
    parallel = ParallelContext(
        grid.tensor,
        expert=grid.expert,
        expert_tensor=grid.expert_tensor,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    return count_parameters(DecoderModel(model_args_from(config.model), parallel), world)


SHARDED = "--model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 1"


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--expert-model-parallel-size 2", 2),
        (f"{SHARDED} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 --hidden-bias", 2),
        pytest.param(
            f"{SHARDED.replace('2', '4')} --expert-tensor-parallel-size 2 --hidden-bias", 4, marks=pytest.mark.slow
        ),
    ],
)
def test_startup_table_counts_experts_of_all_ranks(layout: str, world_size: int) -> None:
    """Else the run would not know its model, and count FLOPs of as many parameters as a rank has."""
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --num-experts 8 --data-path none "
        f"--moe-ffn-hidden-size 16 --device cpu {layout}"
    )
    config = parse(flags.split(), world_size=world_size, family="llama").with_vocab(24)
    costs, tensor = costs_of(config), config.parallel.model_parallel_size
    for total, num_local in run_ranks(world_size, count_rank_parameters, flags, world_size):
        assert total == costs.num_parameters and num_local < total
        assert tensor > 1 or [num_local] == costs.stage_parameters([0, 5])


# States of experts that ranks share out are cut over those with the same alone.


@pytest.mark.parametrize(("dtype", "full_bytes", "sharded_bytes"), [("bf16", 6, 12), ("fp32", 8, 8)])
def test_expert_states_are_sharded_over_replicas(dtype: str, full_bytes: int, sharded_bytes: int) -> None:
    costs = DecoderCosts(ModelConfig(**MODEL_FIELDS), 16, expert=4)
    (memory,) = costs.memory_per_stage([0, 5], micro_batch_size=1, dtype=dtype, zero=Zero(1, 8))
    (num_parameters,), (num_expert_parameters,) = (
        costs.stage_parameters([0, 5]),
        costs.stage_distributed_parameters([0, 5]),
    )
    assert memory.weights + memory.gradients + memory.optimizer == (
        full_bytes * num_parameters
        + sharded_bytes * (num_parameters - num_expert_parameters) // 8
        + sharded_bytes * num_expert_parameters // 2
    )
    sharded_over_experts = State.for_optimizer(dtype, "adamw").memory(
        num_parameters, 0, 0, Zero(1, 4), num_distributed=num_expert_parameters, copies=1
    )
    assert (
        sharded_over_experts.optimizer
        == sharded_bytes * (num_parameters - num_expert_parameters) // 4 + sharded_bytes * num_expert_parameters
    ), "nobody else has these experts"
    (plain,) = costs.memory_per_stage([0, 5], micro_batch_size=1, dtype=dtype, zero=Zero(0, 8))
    assert plain.optimizer == sharded_bytes * num_parameters


def test_expert_copies_of_a_tensor_group_share_states() -> None:
    """With 4 tensor ranks, 2 of which shard an expert, 8 replicas have 16 copies; over 4 expert ranks 4."""
    costs = DecoderCosts(ModelConfig(**MODEL_FIELDS), 16, expert_tensor=2)
    assert [costs.with_expert_ranks(ranks).expert_copies(8, 4) for ranks in (1, 4, 16)] == [16, 4, 1]
    (memory,) = costs.memory_per_stage([0, 5], micro_batch_size=1, dtype="bf16", tensor=4, zero=Zero(1, 8))
    (num_parameters,) = costs.stage_parameters([0, 5], 4)
    (num_experts,) = costs.stage_distributed_parameters([0, 5], 4)
    assert num_experts == 2 * 8 * 2 * 32 * 16 // 2
    assert memory.optimizer == -(-12 * (num_parameters - num_experts) // 8) + 12 * num_experts // 16


def test_backward_memory_counts_all_weight_grads() -> None:
    """Of many experts with few rows more than what was kept; with several ranks those of a rank's experts."""
    model_config = ModelConfig(**{**MODEL_FIELDS, "activation": "gated-silu"})
    for num_ranks in (1, 2):
        work = DecoderCosts(model_config, 1, expert=num_ranks).experts.scratch_bytes(1, 1, 4)
        assert work == 4 * (32 + 2 * 16 * 32 * 8 // num_ranks + 2 * 16 * (2 - 4))
    many_row_work = DecoderCosts(model_config, 10**4).experts.scratch_bytes(10**4, 1, 4)
    assert many_row_work == 4 * 10**4 * (32 + 2 * 2 * 32), "two gradients of what went back"
