"""Costs of multi-token prediction: parameters of the model that is built, FLOPs of its products, memory, stages."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ModelConfig
from megatron.costs.decoder_cost import DecoderCosts
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "vocab_size": 24, "max_position_embeddings": 16,
    "kv_hidden_size": 6, "ff_hidden_size": 10, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "activation": "gated-silu",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"untie_embeddings": True},
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layer_freq": "[0,1]", "untie_embeddings": True},
    "both norms": {"norm_placement": "both", "qk_norm": "head", "num_query_groups": 2},
}


def make_costs(**changes: Any) -> DecoderCosts:
    return DecoderCosts(ModelConfig(**{**SIZES, **changes}), 8)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_match_built_model(variant: str, tensor: int) -> None:
    config = ModelConfig(**{**SIZES, **VARIANTS[variant], "mtp_num_layers": 2})
    model = DecoderModel(model_args_from(config), ParallelContext(Group(tuple(range(tensor)), 0)))
    costs = DecoderCosts(config, 8)
    num_built = sum(parameter.numel() for parameter in model.parameters())
    assert costs.stage_parameters([0, costs.num_units], tensor) == [num_built]
    if tensor == 1:
        assert costs.num_parameters == num_built
        inactive = 3 * 2 * 3 * 12 * 8 if variant == "experts" else 0  # 3 layers with 2 of 4 experts unused
        assert costs.num_active_parameters == num_built - inactive


@pytest.mark.parametrize("variant", VARIANTS)
def test_last_stage_has_a_copy_of_the_word_embedding(variant: str) -> None:
    costs = make_costs(**VARIANTS[variant], mtp_num_layers=1)
    first, last = costs.stage_parameters([0, 2, costs.num_units])
    assert first + last - costs.num_parameters == 24 * 12


def test_units_are_in_the_order_of_the_pipeline() -> None:
    assert make_costs(mtp_num_layers=2).unit_names == [
        "embedding", "layer 0", "layer 1", "final norm", "MTP embedding", "MTP layer 0", "MTP layer 1", "head",
    ]  # fmt: skip
    costs = make_costs(mtp_num_layers=2, num_experts=4, moe_ffn_hidden_size=8)
    num_units = costs.num_units
    for values in (
        costs.unit_costs,
        costs.unit_parameters(),
        costs.unit_saved_bytes(2, 1, 4),
        costs.unit_work(2, 1, 4),
        costs.distributed_parameters(),
        costs.expert_messages(2, 1, 4),
        costs.with_expert_ranks(2).expert_messages(2, 1, 4),
    ):
        assert len(values) == num_units == 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_of_units_match_flops_of_the_model(variant: str) -> None:
    """Norms, which products do not include, count 6 FLOPs a parameter in the model's formula."""
    costs, plain = (make_costs(**VARIANTS[variant], mtp_num_layers=depth) for depth in (2, 0))
    added_by_units = 3 * sum(work.flops for work in costs.unit_work(1, 1, 4)) - 3 * sum(
        work.flops for work in plain.unit_work(1, 1, 4)
    )
    head_norms = 2 * 6 if variant == "both norms" else 0
    norms = 2 * ((3 + costs.num_norms(0)) * 12 + head_norms)
    added = (costs.flops_per_token() - plain.flops_per_token()) * 8
    assert added == pytest.approx(added_by_units + 6 * 8 * norms)
    # a layer like the last one, a projection of 2 h h, and the head for each
    head_and_projection = 2 * 6 * (24 * 12 + 2 * 12 * 12)
    assert costs.flops_per_token() - plain.flops_per_token() > head_and_projection


def test_recompute_saves_one_input_for_each_mtp_layer() -> None:
    costs = make_costs(mtp_num_layers=2)
    for unit in costs.mtp_units:
        saved = costs.unit_saved_bytes(2, 1, 4)[unit]
        assert saved.input == 2 * 8 * 12 * 4 < saved.full
    assert costs.loss_bytes(2, 1, 4) > make_costs().loss_bytes(2, 1, 4)
    assert costs.unit_saved_bytes(2, 1, 4)[-1].full == 3 * make_costs().unit_saved_bytes(2, 1, 4)[-1].full


@pytest.mark.parametrize(
    ("stages", "chunks", "placement"), [(2, 1, "loop"), (2, 2, "loop"), (2, 2, "v"), (4, 1, "loop")]
)
def test_mtp_layers_stay_on_last_virtual_stage(stages: int, chunks: int, placement: str) -> None:
    costs = make_costs(num_layers=8, mtp_num_layers=3)
    bounds = costs.stage_bounds(stages, chunks, placement)
    assert len(bounds) == stages * chunks + 1 and bounds[-1] == costs.num_units
    assert bounds[-2] <= 9
    plain = make_costs(num_layers=8).stage_bounds(stages, chunks, placement)
    assert 9 - bounds[-2] <= 9 - plain[-2]
