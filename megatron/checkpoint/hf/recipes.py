"""How each of our weights is made of Hugging Face's tensors: one description, read in both directions and in parts.

| ours | theirs | recipe |
|---|---|---|
| a norm, a table | one tensor | ``Recipe(("name",))`` |
| a product, of ``Conv1D`` | one tensor [in, out] | ``Recipe(("name",), is_transposed=True)`` |
| query, key and value by head | three tensors | ``Recipe(("q", "k", "v"), blocks=heads)`` |
| the same | one tensor, all queries first | ``Recipe(("qkv",), blocks=heads, parts_in_one=3)`` |
| gate and value in turns | two tensors of f rows | ``Recipe(("gate", "up"), blocks=f)`` |

Our rows are the first block of each part, then the second of each, and so on; parts may have blocks of different
heights (of grouped queries: several heads, one key, one value).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard


class Readable(Protocol):
    """A tensor, or a slice of a file that gives a tensor when it is indexed."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Recipe:
    """Which of their tensors make up one of ours.

    Args:
        names: theirs, in the order in which their blocks take turns.
        blocks: how many blocks the rows of each part have.
        parts_in_one: a single tensor of theirs holds so many parts of equal height, one after the other.
        is_transposed: theirs is [in, out], ours [out, in].
    """

    names: tuple[str, ...]
    blocks: int = 1
    parts_in_one: int = 1
    is_transposed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether our rows are theirs in their order."""
        return len(self.names) == 1 and self.parts_in_one == 1


def to_ours(recipe: Recipe, theirs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return our weight, made of ``theirs``; it shares no memory with them.

    Raises:
        CheckpointError: their rows cannot be cut into the blocks.
    """
    parts = _parts(recipe, [theirs[name].detach() for name in recipe.names])
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    blocks = [_blocks(recipe, part) for part in parts]  # each [blocks, rows, ...]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def from_ours(recipe: Recipe, ours: torch.Tensor, heights: Mapping[str, int] | None = None) -> dict[str, torch.Tensor]:
    """Return their tensors by name, of our weight.

    Args:
        heights: rows of a part by the name of its tensor; None: all alike.
    """
    count = len(recipe.names) * recipe.parts_in_one
    if count == 1:
        parts = [ours.detach()]
    else:
        if ours.shape[0] % recipe.blocks:
            raise _uneven(recipe, ours.shape[0])
        rows = ours.shape[0] // recipe.blocks
        each = [rows // count] * count
        if heights is not None and recipe.parts_in_one == 1:
            each = [heights[name] // recipe.blocks for name in recipe.names]
        if sum(each) != rows:
            raise _uneven(recipe, ours.shape[0])
        parts = [part.flatten(0, 1) for part in ours.detach().unflatten(0, (recipe.blocks, rows)).split(each, dim=1)]
    whole = [torch.cat(parts)] if recipe.parts_in_one > 1 else parts
    if recipe.is_transposed:
        whole = [part.t() if part.dim() == 2 else part for part in whole]
    return {name: part.contiguous() for name, part in zip(recipe.names, whole, strict=True)}


def read_part(
    recipe: Recipe, theirs: Mapping[str, Readable], shapes: Mapping[str, list[int]], shard: Shard
) -> torch.Tensor:
    """Return the part of our weight that ``shard`` is, reading no more than it needs of ``theirs``.

    Args:
        theirs: by name; indexed with slices.
        shapes: theirs, by name.

    Raises:
        CheckpointError: rows cannot be cut into blocks.
    """
    dim, start, stop = shard.partition_dim, shard.start, shard.start + shard.length
    if dim is None:
        return to_ours(recipe, {name: theirs[name][:] for name in recipe.names})
    if dim != 0:
        return to_ours(recipe, {name: _columns(recipe, theirs[name], start, stop) for name in recipe.names})
    heights = {name: shapes[name][-1 if recipe.is_transposed else 0] for name in recipe.names}
    if recipe.is_plain:
        (name,) = recipe.names
        return to_ours(recipe, {name: _rows(recipe, theirs[name], start, stop)})
    rows = sum(heights.values()) // recipe.blocks  # of ours in a block
    if sum(heights.values()) % recipe.blocks:
        raise _uneven(recipe, sum(heights.values()))
    first, last = start // rows, -(-stop // rows)
    found = {}
    for name in recipe.names:
        height = heights[name] // recipe.parts_in_one
        each = height // recipe.blocks
        spans = [(i * height + first * each, i * height + last * each) for i in range(recipe.parts_in_one)]
        axis = -1 if recipe.is_transposed else 0
        found[name] = torch.cat([_rows(recipe, theirs[name], *span) for span in spans], dim=axis)
    whole = to_ours(replace(recipe, blocks=last - first), found)
    return whole.narrow(0, start - first * rows, stop - start)


def _parts(recipe: Recipe, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if recipe.is_transposed:
        tensors = [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]
    if recipe.parts_in_one == 1:
        return tensors
    if tensors[0].shape[0] % recipe.parts_in_one:
        raise _uneven(recipe, tensors[0].shape[0])
    return list(tensors[0].chunk(recipe.parts_in_one))


def _blocks(recipe: Recipe, part: torch.Tensor) -> torch.Tensor:
    if part.shape[0] % recipe.blocks:
        raise _uneven(recipe, part.shape[0])
    return part.unflatten(0, (recipe.blocks, -1))


def _rows(recipe: Recipe, tensor: Readable, start: int, stop: int) -> torch.Tensor:
    """Return rows of ours, which are the columns of a transposed weight of theirs."""
    return tensor[..., start:stop] if recipe.is_transposed else tensor[start:stop]


def _columns(recipe: Recipe, tensor: Readable, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop] if recipe.is_transposed else tensor[:, start:stop]


def _uneven(recipe: Recipe, rows: int) -> CheckpointError:
    return CheckpointError(
        f"{', '.join(recipe.names)}: the rows of each part must be {recipe.blocks} blocks of one height (for each head "
        f"or group one), got {rows} rows, which is not a multiple of {recipe.blocks}"
    )
