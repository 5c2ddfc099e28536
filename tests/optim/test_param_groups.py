"""Which parameters are decayed, and what the optimizer is."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from megatron.optim import build_optimizer
from megatron.optim.param_groups import decay_groups
from tests.helpers.model_samples import filled, place_of, small_sizes


def decayed_names(model):
    decayed, rest = decay_groups(model.parameters(), 0.3)
    assert decayed["weight_decay"] == 0.3 and rest["weight_decay"] == 0.0
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name_of[id(p)] for p in decayed["params"]}, {name_of[id(p)] for p in rest["params"]}


def test_biases_and_norms_are_left_out_of_weight_decay_on_any_number_of_ranks():
    whole = decayed_names(DecoderModel(small_sizes(untie_embeddings=True)))
    decayed, rest = whole
    assert all(name.endswith(".weight") and "norm" not in name for name in decayed)
    assert all(name.endswith(".bias") or "norm" in name for name in rest)
    assert len(decayed) == 2 * 4 + 3 and len(rest) == 2 * 8 + 2
    for rank in range(4):
        sizes = small_sizes(untie_embeddings=True)
        assert decayed_names(DecoderModel(sizes, place_of(Group((0, 1, 2, 3), rank)))) == whole


def test_a_shared_parameter_is_there_once_and_a_frozen_one_not_at_all():
    shared, frozen = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    groups = decay_groups([shared, frozen, shared], 0.1)
    assert [group["params"] for group in groups] == [[shared]]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd"])
def test_a_step_without_gradients_decays_weights_only(name):
    model = filled(DecoderModel(small_sizes())).double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model.parameters(), name=name, lr=0.1, weight_decay=0.5, dtype=torch.float64)
    optimizer.step()
    for n, parameter in model.named_parameters():
        factor = 1.0 - 0.1 * 0.5 if parameter.dim() == 2 else 1.0
        assert (parameter - factor * before[n]).abs().max() <= 1e-15, n


def test_settings_reach_torchs_optimizer():
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], lr=0.3, betas=(0.8, 0.7), epsilon=1e-3)
    settings = optimizer.inner.param_groups[0]
    assert (settings["lr"], settings["betas"], settings["eps"]) == (0.3, (0.8, 0.7), 1e-3)
    optimizer.param_groups[0]["lr"] = 0.01
    assert optimizer.inner.param_groups[0]["lr"] == 0.01, "a schedule writes to one list, which both read"


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="--optimizer must be adamw, adafactor, muon or sgd, got lion"):
        build_optimizer([], name="lion")
