"""Logical names of parameters."""

import pytest
from torch import nn

from megatron.models.common.parameters import named_parameters


class Stage(nn.Sequential):
    """A stage whose first layer is layer 4 of the model."""

    def logical_name(self, local_name: str) -> str:
        index, suffix = local_name.split(".")
        return f"layers.{int(index) + 4}.{suffix}"


def test_model_without_logical_names_uses_local_names():
    model = nn.Sequential(nn.Linear(2, 2))
    assert [name for name, _ in named_parameters(model)] == ["0.weight", "0.bias"]


def test_stage_uses_names_of_full_model():
    model = Stage(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    named = dict(named_parameters(model))
    assert list(named) == ["layers.4.weight", "layers.4.bias", "layers.5.weight"]
    assert named["layers.5.weight"] is model[1].weight


def test_shared_parameter_is_yielded_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert [name for name, _ in named_parameters(model)] == ["0.weight"]


def test_rejects_duplicate_logical_names():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model.logical_name = lambda local_name: "w"
    with pytest.raises(ValueError, match="got w for 0.weight and 1.weight"):
        list(named_parameters(model))
