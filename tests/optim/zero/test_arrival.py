"""``ParamInit``: ZeRO 3 initializes weights one by one, only shards are on the device, and values do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.mpu.groups import Group
from megatron.mpu.shard import shard_of
from megatron.optim import MixedPrecisionOptimizer, ParamInit, build_optimizer
from tests.helpers.alive import LiveMemoryTracker
from tests.helpers.zero_parts import Model

DEVICE = torch.device("meta")
"""Represents an accelerator: tensors on it have shapes and sizes, but no values."""
REPLICAS = Group((0, 1, 2), 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp64": {"dtype": torch.float64},
}


def make_model(param_init: ParamInit | None, **settings: Any) -> tuple[Model, MixedPrecisionOptimizer]:
    """Return the model and its optimizer on the second of three replicas, without communication."""
    module = Model()
    return module, build_optimizer(module.parameters(), zero_stage=3, data=REPLICAS, param_init=param_init, **settings)


@pytest.mark.parametrize("precision", SETTINGS)
def test_device_holds_only_weight_shards(precision: str) -> None:
    plain, reference = make_model(None, **SETTINGS[precision])
    with LiveMemoryTracker(DEVICE.type) as alive:
        module, optimizer = make_model(ParamInit(DEVICE, lambda parameter: None), **SETTINGS[precision])
        main_params = {
            parameter: optimizer.main_param_of(parameter)
            for parameter in module.parameters()
            if parameter.requires_grad
        }
    device_bytes = {
        t.untyped_storage()._cdata: t.nbytes
        for p, main in main_params.items()
        for t in (optimizer.store.persistent_storage(p), main)
        if t.device == DEVICE
    }
    largest_shard_bytes = max(parameter.nbytes for parameter in module.parameters()) // 3
    assert alive.live_bytes() <= sum(device_bytes.values()) + 8 * len(main_params), (
        "in addition, one element for each weight"
    )
    assert alive.largest_bytes <= max(main_param.nbytes for main_param in main_params.values()), (
        "no full weight is on the device"
    )
    assert alive.peak_bytes <= alive.live_bytes() + 4 * largest_shard_bytes, "in addition, shards that are being copied"
    for (name, old), (_, new) in zip(plain.named_parameters(), module.named_parameters(), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype), name
        if not old.requires_grad:
            assert new.device.type == "cpu", "frozen weights are moved by other code"
            continue
        for expected, actual in (
            (reference.main_param_of(old), main_params[new]),
            (reference.store.persistent_storage(old), optimizer.store.persistent_storage(new)),
        ):
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
            assert actual.device == DEVICE or actual.equal(expected), name
        assert new.device == DEVICE and (new.dim() == 0 or new.untyped_storage().nbytes() == new.element_size()), name
        assert shard_of(main_params[new]) == shard_of(reference.main_param_of(old)), name


def test_weights_are_initialized_once_before_sharding() -> None:
    filled_names: list[str] = []
    names: dict[torch.nn.Parameter, str] = {}

    def fill(parameter: torch.nn.Parameter) -> None:
        filled_names.append(names[parameter])
        parameter.data.fill_(len(filled_names))

    module = Model()
    names.update({parameter: name for name, parameter in module.named_parameters()})
    optimizer = build_optimizer(
        module.parameters(), zero_stage=3, data=REPLICAS, param_init=ParamInit(torch.device("cpu"), fill)
    )
    assert sorted(filled_names) == sorted(
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert bool((optimizer.main_param_of(parameter) == 1 + filled_names.index(name)).all()), name
            assert parameter.dim() == 0 or bool(parameter.isnan().all()), name


def test_other_stages_do_not_move_weights() -> None:
    module = Model()
    param_init = ParamInit(DEVICE, lambda parameter: pytest.fail("a weight was initialized one by one"))
    build_optimizer(module.parameters(), zero_stage=1, data=REPLICAS, param_init=param_init)
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
