"""Bytes and seconds of Muon: a momentum for each of a layer's matrices, and Newton-Schulz steps by their owners."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import parse
from megatron.config.newton_schulz import newton_schulz_flops
from megatron.costs.memory import State
from megatron.models import registry
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.mpu.matrices import matrices_of
from megatron.mpu.topology import Topology
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import device
from megatron.planner.time_model import Group, Messages
from megatron.training.dry_run import _muon_text

LINE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --activation gated-silu "
    "--ff-hidden-size 96 --seq-length 16 --max-position-embeddings 16 --vocab-size 100 --data-path none --device cpu"
).split()
SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "kv_hidden_size",
    "ff_hidden_size", "num_query_groups", "activation",
)  # fmt: skip
CONFIG = parse([*LINE, "--bf16", "--optimizer", "muon"], world_size=4).with_vocab(100)
MACHINE = device("h100-80g")


def test_a_layers_matrices_are_counted_as_the_model_has_them() -> None:
    sizes = {name: getattr(CONFIG.model, name) for name in SIZES}
    model = DecoderModel(ModelArgs(**sizes))
    held = [p.numel() for p in model.parameters() if matrices_of(p) is not None]
    costs = registry.costs_of(CONFIG)
    for stages in (1, 2):
        found = [sum(one.weights for one in own) for own in costs.stage_matrices(costs.stage_bounds(stages))]
        assert found == [sum(held) // stages] * stages


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_matrix_has_one_number_where_adamw_has_two(dtype: str) -> None:
    costs = registry.costs_of(CONFIG)
    bounds = [0, costs.num_units]
    how = {"micro_batch_size": 1, "dtype": dtype, "tensor": 2}
    (adamw,), (muon,) = (costs.memory_per_stage(bounds, optimizer=name, **how) for name in ("adamw", "muon"))
    matrices = sum(one.weights for one in costs.stage_matrices(bounds)[0]) // 2
    assert adamw.optimizer - muon.optimizer == 4 * matrices
    assert replace(adamw, optimizer=muon.optimizer) == muon
    assert State.of(dtype, "muon").optimizer == State.of(dtype, "adamw").optimizer


def test_newton_schulz_takes_the_time_of_its_products_shared_by_all_owners() -> None:
    planner = Planner(CONFIG, MACHINE)
    layout = replace(layout_of(CONFIG, 4), tensor=1, data=1, dtype="bf16")
    messages = Messages(planner.costs, MACHINE)
    products = planner.costs.stage_matrices([0, planner.costs.num_units])[0]
    sent, seconds = messages._orthogonalised(layout, products, Group.of(MACHINE, 1, 1, 1))
    flops = [newton_schulz_flops(one.inner, one.columns) for one in products]
    slowest = min(rate for _, rate in MACHINE.product_flops["bf16"])
    assert 0 < seconds <= sum(flops) / slowest * (1 + 1e-9)
    assert sent.exposed_s == 0
    over_four = replace(layout, tensor=2, data=2, zero_stage=1)
    sent, shared = messages._orthogonalised(over_four, products, Group.of(MACHINE, 2, 2, 4))
    assert shared == pytest.approx(seconds / 4)
    own = 2 * sum(one.weights for one in products) / 4
    assert sent.bytes == pytest.approx(4 * own / 2), "to owners and back, over two groups of two"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_by_muon_is_shared_by_the_replicas_of_zero(stage: int) -> None:
    """Each replica updates its part: what AdamW and Muon read and write, and the state that Muon does not have."""
    planner = Planner(CONFIG, MACHINE)
    messages, state, held, matrices = Messages(planner.costs, MACHINE), State.of("bf16", "muon"), 1000, 800
    layout = replace(layout_of(CONFIG, 4), tensor=1, data=4, dtype="bf16", zero_stage=stage)
    moved = held * (2 * (state.width + state.optimizer) + 2 * state.gradient) - 2 * state.saved * matrices
    replicas = 4 if stage else 1
    expected = pytest.approx(moved / MACHINE.update_bandwidth / replicas)
    assert messages._update(layout, held, 0, state, matrices) == expected


def test_the_start_table_names_what_muon_moves() -> None:
    text = _muon_text(CONFIG, Topology(pipe=1, data=2, tensor=2))
    assert text.startswith(
        "Muon for 123k parameters in matrices of layers (momentum 0.95, match_rms_adamw), AdamW for all"
    )
    assert text.endswith("by 4 owners of full matrices on each stage")
    assert "owners" not in _muon_text(CONFIG, Topology(pipe=2, data=1, tensor=1))
