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
from tests.gpu.families import FAMILIES, build_model, loss_of, make_inputs

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
FAMILY = FAMILIES["llama"]
Trained = tuple[torch.nn.Module, MixedPrecisionOptimizer]


def make_trained(torch_device: torch.device, dtype: torch.dtype) -> Trained:
    model = build_model(FAMILY, torch.float32, torch_device)
    return model, build_optimizer(model.parameters(), dtype=dtype, lr=1e-2)


def train(trained: Trained, steps: int, torch_device: torch.device) -> None:
    model, optimizer = trained
    for _ in range(steps):
        loss_of(model(**make_inputs(FAMILY, torch_device))).backward()
        optimizer.end_micro_batch()
        optimizer.step()


def records_of(trained: Trained) -> list[Any]:
    return [*weight_records(*trained), *optimizer_records(*trained)]


def values_of(trained: Trained) -> dict[str, torch.Tensor]:
    return {record.name: record.tensor.detach().cpu().clone() for record in records_of(trained)}


def read_files(path: Path) -> dict[str, bytes]:
    return {child.name: child.read_bytes() for child in path.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_moves_between_device_and_cpu_bitwise(
    tmp_path: Path, dtype: torch.dtype, torch_device: torch.device
) -> None:
    trained = make_trained(torch_device, dtype)
    train(trained, 2, torch_device)
    first = save(tmp_path / "device", 2, records_of(trained), {}, SINGLE)
    on_cpu = make_trained(CPU, dtype)
    make_moments(on_cpu[1])
    open_latest(tmp_path / "device", SINGLE).load(records_of(on_cpu))
    on_cpu[1].copy_main_params_to_parameters()
    expected = values_of(trained)
    assert expected.keys() == values_of(on_cpu).keys() and any("exp_avg_sq" in name for name in expected)
    assert all(torch.equal(value, expected[name]) for name, value in values_of(on_cpu).items())
    second = save(tmp_path / "cpu", 2, records_of(on_cpu), {}, SINGLE)
    assert read_files(first) == read_files(second), "the files themselves"
    reloaded = make_trained(torch_device, dtype)
    make_moments(reloaded[1])
    open_latest(tmp_path / "cpu", SINGLE).load(records_of(reloaded))
    reloaded[1].copy_main_params_to_parameters()
    assert all(torch.equal(value, expected[name]) for name, value in values_of(reloaded).items())
    for parameter, other in zip(reloaded[0].parameters(), trained[0].parameters(), strict=True):
        assert parameter.device.type == torch_device.type and torch.equal(parameter, other)


def test_background_save_stores_values_at_save_time(
    tmp_path: Path, torch_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = make_trained(torch_device, torch.bfloat16)
    train(trained, 1, torch_device)
    expected = values_of(trained)
    has_continued = threading.Event()
    monkeypatch.setattr(files, "before_operation", lambda operation, path: has_continued.wait(60))
    saver = AsyncSaver(SINGLE)
    saver.save(tmp_path, CapturedState(1, records_of(trained), {"step": 1}))
    train(trained, 2, torch_device)
    assert saver.poll() is None, "no byte is written before the training has gone on"
    has_continued.set()
    durable = saver.finish()
    saver.close()
    assert durable is not None and durable.step == 1
    after = values_of(trained)
    assert any(not torch.equal(after[name], value) for name, value in expected.items())
    checkpoint = open_latest(tmp_path, SINGLE)
    for record in records_of(trained):
        assert torch.equal(checkpoint.read(record.name, record.shard), expected[record.name]), record.name
