"""Small hand-made dumps for ``tools/referee.py``: a two-layer model, cut into shards, with faults in its gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = {
    "embedding.weight": (12, 8),
    "layers.0.norm.weight": (8,),
    "layers.0.up.weight": (16, 8),
    "layers.0.up.bias": (16,),
    "layers.0.down.weight": (8, 16),
    "layers.1.norm.weight": (8,),
    "layers.1.up.weight": (16, 8),
    "layers.1.up.bias": (16,),
    "layers.1.down.weight": (8, 16),
    "head.weight": (12, 8),
}
SHARDED_DIMS = {"embedding": 0, "up": 0, "down": 1, "head": 0}
"""Module -> dimension that is sharded over tp."""
Rank = dict[str, Any]
"""The content of a rank's file; tensors[name] = {"value", "grad"}."""


def make_whole() -> dict[str, dict[str, Tensor]]:
    """Return values and gradients of all parameters; norms are 1 and biases 0, as at the start of training."""
    generator = torch.Generator().manual_seed(5)
    whole = {}
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = torch.ones_like(value) if "norm" in name else torch.zeros_like(value) if "bias" in name else value
        whole[name] = {"value": value, "grad": torch.randn(shape, generator=generator, dtype=torch.float64)}
    return whole


def shard_dim(name: str) -> int | None:
    """Return the dimension of a parameter that is sharded over tp."""
    return SHARDED_DIMS.get(name.split(".")[-2])


def make_ranks(whole: dict[str, dict[str, Tensor]], **sizes: int) -> list[Rank]:
    """Return the contents of the dumps of a layout without a fault; tp shards, other axes copy."""
    ranks = []
    names = list(sizes)
    for indices in itertools.product(*(range(sizes[name]) for name in reversed(names))):
        axes = {name: (index, sizes[name]) for name, index in zip(names, reversed(indices), strict=True)}
        tp, tp_size = axes.get("tp", (0, 1))
        tensors = {}
        for name, pair in whole.items():
            dim = shard_dim(name)
            tensors[name] = {
                key: (tensor if dim is None else tensor.chunk(tp_size, dim)[tp]).clone() for key, tensor in pair.items()
            }
        ranks.append({"rank": len(ranks), "axes": axes, "loss": 2.5, "norm": norm_of(whole), "tensors": tensors})
    return ranks


def norm_of(whole: dict[str, dict[str, Tensor]]) -> float:
    """Return the norm of all gradients."""
    return math.sqrt(sum(float(pair["grad"].norm()) ** 2 for pair in whole.values()))


def write_dump(folder: Path, ranks: list[Rank]) -> Path:
    """Write the files of all ranks; return the folder."""
    folder.mkdir(exist_ok=True)
    for content in ranks:
        path = folder / f"rank-{content['rank']:05d}"
        torch.save({"world_size": len(ranks), **{key: content[key] for key in content if key != "norm"}}, f"{path}.pt")
        if content["norm"] is not None:
            torch.save({"norm": content["norm"]}, f"{path}.norm.pt")
    return folder


def write_pair(
    folder: Path, mutate: Callable[[list[Rank]], None] = lambda ranks: None, **sizes: int
) -> tuple[Path, Path]:
    """Write the dump of one process and that of a layout, which ``mutate`` changes; return both folders."""
    whole = make_whole()
    ranks = make_ranks(whole, **sizes)
    mutate(ranks)
    return write_dump(folder / "one", make_ranks(whole, tp=1)), write_dump(folder / "many", ranks)
