"""Weights of recurrent mixers: initial values, weight decay, matrices for Muon, and names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megatron.config.layer_types import GATED_DELTA_NET, KIMI_DELTA, MAMBA2
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.models.common.recurrent_mixers import make_recurrent_mixer
from megatron.mpu.groups import Group
from megatron.mpu.matrices import matrices_of
from megatron.mpu.shard import shard_of
from megatron.optim.param_groups import decay_groups, muon_groups
from tests.models.common.test_features import MODEL_FIELDS

SIZES: dict[str, Any] = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_num_heads": 64, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 8,
}  # fmt: skip
VARIANTS = {GATED_DELTA_NET: "gated_delta_net", KIMI_DELTA: "kimi_delta", MAMBA2: "mamba2"}
CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((mixer, {}) for mixer in VARIANTS), (KIMI_DELTA, {"linear_full_rank_gates": True}),
    (MAMBA2, {"mamba_proj_bias": True, "mamba_num_groups": 1}),
]  # fmt: skip


def make_mixer(mixer: str, changes: dict[str, Any], rank: int = 0, num_ranks: int = 1) -> torch.nn.Module:
    """Return a mixer on one tensor rank with its initial values."""
    fields = {**MODEL_FIELDS, "experimental_attention_variant": VARIANTS[mixer], **SIZES, **changes}
    parallel = ParallelContext(Group(tuple(range(num_ranks)), rank))
    module = make_recurrent_mixer(mixer, ModelArgs(**fields), parallel, 0)
    named = [(f"layers.0.recurrent.{name}", parameter) for name, parameter in module.named_parameters()]
    initialize(named, seed=3, rule=gpt2_rule(0.1, 2))
    return module


@pytest.mark.parametrize(("mixer", "changes"), CHANGES)
def test_initial_values_do_not_depend_on_tensor_ranks(mixer: str, changes: dict[str, Any]) -> None:
    full = dict(make_mixer(mixer, changes).named_parameters())
    for rank in range(2):
        for name, parameter in make_mixer(mixer, changes, rank, 2).named_parameters():
            assert torch.equal(parameter, shard_of(parameter).narrow(full[name])), name


@pytest.mark.parametrize(("mixer", "changes"), CHANGES)
def test_initial_values_have_the_distributions_of_the_published_models(mixer: str, changes: dict[str, Any]) -> None:
    values = {name: parameter.detach().double() for name, parameter in make_mixer(mixer, changes).named_parameters()}
    rates = values.pop("A_log").exp()
    assert 0.0 < rates.min() < rates.max() <= 16.0 and rates.max() > 8.0
    if "dt_bias" in values:
        steps = F.softplus(values.pop("dt_bias"))
        assert (steps >= 1e-4).all() and steps.max() <= 0.1 + 1e-6 and 0.005 < steps.log().mean().exp() < 0.02
    convolution = torch.cat([values.pop(name).flatten() for name in list(values) if is_convolution(name, values)])
    assert convolution.abs().max() <= 0.5 and abs(float(convolution.std()) - 0.5 / math.sqrt(3)) < 0.03
    for name, value in values.items():
        if value.dim() == 2:
            expected = 0.1 / 2 if name == "dense.weight" else 0.1
            assert abs(float(value.std()) - expected) < 0.25 * expected, name
        else:
            assert torch.equal(value, torch.zeros_like(value) if "bias" in name else torch.ones_like(value)), name


def is_convolution(name: str, values: dict[str, torch.Tensor]) -> bool:
    return name.startswith("convolution.") and values[name].dim() == 2


@pytest.mark.parametrize(("mixer", "changes"), CHANGES)
def test_vectors_have_no_weight_decay_and_only_projections_are_matrices(mixer: str, changes: dict[str, Any]) -> None:
    module = make_mixer(mixer, changes)
    names = {parameter: name for name, parameter in module.named_parameters()}
    decayed, plain = decay_groups(module.parameters(), 0.1)
    without_decay = {names[parameter] for parameter in plain["params"]}
    assert plain["weight_decay"] == 0.0 and decayed["weight_decay"] == 0.1
    assert {"A_log", *(["dt_bias"] if mixer != MAMBA2 else ["dt_bias", "D"])} <= without_decay
    assert all(names[parameter].endswith("norm.weight") or "bias" in names[parameter] or names[parameter] in
               ("A_log", "D") for parameter in plain["params"])  # fmt: skip
    is_muon = {
        names[parameter]: group["is_muon"]
        for group in muon_groups(decay_groups(module.parameters(), 0.1))
        for parameter in group["params"]
    }
    for name, parameter in module.named_parameters():
        is_projection = parameter.dim() == 2 and not name.startswith("convolution.")
        assert is_muon[name] == is_projection == (matrices_of(parameter) is not None), name
