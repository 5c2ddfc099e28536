"""The state that all contenders save: weights of a decoder in fp32 and AdamW's two moments, cut over tensor ranks."""

from __future__ import annotations

import torch

from megatron.checkpoint import TensorRecord
from megatron.mpu.groups import Grid
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.optim import build_optimizer
from megatron.training.train_state import make_moments, optimizer_records, weight_records

WIDTH, SMALL_WIDTH = 512, 64
SMALL_BYTES = 32 << 20
CUTS = {"qkv": (3, 1, 0), "dense": (1, 1, 1), "up": (4, 1, 0), "down": (1, 4, 1)}
"""Weights of a layer: (rows, columns) in widths, and the dimension that tensor ranks cut."""
BYTES_OF_A_NUMBER = 12  # weight and two moments, 4 bytes each


class Layers(torch.nn.Module):
    """One tensor rank's part of a decoder's layers."""

    def __init__(self, num_layers: int, width: int, grid: Grid) -> None:
        super().__init__()
        rank, size = grid.tensor.rank, grid.tensor.size
        for layer in range(num_layers):
            for name, (rows, columns, dim) in CUTS.items():
                shape = (rows * width, columns * width)
                shard = Shard(shape, dim, rank * (shape[dim] // size), shape[dim] // size)
                local = [each if place != dim else shard.length for place, each in enumerate(shape)]
                self.register_parameter(
                    f"layer{layer}_{name}", set_shard(torch.nn.Parameter(torch.randn(local)), shard)
                )
            self.register_parameter(f"layer{layer}_norm", torch.nn.Parameter(torch.ones(width)))


class State:
    """Module and optimizer of one rank."""

    def __init__(self, num_bytes: int, grid: Grid) -> None:
        torch.manual_seed(grid.rank)
        width = WIDTH if num_bytes > SMALL_BYTES else SMALL_WIDTH
        layer_bytes = BYTES_OF_A_NUMBER * (width * width * sum(r * c for r, c, _ in CUTS.values()) + width)
        self.module = Layers(max(1, round(num_bytes / layer_bytes)), width, grid)
        self.optimizer = build_optimizer(self.module.parameters(), model=grid.model, tensor=grid.tensor, data=grid.data)
        make_moments(self.optimizer)
        for weight, moments in self.optimizer.inner.state.items():
            if shard_of(weight).is_partitioned:  # the others are the same on all ranks, as they begin
                moments["exp_avg"].normal_()
                moments["exp_avg_sq"].uniform_()

    def records(self) -> list[TensorRecord]:
        """Return what a checkpoint of this project takes."""
        return [
            *weight_records(self.module, self.optimizer),
            *optimizer_records(self.module, self.optimizer),
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by name."""
        return {record.name: record.tensor for record in self.records()}

    def num_bytes(self) -> int:
        """Return the bytes that this rank holds."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def clear(self) -> None:
        """Zero all tensors, so that a load that leaves one out is seen."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def fingerprint(self) -> list[int]:
        """Return a number for each tensor that changes with its bits."""
        return [int(tensor.view(torch.int32).sum()) for tensor in self.tensors().values()]
