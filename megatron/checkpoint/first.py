"""The first checkpoint of a run whose weights come from another program."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.records import TensorRecord
from megatron.checkpoint.saving import save
from megatron.checkpoint.whole import WEIGHTS
from megatron.config import Config
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.mpu.topology import Topology


def save_first(root: Path, weights: dict[str, torch.Tensor], config: Config, origin: str, more: dict[str, Any]) -> Path:
    """Write the checkpoint of step 0 of a model whose weights come from elsewhere; return its path.

    Args:
        origin: stands where a run names its optimizer.
        more: further entries of the state.
    """
    records = [TensorRecord(WEIGHTS + name, tensor, Shard(tuple(tensor.shape))) for name, tensor in weights.items()]
    return save(root, 0, records, {**_state(config, origin), **more}, SINGLE)


def _state(config: Config, origin: str) -> dict[str, Any]:
    """Return what ``megatron.training.state`` saves, of a run that has not taken a step."""
    return {
        "progress": {"step": 0, "updates": 0, "samples_consumed": 0},
        "scaler": {},
        "optimizer": origin,
        "optimizer_steps": 0,
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": asdict(Topology(pipe=1, data=1, tensor=1)),
        "data_fingerprint": None,
        "data_order": None,
        "torch": torch.__version__,
    }
