"""Weights that come to ZeRO 3 one by one: their parts alone are on the device, and the numbers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.mpu.groups import Group
from megatron.mpu.shard import shard_of
from megatron.optim import MixedPrecisionOptimizer, ParamInit, build_optimizer
from tests.helpers.alive import Alive
from tests.helpers.zero_parts import Model

DEVICE = torch.device("meta")
"""It counts as another device: what is put there has a shape and bytes, and no values."""
REPLICAS = Group((0, 1, 2), 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp64": {"dtype": torch.float64},
}


def make(param_init: ParamInit | None, **settings: Any) -> tuple[Model, MixedPrecisionOptimizer]:
    """Return the model and its optimizer on the second of three replicas, which are never asked."""
    module = Model()
    return module, build_optimizer(module.parameters(), zero_stage=3, data=REPLICAS, param_init=param_init, **settings)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_device_gets_the_parts_and_never_a_whole_weight(kind: str) -> None:
    plain, reference = make(None, **SETTINGS[kind])
    with Alive(DEVICE.type) as alive:
        module, optimizer = make(ParamInit(DEVICE, lambda parameter: None), **SETTINGS[kind])
        optimizer_of = {
            parameter: optimizer.main_param_of(parameter)
            for parameter in module.parameters()
            if parameter.requires_grad
        }
    there = {
        t.untyped_storage()._cdata: t.nbytes
        for p, m in optimizer_of.items()
        for t in (optimizer.store.persistent_storage(p), m)
        if t.device == DEVICE
    }
    largest = max(parameter.nbytes for parameter in module.parameters()) // 3
    assert alive.now() <= sum(there.values()) + 8 * len(optimizer_of), "and a number for each weight"
    assert alive.largest <= max(master.nbytes for master in optimizer_of.values()), "no whole weight was there"
    assert alive.peak <= alive.now() + 4 * largest, "and a part on its way"
    for (name, old), (_, new) in zip(plain.named_parameters(), module.named_parameters(), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype), name
        if not old.requires_grad:
            assert new.device.type == "cpu", "what is not trained is brought by others"
            continue
        for wanted, found in (
            (reference.main_param_of(old), optimizer_of[new]),
            (reference.store.persistent_storage(old), optimizer.store.persistent_storage(new)),
        ):
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
            assert found.device == DEVICE or found.equal(wanted), name
        assert new.device == DEVICE and (new.dim() == 0 or new.untyped_storage().nbytes() == new.element_size()), name
        assert shard_of(optimizer_of[new]) == shard_of(reference.main_param_of(old)), name


def test_weights_are_filled_once_before_they_are_cut() -> None:
    seen: list[str] = []
    names: dict[torch.nn.Parameter, str] = {}

    def fill(parameter: torch.nn.Parameter) -> None:
        seen.append(names[parameter])
        parameter.data.fill_(len(seen))

    module = Model()
    names.update({parameter: name for name, parameter in module.named_parameters()})
    optimizer = build_optimizer(
        module.parameters(), zero_stage=3, data=REPLICAS, param_init=ParamInit(torch.device("cpu"), fill)
    )
    assert sorted(seen) == sorted(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert bool((optimizer.main_param_of(parameter) == 1 + seen.index(name)).all()), name
            assert parameter.dim() == 0 or bool(parameter.isnan().all()), name


def test_other_stages_let_weights_lie_where_they_are() -> None:
    module = Model()
    param_init = ParamInit(DEVICE, lambda parameter: pytest.fail("it was asked to come"))
    build_optimizer(module.parameters(), zero_stage=1, data=REPLICAS, param_init=param_init)
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
