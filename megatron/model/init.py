"""Initial weights from a counter keyed by (seed, parameter name): the same numbers in every layout.

Each parameter draws its whole global tensor from a generator seeded by its name and keeps its own part. A large table
is drawn in blocks of rows, so that a rank never holds more than its part and one block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from megatron.mpu.shard import Shard, shard_of

ROWS_PER_BLOCK = 1024
RESIDUAL_OUTPUTS = ("attention.dense.weight", "mlp.down.weight")


@torch.no_grad()
def initialize(named_parameters: Iterable[tuple[str, torch.Tensor]], *, seed: int, std: float, num_layers: int) -> None:
    """Fill the weights that layers left unset, in place, by their logical names.

    They are normal(0, ``std``), those that end in the residual stream normal(0, ``std / sqrt(2 L)``); padded
    vocabulary rows are zero. What a module has set itself (biases, norms, a user's own layers) stays.

    Source: Radford et al. 2019, section 2.3; Shoeybi et al. 2019, section 4.
    """
    for name, parameter in named_parameters:
        if not getattr(parameter, "is_unset", False):
            continue
        scaled = std / math.sqrt(2.0 * num_layers) if name.endswith(RESIDUAL_OUTPUTS) else std
        _fill_normal(parameter, shard_of(parameter), name, seed, scaled)
        parameter.is_unset = False  # type: ignore[attr-defined]


def _fill_normal(parameter: torch.Tensor, shard: Shard, name: str, seed: int, std: float) -> None:
    parameter.zero_()
    rows = shard.global_shape[0]
    for first in range(0, rows, ROWS_PER_BLOCK):
        last = min(first + ROWS_PER_BLOCK, rows)
        if shard.partition_dim == 0 and (last <= shard.start or first >= shard.start + shard.length):
            continue
        block = _block(name, seed, first, last - first, shard.global_shape[1:]) * std
        _copy_overlap(parameter, shard, block, first)


def _block(name: str, seed: int, first: int, rows: int, rest: tuple[int, ...]) -> torch.Tensor:
    """Return rows ``first ... first + rows`` of the parameter's standard normal numbers, in fp32.

    One generator per block, seeded by a hash, on the CPU: the device and the layout play no part.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{first}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn((rows, *rest), generator=generator, dtype=torch.float32)


def _copy_overlap(parameter: torch.Tensor, shard: Shard, block: torch.Tensor, first: int) -> None:
    if shard.partition_dim == 0:
        start = max(first, shard.start)
        stop = min(first + block.shape[0], shard.start + shard.length)
        parameter[start - shard.start : stop - shard.start].copy_(block[start - first : stop - first])
    elif shard.partition_dim is None:
        parameter[first : first + block.shape[0]].copy_(block)
    else:
        part = block.narrow(shard.partition_dim, shard.start, shard.length)
        parameter[first : first + block.shape[0]].copy_(part)
