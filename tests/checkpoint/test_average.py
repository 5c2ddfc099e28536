"""Which checkpoints of a run are averaged, where a step was saved more than once."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint import TensorRecord, save
from megatron.checkpoint.average import of_steps
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard


def add(run: Path, step: int, value: float) -> str:
    """Save a checkpoint whose weight is ``value``; return its name."""
    records = [TensorRecord("weights/w", torch.full((2,), value), Shard((2,)))]
    return save(run / CHECKPOINTS, step, records, {}, SINGLE).name


def test_of_several_checkpoints_of_a_step_the_newest_is_averaged(tmp_path: Path) -> None:
    """The run went back from step 20 and saved steps 10 and 20 once more; the last save is not of the highest step."""
    names = [add(tmp_path, step, value) for value, step in enumerate((10, 20, 20, 10))]
    assert names == ["step-00000010", "step-00000020", "step-00000020-1", "step-00000010-1"]
    found = of_steps(tmp_path, [20, 10, 20])
    assert [each.path.name for each in found] == ["step-00000010-1", "step-00000020-1"]
    assert [float(each.read("weights/w", Shard((2,)))[0]) for each in found] == [3.0, 2.0]
