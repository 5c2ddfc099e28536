"""Facts about a parameter: what they survive, and the attributes that others set or read."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.models.common.transformer import GatedLinear
from megatron.mpu.groups import Group
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.matrices import matrices_of, set_matrices
from megatron.mpu.shard import init_empty_weights, is_partial, is_uninitialized, materialize, set_partial, shard_of
from tds.gradients import is_reduced_by_optimizer, set_reduced_by_optimizer
from tds.param_info import (
    Matrices,
    ParamInfo,
    Shard,
    copy_attributes,
    copy_infos,
    excluded_from_broadcast,
    info_of,
    is_tensor_parallel,
    is_tied_copy,
    mark_tied_copy,
    set_info,
    set_shard,
)

PAIR = Group((0, 1), 1)
UP, DOWN = Shard((8, 4), 0, 4, 4), Shard((4, 8), 1, 4, 4)


def make_layers() -> nn.Sequential:
    up, down = ColumnParallelLinear(4, 8, group=PAIR), RowParallelLinear(8, 4, group=PAIR, sequence_parallel=True)
    set_reduced_by_optimizer(up.weight)
    return nn.Sequential(up, down)


def check_info(layers: nn.Module) -> None:
    up, down = layers
    assert info_of(up.weight) == ParamInfo(UP, Matrices(), is_expert=True, is_uninitialized=True)
    assert info_of(down.weight) == ParamInfo(DOWN, Matrices(), is_uninitialized=True)
    assert info_of(down.bias) == ParamInfo(Shard((4,)), has_partial_grad=True)
    assert (shard_of(up.bias), matrices_of(up.bias)) == (Shard((8,), 0, 4, 4), None)
    assert is_reduced_by_optimizer(up.weight) and is_partial(down.bias) and is_uninitialized(down.weight)


def test_info_of_unmarked_parameter_is_default() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    assert info_of(parameter) == ParamInfo() and shard_of(parameter) == Shard((3, 2))
    assert not is_partial(parameter) and not is_reduced_by_optimizer(parameter) and not is_tied_copy(parameter)
    assert vars(parameter) == {}


def test_info_survives_casts_and_data_assignment() -> None:
    layers = make_layers().to(torch.bfloat16).double()
    check_info(layers)
    for parameter in layers.parameters():
        parameter.data = torch.zeros(0)  # as ZeRO 3 releases a weight
        parameter.data = torch.ones(parameter.shape)
        parameter.requires_grad_(False)
    check_info(layers)


def test_info_survives_meta_device_and_materialization() -> None:
    with torch.device("meta"):
        check_info(make_layers())
    with init_empty_weights():
        layers = make_layers()
    check_info(layers)
    for parameter in layers.parameters():
        materialize(parameter)
    check_info(layers)


def test_info_is_copied_without_add_product() -> None:
    layers = make_layers()
    weight = layers[0].weight
    set_info(weight, replace(info_of(weight), add_product=lambda rows, inputs: None))
    copied = copy.deepcopy(layers)
    copy_infos(layers, copied)
    check_info(copied)
    assert is_tensor_parallel(copied[0].weight) and not is_tensor_parallel(copied[1].bias)


def test_info_is_pickled_with_module() -> None:
    file = io.BytesIO()
    torch.save(make_layers(), file)
    file.seek(0)
    check_info(torch.load(file, weights_only=False))


def test_compiled_layer_preserves_info() -> None:
    layer = GatedLinear(4, 8)
    info = info_of(layer.weight)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for actual, expected in zip(compiled(torch.ones(2, 4)), layer(torch.ones(2, 4)), strict=True):
        assert torch.equal(actual, expected)
    assert info_of(layer.weight) is info


@pytest.mark.parametrize("name", ["model_parallel", "tensor_model_parallel"])
def test_user_model_parallel_mark_is_read(name: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    setattr(parameter, name, True)
    assert is_tensor_parallel(parameter)
    with pytest.raises(ValueError, match="has model_parallel = True but no recorded shard"):
        shard_of(parameter)
    assert shard_of(set_shard(parameter, Shard((4,), 0, 0, 2))).is_partitioned


def test_user_sequence_parallel_mark_is_read() -> None:
    user_parameter, parameter = nn.Parameter(torch.zeros(2)), set_partial(nn.Parameter(torch.zeros(2)))
    user_parameter.sequence_parallel = True  # type: ignore[attr-defined]
    assert is_partial(user_parameter) and is_partial(parameter) and parameter.sequence_parallel  # type: ignore[attr-defined]


def test_deepspeed_attributes_are_set_and_copied() -> None:
    parameter, gradient = set_shard(nn.Parameter(torch.zeros(2)), Shard((4,), 0, 0, 2)), torch.zeros(2)
    mark_tied_copy(parameter, True)
    copy_attributes(parameter, gradient)
    for tensor in (parameter, gradient):
        assert (tensor.model_parallel, tensor.tensor_model_parallel, tensor.ds_pipe_replicated) == (True, True, True)
    with pytest.raises(KeyError), excluded_from_broadcast([parameter]):
        assert parameter.ds_optim_param
        raise KeyError
    assert not hasattr(parameter, "ds_optim_param")


def test_info_fields_are_combined() -> None:
    parameter = set_matrices(set_shard(nn.Parameter(torch.zeros(2, 4)), UP), (1, 1))
    set_partial(set_reduced_by_optimizer(parameter))
    assert info_of(parameter) == ParamInfo(UP, Matrices((1, 1)), has_partial_grad=True, is_expert=True)
