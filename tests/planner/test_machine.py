"""Machines: rates between sides, JSON there and back, known GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.planner.machine import DATA_SHEETS, Machine, gpu_machine

A100 = gpu_machine("a100-80g")


def machine_json(**values: object) -> str:
    """Return the text of a machine with other values in some fields."""
    return json.dumps({**json.loads(A100.to_json()), **values})


def test_machine_file_round_trips(tmp_path: Path) -> None:
    modified = replace(A100, devices_per_node=4, is_cpu=True, reserved_bytes=7)
    modified.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == modified


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a JSON file"),
        ("[]", '"format"'),
        ('{"format": "another"}', '"format"'),
        ('{"format": "megatron-machine 1", "name": "x", "colour": 1}', "colour"),
        ('{"format": "megatron-machine 1", "name": "x"}', "memory_bytes"),
        (machine_json(devices_per_node=2.5), "devices_per_node must be a whole number of at least 1, got 2.5"),
        (machine_json(devices_per_node=0), "devices_per_node must be a whole number"),
        (machine_json(memory_bytes="80 GB"), "memory_bytes must be a whole number of at least 1, got '80 GB'"),
        (machine_json(memory_bandwidth=0), "memory_bandwidth must be a number above 0, got 0"),
        (machine_json(overhead_s=-1), "overhead_s must be a number of at least 0"),
        (machine_json(is_cpu="no"), "is_cpu must be bool"),
        (machine_json(product_flops={}), "product_flops must have a dtype"),
        (machine_json(product_flops={"bf16": []}), "product_flops of bf16 must be pairs above 0"),
        (machine_json(product_flops={"bf16": [[64, 1e12], [64, 1e12]]}), "in ascending order of sides"),
        (machine_json(peak_flops={"bf16": None}), "peak_flops of bf16 must be a number above 0"),
        (machine_json(peak_flops=[1]), "cannot be read"),
        (machine_json(intra={"all_reduce": {"latency_s": 0, "bandwidth": 0}}), "cannot be read"),
        (
            machine_json(
                inter=dict.fromkeys(("all_reduce", "gather", "send", "scatter"), {"latency_s": 0, "bandwidth": 0})
            ),
            "inter.send",
        ),
    ],
    ids=[
        "broken",
        "list",
        "format",
        "key",
        "missing",
        "half a device",
        "no device",
        "text",
        "no bandwidth",
        "negative",
        "yes or no",
        "no format",
        "no sides",
        "equal sides",
        "no peak",
        "peaks",
        "half a link",
        "slow link",
    ],
)
def test_invalid_machine_file_raises(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Machine.load(tmp_path / "m.json")
    with pytest.raises(ConfigError, match="--machine needs a file"):
        Machine.load(tmp_path / "none.json")


def test_product_rate_interpolates_in_log_of_side() -> None:
    machine = replace(A100, product_flops={"fp32": ((64, 10.0), (256, 30.0))})
    assert [machine.product_rate("fp32", side) for side in (8, 64, 128, 256, 9999)] == [10, 10, 20, 30, 30]
    with pytest.raises(ConfigError, match="has matmul rates for fp32, got bf16"):
        machine.product_rate("bf16", 64)


def test_known_gpus_have_data_sheet_peaks() -> None:
    for name in DATA_SHEETS:
        machine = gpu_machine(name)
        dtype = "fp16"
        assert 0.4 < machine.product_rate(dtype, 1e5) / machine.peak_flops[dtype] < 1
        assert 0.85 < machine.usable_bytes / machine.memory_bytes < 1 or "v100" in name or "a100-40g" in name
        assert json.loads(machine.to_json())["devices_per_node"] == 8
    assert A100.peak_flops["bf16"] == 312e12
    assert [A100.first_dtype, gpu_machine("v100-16g").first_dtype, replace(A100, is_cpu=True).first_dtype] == [
        "bf16", "fp16", "fp32"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--gpu must be one of .*a100-80g.*, got a1000"):
        gpu_machine("a1000")
