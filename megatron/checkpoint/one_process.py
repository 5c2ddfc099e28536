"""Open a checkpoint and read full tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron import hub
from megatron.checkpoint import metadata
from megatron.checkpoint.loading import deepspeed_format_message, open_newest, read_manifest_bytes
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard

if TYPE_CHECKING:
    pass


DEEPSPEED = "deepspeed"
"""Value of the metadata entry "format" of a checkpoint written by DeepSpeed's engine."""
WEIGHTS = "weights/"
"""Prefix of the names of weights."""


def open_folder(path: Path, world: Group = SINGLE, *, any_format: bool = False) -> Checkpoint:
    """Open the checkpoint in ``path``: a run folder, its checkpoints folder, one checkpoint, or Megatron-LM's folder.

    Collective over ``world``.

    Args:
        any_format: also accept a checkpoint in DeepSpeed's format, which has metadata but no tensors that can be read.

    Raises:
        CheckpointError: ``path`` has no checkpoint, or none that verifies.
    """
    if not path.is_dir():
        actual = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {actual}. Use a run folder, its checkpoints folder, or one checkpoint.{hub.advice(path)}"
        )
    checkpoint = open_newest(path, world)
    if checkpoint.metadata.get("format") == DEEPSPEED and not any_format:
        raise CheckpointError(deepspeed_format_message(checkpoint.path))
    return checkpoint


def open_unverified(path: Path) -> Checkpoint:
    """Open the checkpoint ``path`` that this process has just written, without verifying its files.

    Raises:
        CheckpointError: its manifest cannot be read.
    """
    return Checkpoint(path, metadata.manifest_from_bytes(read_manifest_bytes(path), path / metadata.MANIFEST_NAME))


def read_full(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read the full tensor ``name``, without padding."""
    return checkpoint.read(name, Shard(checkpoint.shape(name)))


def weight_names(checkpoint: Checkpoint) -> list[str]:
    """List the weight names, without the prefix ``WEIGHTS``."""
    return [name.removeprefix(WEIGHTS) for name in checkpoint.names() if name.startswith(WEIGHTS)]


def read_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read all weights by name."""
    return {name: read_full(checkpoint, WEIGHTS + name) for name in weight_names(checkpoint)}
