"""Which parameters are decayed, and what the optimizer is."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from megatron.optim import build_optimizer
from megatron.optim.param_groups import decay_groups
from tests.helpers.model_samples import fill_weights, make_parallel_context, small_model_args


def decayed_names(model):
    decayed, undecayed = decay_groups(model.parameters(), 0.3)
    assert decayed["weight_decay"] == 0.3 and undecayed["weight_decay"] == 0.0
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name_of[id(p)] for p in decayed["params"]}, {name_of[id(p)] for p in undecayed["params"]}


def test_biases_and_norms_are_not_decayed_on_any_rank():
    expected = decayed_names(DecoderModel(small_model_args(untie_embeddings=True)))
    decayed, undecayed = expected
    assert all(name.endswith(".weight") and "norm" not in name for name in decayed)
    assert all(name.endswith(".bias") or "norm" in name for name in undecayed)
    assert len(decayed) == 2 * 4 + 3 and len(undecayed) == 2 * 8 + 2
    for rank in range(4):
        args = small_model_args(untie_embeddings=True)
        assert decayed_names(DecoderModel(args, make_parallel_context(Group((0, 1, 2, 3), rank)))) == expected


def test_shared_parameter_appears_once_and_frozen_not_at_all():
    shared, frozen = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    groups = decay_groups([shared, frozen, shared], 0.1)
    assert [group["params"] for group in groups] == [[shared]]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd"])
def test_step_without_gradients_decays_only_weights(name):
    model = fill_weights(DecoderModel(small_model_args())).double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model.parameters(), name=name, lr=0.1, weight_decay=0.5, dtype=torch.float64)
    optimizer.step()
    for n, parameter in model.named_parameters():
        factor = 1.0 - 0.1 * 0.5 if parameter.dim() == 2 else 1.0
        assert (parameter - factor * before[n]).abs().max() <= 1e-15, n


def test_settings_reach_torch_optimizer():
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], lr=0.3, betas=(0.8, 0.7), epsilon=1e-3)
    settings = optimizer.inner.param_groups[0]
    assert (settings["lr"], settings["betas"], settings["eps"]) == (0.3, (0.8, 0.7), 1e-3)
    optimizer.param_groups[0]["lr"] = 0.01
    assert optimizer.inner.param_groups[0]["lr"] == 0.01, "a schedule writes to one list, which both read"


def test_unknown_optimizer_is_rejected():
    with pytest.raises(ValueError, match="--optimizer must be adamw, adafactor, muon or sgd, got lion"):
        build_optimizer([], name="lion")
