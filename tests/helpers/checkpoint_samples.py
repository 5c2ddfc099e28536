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
CUTS = {
    "embedding.word.weight": 0,
    "layers.0.mlp.up.weight": 0,
    "layers.0.mlp.down.weight": 1,
    "layers.0.input_norm.weight": None,
    "optimizer.exp_avg": 0,
    "random.rank-0": None,
    "loss_scale": None,
    "mask": None,
}


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
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


def shard_for(name: str, whole: torch.Tensor, rank: int, size: int) -> tuple[Shard, int]:
    """Return the shard of tensor rank ``rank`` of ``size``, and the number of padding rows of its local tensor."""
    dim = CUTS[name]
    if dim is None:
        return Shard(tuple(whole.shape)), 0
    rows_per_rank = -(-whole.shape[dim] // size)
    start = min(rank * rows_per_rank, whole.shape[dim])
    length = min(rows_per_rank, whole.shape[dim] - start)
    return Shard(tuple(whole.shape), dim, start, length), rows_per_rank - length


def records_for(rank: int, size: int, seed: int = 0) -> list[TensorRecord]:
    """Return the records that tensor rank ``rank`` of ``size`` passes to ``save``."""
    records = []
    for name, whole in whole_tensors(seed).items():
        shard, padding = shard_for(name, whole, rank, size)
        local = shard.cut(whole)
        if padding:
            local = torch.cat([local, local.new_zeros(padding, *local.shape[1:])])
        records.append(TensorRecord(name, local, shard, is_owner=shard.is_partitioned or rank == 0))
    return records


def save_alone(root: Path, step: int, seed: int | None = None, **retention: Any) -> Path:
    """Save the sample as a single rank; ``seed`` is the step by default."""
    seed = step if seed is None else seed
    state = {"step": step, "seed": seed}
    return save(root, step, records_for(0, 1, seed), state, SINGLE, RetentionPolicy(**retention))


def assert_holds(checkpoint: Checkpoint, seed: int) -> None:
    """Assert that every global tensor in ``checkpoint`` equals the sample of ``seed`` bit for bit."""
    expected = whole_tensors(seed)
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, whole in expected.items():
        loaded = checkpoint.read(name, Shard(tuple(whole.shape)))
        assert loaded.dtype == whole.dtype and torch.equal(loaded, whole), name


def world_of(rank: int, size: int) -> Group:
    """Return the world group of a rank forked by ``run_ranks``."""
    handle = torch.distributed.group.WORLD if size > 1 else None
    return Group(ranks=tuple(range(size)), rank=rank, handle=handle)


class FailAt:
    """Context manager that calls ``fault`` once, before the ``k``-th file operation in the block, counted from 0.

    Args:
        only: count operations with this name only; None to count all.
    """

    def __init__(self, k: int, fault: object, only: str | None = None) -> None:
        self.k, self.fault, self.only = k, fault, only
        self.names: list[str] = []

    def __call__(self, operation: str, path: Path) -> None:
        if self.only is not None and operation != self.only:
            return
        self.names.append(operation)
        if len(self.names) == self.k + 1:
            self.fault()

    def __enter__(self) -> FailAt:
        files.before_operation = self
        return self

    def __exit__(self, *_: object) -> None:
        files.before_operation = files._nothing
