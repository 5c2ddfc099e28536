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
from megatron.planner.machine import gpu_machine
from megatron.planner.time_model import CommunicationModel, Group
from megatron.training.dry_run import _muon_text

BASE_WORDS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --activation gated-silu "
    "--ff-hidden-size 96 --seq-length 16 --max-position-embeddings 16 --vocab-size 100 --data-path none --device cpu"
).split()
SIZE_FIELDS = (
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "kv_hidden_size",
    "ff_hidden_size", "num_query_groups", "activation",
)  # fmt: skip
CONFIG = parse([*BASE_WORDS, "--bf16", "--optimizer", "muon"], world_size=4).with_vocab(100)
MACHINE = gpu_machine("h100-80g")


def test_stage_matrices_match_model() -> None:
    values = {name: getattr(CONFIG.model, name) for name in SIZE_FIELDS}
    model = DecoderModel(ModelArgs(**values))
    matrix_numels = [p.numel() for p in model.parameters() if matrices_of(p) is not None]
    costs = registry.costs_of(CONFIG)
    for num_stages in (1, 2):
        weights_per_stage = [
            sum(matrix.weights for matrix in matrices)
            for matrices in costs.stage_matrices(costs.stage_bounds(num_stages))
        ]
        assert weights_per_stage == [sum(matrix_numels) // num_stages] * num_stages


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_muon_state_has_one_value_per_weight(dtype: str) -> None:
    costs = registry.costs_of(CONFIG)
    bounds = [0, costs.num_units]
    kwargs = {"micro_batch_size": 1, "dtype": dtype, "tensor": 2}
    (adamw,), (muon,) = (costs.memory_per_stage(bounds, optimizer=name, **kwargs) for name in ("adamw", "muon"))
    num_matrix_params = sum(matrix.weights for matrix in costs.stage_matrices(bounds)[0]) // 2
    assert adamw.optimizer - muon.optimizer == 4 * num_matrix_params
    assert replace(adamw, optimizer=muon.optimizer) == muon
    assert State.for_optimizer(dtype, "muon").optimizer == State.for_optimizer(dtype, "adamw").optimizer


def test_newton_schulz_time_is_shared_by_owners() -> None:
    planner = Planner(CONFIG, MACHINE)
    layout = replace(layout_of(CONFIG, 4), tensor=1, data=1, dtype="bf16")
    messages = CommunicationModel(planner.costs, MACHINE)
    products = planner.costs.stage_matrices([0, planner.costs.num_units])[0]
    traffic, seconds = messages._muon_update(layout, products, Group.on_machine(MACHINE, 1, 1, 1), 1)
    flops = [newton_schulz_flops(product.inner, product.columns) for product in products]
    slowest = min(rate for _, rate in MACHINE.product_flops["bf16"])
    assert 0 < seconds <= sum(flops) / slowest * (1 + 1e-9)
    assert traffic.exposed_s == 0
    four_owners = replace(layout, tensor=2, data=2, zero_stage=1)
    traffic, shared_seconds = messages._muon_update(four_owners, products, Group.on_machine(MACHINE, 2, 2, 4), 2)
    assert shared_seconds == pytest.approx(seconds / 4)
    owned_bytes = 2 * sum(product.weights for product in products) / 4
    assert traffic.bytes == pytest.approx(4 * owned_bytes / 2), "to owners and back, over two groups of two"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_update_is_sharded_with_zero(stage: int) -> None:
    """Each replica reads and writes its shard in the update; matrices lack the second moment of AdamW."""
    planner = Planner(CONFIG, MACHINE)
    messages, state, num_params, num_matrix_params = (
        CommunicationModel(planner.costs, MACHINE),
        State.for_optimizer("bf16", "muon"),
        1000,
        800,
    )
    layout = replace(layout_of(CONFIG, 4), tensor=1, data=4, dtype="bf16", zero_stage=stage)
    num_bytes = (
        num_params * (2 * (state.width + state.optimizer) + 2 * state.gradient) - 2 * state.saved * num_matrix_params
    )
    num_replicas = 4 if stage else 1
    expected = pytest.approx(num_bytes / MACHINE.update_bandwidth / num_replicas)
    assert messages._update(layout, num_params, 0, state, num_matrix_params) == expected


def test_start_table_describes_muon() -> None:
    text = _muon_text(CONFIG, Topology(pipe=1, data=2, tensor=2))
    assert text.startswith(
        "Muon for 123k parameters in matrices of layers (momentum 0.95, match_rms_adamw), AdamW for all"
    )
    assert text.endswith("by 4 owners of full matrices on each stage")
    assert "owners" not in _muon_text(CONFIG, Topology(pipe=2, data=1, tensor=1))
