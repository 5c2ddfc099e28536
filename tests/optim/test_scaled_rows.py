"""ParamStore.scale_rows on the shards of each replica."""

from __future__ import annotations

import pytest
import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard, set_shard
from megatron.optim.param_store import ParamStore


@pytest.mark.parametrize("shape", [(48, 8), (48,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_replica_scales_its_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values, factors = torch.randn(shape, dtype=torch.float64), torch.rand(48, dtype=torch.float64)
    expected = values * factors.view(-1, *[1] * (len(shape) - 1))
    scaled = []
    for group, zero_stage in ((SINGLE, 0), (Group((0, 1), 0), 1), (Group((0, 1), 1), 1)):
        store = ParamStore(group, zero_stage=zero_stage)
        parameter = torch.nn.Parameter(values.clone())
        main_param = store.register(parameter, dtype)
        store.scale_rows(parameter, factors.to(main_param.dtype))
        scaled.append(main_param.detach().double())
        if dtype == torch.bfloat16:
            assert torch.equal(parameter.detach().double(), values.bfloat16().double()), "only the main param changes"
    assert len(scaled[1]) < len(scaled[0])
    for actual in (scaled[0], torch.cat(scaled[1:])):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_columns_are_not_rows() -> None:
    """A weight that is sharded by columns has all rows on each replica."""
    values, factors = torch.randn(6, 32, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    parameter = set_shard(torch.nn.Parameter(values.clone()), Shard((6, 64), 1, 0, 32))
    store = ParamStore(Group((0, 1), 1), zero_stage=1)
    main_param = store.register(parameter, torch.float64)
    store.scale_rows(parameter, factors)
    torch.testing.assert_close(main_param.detach(), (values * factors[:, None])[:, 16:], rtol=1e-15, atol=0)


def test_frozen_parameter_is_not_scaled() -> None:
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    ParamStore().scale_rows(parameter, torch.zeros(3))
    assert torch.equal(parameter, torch.ones(3))
