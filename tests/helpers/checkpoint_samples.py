"""Small global tensors, sharded over any number of tensor ranks like layers, for the checkpoint tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron import files
from megatron.checkpoint import Checkpoint, RetentionPolicy, TensorRecord
from megatron.checkpoint.saving import save
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard

# name -> dimension along which tensor ranks shard the tensor
PARTITION_DIMS = {
    "embedding.word.weight": 0,
    "layers.0.mlp.up.weight": 0,
    "layers.0.mlp.down.weight": 1,
    "layers.0.input_norm.weight": None,
    "optimizer.exp_avg": 0,
    "random.rank-0": None,
    "loss_scale": None,
    "mask": None,
}


def make_global_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the global tensors; the vocabulary of 13 needs padding on 2 and 4 ranks."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "embedding.word.weight": torch.randn(13, 4, generator=rng),
        "layers.0.mlp.up.weight": torch.randn(8, 4, generator=rng).bfloat16(),
        "layers.0.mlp.down.weight": torch.randn(4, 8, generator=rng, dtype=torch.float64),
        "layers.0.input_norm.weight": torch.randn(4, generator=rng),
        "optimizer.exp_avg": torch.randint(-9, 9, (8,), generator=rng),
        "random.rank-0": torch.randint(0, 255, (40,), generator=rng, dtype=torch.uint8),
        "loss_scale": torch.tensor(65536.0 + seed),
        "mask": torch.tensor([True, False, bool(seed % 2)]),
    }


def make_shard(name: str, tensor: torch.Tensor, rank: int, size: int) -> tuple[Shard, int]:
    """Return the shard of tensor rank ``rank`` of ``size``, and the number of padding rows of its local tensor."""
    dim = PARTITION_DIMS[name]
    if dim is None:
        return Shard(tuple(tensor.shape)), 0
    rows_per_rank = -(-tensor.shape[dim] // size)
    start = min(rank * rows_per_rank, tensor.shape[dim])
    length = min(rows_per_rank, tensor.shape[dim] - start)
    return Shard(tuple(tensor.shape), dim, start, length), rows_per_rank - length


def make_records(rank: int, size: int, seed: int = 0) -> list[TensorRecord]:
    """Return the records that tensor rank ``rank`` of ``size`` passes to ``save``."""
    records = []
    for name, tensor in make_global_tensors(seed).items():
        shard, padding = make_shard(name, tensor, rank, size)
        local = shard.narrow(tensor)
        if padding:
            local = torch.cat([local, local.new_zeros(padding, *local.shape[1:])])
        records.append(TensorRecord(name, local, shard, is_owner=shard.is_partitioned or rank == 0))
    return records


def save_on_one_rank(root: Path, step: int, seed: int | None = None, **retention: Any) -> Path:
    """Save the sample as a single rank; ``seed`` is the step by default."""
    seed = step if seed is None else seed
    state = {"step": step, "seed": seed}
    return save(root, step, make_records(0, 1, seed), state, SINGLE, RetentionPolicy(**retention))


def assert_equals_sample(checkpoint: Checkpoint, seed: int) -> None:
    """Assert that every global tensor in ``checkpoint`` equals the sample of ``seed`` bit for bit."""
    expected = make_global_tensors(seed)
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        loaded = checkpoint.read(name, Shard(tuple(tensor.shape)))
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), name


def world_group(rank: int, size: int) -> Group:
    """Return the world group of a rank forked by ``run_ranks``."""
    handle = torch.distributed.group.WORLD if size > 1 else None
    return Group(ranks=tuple(range(size)), rank=rank, handle=handle)


class FailAt:
    """Context manager that calls ``fault`` once, before file operation ``operation_idx`` (from 0) of the block.

    Args:
        only_operation: count operations with this name only; None to count all.
    """

    def __init__(self, operation_idx: int, fault: object, only_operation: str | None = None) -> None:
        self.operation_idx, self.fault, self.only_operation = operation_idx, fault, only_operation
        self.operations: list[str] = []

    def __call__(self, operation: str, path: Path) -> None:
        if self.only_operation is not None and operation != self.only_operation:
            return
        self.operations.append(operation)
        if len(self.operations) == self.operation_idx + 1:
            self.fault()

    def __enter__(self) -> FailAt:
        files.before_operation = self
        return self

    def __exit__(self, *_: object) -> None:
        files.before_operation = files._no_op
