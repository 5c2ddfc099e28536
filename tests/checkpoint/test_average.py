"""Which checkpoints of a run are averaged, where a step was saved more than once."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint import TensorRecord, save
from megatron.checkpoint.average import open_steps
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard


def save_step(run_dir: Path, step: int, value: float) -> str:
    """Save a checkpoint whose weight is ``value``; return its name."""
    records = [TensorRecord("weights/w", torch.full((2,), value), Shard((2,)))]
    return save(run_dir / CHECKPOINTS, step, records, {}, SINGLE).name


def test_average_uses_newest_checkpoint_of_repeated_step(tmp_path: Path) -> None:
    """The run went back from step 20 and saved steps 10 and 20 once more; the last save is not of the highest step."""
    names = [save_step(tmp_path, step, value) for value, step in enumerate((10, 20, 20, 10))]
    assert names == ["step-00000010", "step-00000020", "step-00000020-1", "step-00000010-1"]
    opened = open_steps(tmp_path, [20, 10, 20])
    assert [checkpoint.path.name for checkpoint in opened] == ["step-00000010-1", "step-00000020-1"]
    assert [float(checkpoint.read("weights/w", Shard((2,)))[0]) for checkpoint in opened] == [3.0, 2.0]
