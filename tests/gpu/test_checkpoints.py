"""Checkpoints of what lies on a device: the bits of a CPU's, there and back, also while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import files
from megatron.checkpoint import AsyncSaver, CapturedState, open_latest, save
from megatron.mpu.groups import SINGLE
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from megatron.training.state_records import make_moments, optimizer_records, weight_records
from tests.gpu.families import FAMILIES, built, given, loss_of

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
FAMILY = FAMILIES["llama"]
Trained = tuple[torch.nn.Module, MixedPrecisionOptimizer]


def made(place: torch.device, dtype: torch.dtype) -> Trained:
    model = built(FAMILY, torch.float32, place)
    return model, build_optimizer(model.parameters(), dtype=dtype, lr=1e-2)


def train(trained: Trained, steps: int, place: torch.device) -> None:
    model, optimizer = trained
    for _ in range(steps):
        loss_of(model(**given(FAMILY, place))).backward()
        optimizer.end_micro_batch()
        optimizer.step()


def records_of(trained: Trained) -> list[Any]:
    return [*weight_records(*trained), *optimizer_records(*trained)]


def values_of(trained: Trained) -> dict[str, torch.Tensor]:
    return {record.name: record.tensor.detach().cpu().clone() for record in records_of(trained)}


def content(path: Path) -> dict[str, bytes]:
    return {child.name: child.read_bytes() for child in path.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_on_the_device_and_loaded_on_the_cpu_and_back_to_the_bit(
    tmp_path: Path, dtype: torch.dtype, place: torch.device
) -> None:
    trained = made(place, dtype)
    train(trained, 2, place)
    first = save(tmp_path / "device", 2, records_of(trained), {}, SINGLE)
    on_cpu = made(CPU, dtype)
    make_moments(on_cpu[1])
    open_latest(tmp_path / "device", SINGLE).load(records_of(on_cpu))
    on_cpu[1].copy_main_params_to_parameters()
    wanted = values_of(trained)
    assert wanted.keys() == values_of(on_cpu).keys() and any("exp_avg_sq" in name for name in wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in values_of(on_cpu).items())
    second = save(tmp_path / "cpu", 2, records_of(on_cpu), {}, SINGLE)
    assert content(first) == content(second), "the files themselves"
    back = made(place, dtype)
    make_moments(back[1])
    open_latest(tmp_path / "cpu", SINGLE).load(records_of(back))
    back[1].copy_main_params_to_parameters()
    assert all(torch.equal(value, wanted[name]) for name, value in values_of(back).items())
    for parameter, other in zip(back[0].parameters(), trained[0].parameters(), strict=True):
        assert parameter.device.type == place.type and torch.equal(parameter, other)


def test_a_save_in_the_background_has_the_values_of_its_time(
    tmp_path: Path, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = made(place, torch.bfloat16)
    train(trained, 1, place)
    wanted = values_of(trained)
    has_trained_on = threading.Event()
    monkeypatch.setattr(files, "before_operation", lambda operation, path: has_trained_on.wait(60))
    saver = AsyncSaver(SINGLE)
    saver.save(tmp_path, CapturedState(1, records_of(trained), {"step": 1}))
    train(trained, 2, place)
    assert saver.poll() is None, "no byte is written before the training has gone on"
    has_trained_on.set()
    durable = saver.finish()
    saver.close()
    assert durable is not None and durable.step == 1
    after = values_of(trained)
    assert any(not torch.equal(after[name], value) for name, value in wanted.items())
    checkpoint = open_latest(tmp_path, SINGLE)
    for record in records_of(trained):
        assert torch.equal(checkpoint.read(record.name, record.shard), wanted[record.name]), record.name
