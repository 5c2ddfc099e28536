"""--gradient-accumulation-fusion is on by default on CUDA where nothing excludes it, and its choice is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron.arguments import resolve_fusion
from megatron.config import Config, parse
from megatron.mpu.groups import single_grid
from megatron.training import kernel_rows, optimizer_setup
from megatron.training.compatibility import changed_settings
from megatron.training.world import World

FUSED, UNFUSED = "--gradient-accumulation-fusion", "--no-gradient-accumulation-fusion"


def parse_line(line: str) -> Config:
    words = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --data-path none {line}".split()
    return parse(words, world_size=2, env={})


@pytest.mark.parametrize(
    ("device_type", "line", "expected"),
    [
        ("cpu", "", False),
        ("xpu", "", False),
        ("cpu", FUSED, True),
        ("cuda", "", True),
        ("cuda", "--zero-stage 1 --pipe-parallel-size 2", True),
        ("cuda", "--optimizer muon", True),
        ("cuda", UNFUSED, False),
        ("cuda", "--zero-stage 2", False),
        ("cuda", "--zero-stage 3", False),
        ("cuda", "--compile", False),
    ],
)
def test_default_depends_on_device_zero_stage_and_compile(
    device_type: str, line: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer gets the choice, too, of a configuration in which it has not been recorded."""
    config = parse_line(f"--bf16 {line}")
    assert config.fuses_accumulation(device_type) == expected
    assert resolve_fusion(config, device_type).parallel.gradient_accumulation_fusion is expected
    choices: list[Any] = []
    monkeypatch.setattr(
        optimizer_setup, "build_optimizer", lambda *args, **kwargs: choices.append(kwargs["fuses_accumulation"])
    )
    world = World(device_type, torch.device("cpu"), single_grid(), 0)
    optimizer_setup.make_optimizer(config, torch.nn.Linear(1, 1), world)
    assert choices == [expected]


@pytest.mark.parametrize(
    ("device_type", "line", "expected"),
    [
        ("cpu", "", None),
        ("cpu", FUSED, "accumulated inside matrix products (--no-gradient-accumulation-fusion turns this off)"),
        ("cuda", "", "not been run on a GPU yet; --no-gradient-accumulation-fusion turns this off)"),
        ("cuda", UNFUSED, "accumulated by autograd, with --no-gradient-accumulation-fusion"),
        ("cuda", "--zero-stage 2 --compile", "accumulated by autograd, with --zero-stage 2 and --compile"),
    ],
)
def test_start_table_names_choice(device_type: str, line: str, expected: str | None) -> None:
    config = resolve_fusion(parse_line(line), device_type)
    rows = dict(kernel_rows.fusion_rows(config, device_type))
    assert not rows if expected is None else rows["weight gradients"].endswith(expected)


def test_resume_warns_only_if_choice_changes() -> None:
    """Checkpoints of earlier versions contain the value of the flag: false without it."""
    saved = json.loads(json.dumps(parse_line("").to_dict()))
    saved["parallel"]["gradient_accumulation_fusion"] = False
    for device_type, expected in (("cpu", []), ("cuda", ["gradient_accumulation_fusion: saved False, now True"])):
        assert list(changed_settings(saved, resolve_fusion(parse_line(""), device_type))) == expected
