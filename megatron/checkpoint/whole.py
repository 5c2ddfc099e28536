"""A checkpoint in the hands of one process: opened from any of its folders, its tensors read whole."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint.folders import checkpoints_in
from megatron.checkpoint.loading import Checkpoint
from megatron.checkpoint.opening import open_latest
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard

WEIGHTS = "weights/"
"""What the names of weights begin with."""


def open_folder(path: Path, world: Group = SINGLE) -> Checkpoint:
    """Return the checkpoint that ``path`` means: a run folder, its checkpoints folder, or one checkpoint. Collective.

    Raises:
        CheckpointError: there is none there, or none that verifies.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "not there"
        raise CheckpointError(f"{path} is {found}: name a run folder, its checkpoints folder, or one checkpoint")
    return open_latest(checkpoints_in(path), world)


def read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return the tensor ``name`` as it was saved, without padding."""
    return checkpoint.read(name, Shard(checkpoint.shape(name)))


def weight_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the weights, without what they begin with."""
    return [name.removeprefix(WEIGHTS) for name in checkpoint.names() if name.startswith(WEIGHTS)]


def read_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return all weights by the names that they have in the model."""
    return {name: read_whole(checkpoint, WEIGHTS + name) for name in weight_names(checkpoint)}
