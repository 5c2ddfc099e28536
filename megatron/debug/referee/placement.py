"""Shard placement: the elements of the unsharded tensor that each rank holds.

Both runs start from the same weights, so a shard's values show where it belongs. This also finds shards that are not
contiguous in the unsharded tensor (fused query, key and value; gate and up projections) and parameters that a
pipeline stage or an expert rank numbers from 0. The candidates, in this order: the DTensor placement or sharded
dimension in the dump, contiguous chunks, single rows. Constant tensors (biases of 0, norms of 1) are placed last, by
the names and positions of the other parameters in their module or on their rank.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.debug.referee.dump_reader import Axes, Dump, Parameter, RankDump, split_chunk

Index = tuple[Tensor, ...]
"""For each dimension, the positions in the unsharded tensor."""
MAX_CHUNK_OFFSETS = 4096


@dataclass(frozen=True)
class Shard:
    """A rank's shard of an unsharded tensor.

    Attributes:
        local_name: the parameter's name on this rank
        index: its positions in the unsharded tensor
        grad: its gradient in fp64; None if the trainer computed none
        value_differs: the values differ from the unsharded tensor's, although another rank's copy is right
        is_partial: the gradient is a DTensor that still has the placement ``Partial``
    """

    rank: int
    local_name: str
    index: Index
    grad: Tensor | None
    value_differs: bool = False
    is_partial: bool = False


@dataclass(frozen=True)
class Placements:
    """Shards of each unsharded tensor by name, and the parameters (rank, name) that belong to none."""

    shards: dict[str, list[Shard]]
    unplaced: list[tuple[int, str]]


def take(whole: Tensor, index: Index) -> Tensor:
    """Select the elements in ``whole`` at the positions ``index``."""
    for dim, positions in enumerate(index):
        if len(positions) != whole.shape[dim]:
            whole = whole.index_select(dim, positions)
    return whole


def full_index(shape: Sequence[int]) -> Index:
    """Build the index of all elements."""
    return tuple(torch.arange(size) for size in shape)


def place_shards(whole: dict[str, Tensor], dump: Dump) -> Placements:
    """Find each rank's parameters in the unsharded tensors.

    Args:
        whole: name -> unsharded values
    """
    placements = Placements({name: [] for name in whole}, [])
    for rank_dump in dump.ranks:
        _RankPlacer(whole, rank_dump).place(placements)
    # A copy with other values than another rank's copy is a fault of the layout, not another checkpoint.
    for rank_dump in dump.ranks:
        for parameter in rank_dump.parameters:
            shards = placements.shards.get(parameter.name, [])
            key = (rank_dump.rank, parameter.name)
            has_full_copy = any(
                shard.local_name == parameter.name and len(shard.index) == 0 or _is_full(shard, whole)
                for shard in shards
            )
            if key in placements.unplaced and has_full_copy and parameter.value.shape == whole[parameter.name].shape:
                placements.unplaced.remove(key)
                shards.append(
                    _make_shard(rank_dump.rank, parameter, full_index(parameter.value.shape), value_differs=True)
                )
    return placements


def _is_full(shard: Shard, whole: dict[str, Tensor]) -> bool:
    return shard.local_name in whole and all(
        len(positions) == size for positions, size in zip(shard.index, whole[shard.local_name].shape, strict=True)
    )


def _make_shard(rank: int, parameter: Parameter, index: Index, value_differs: bool = False) -> Shard:
    grad = None if parameter.grad is None else parameter.grad.double()
    is_partial = any("Partial" in placement for placement in parameter.grad_placements)
    return Shard(rank, parameter.name, index, grad, value_differs, is_partial)


class _RankPlacer:
    """Places one rank's parameters, first by distinctive values, then by the positions of placed parameters."""

    def __init__(self, whole: dict[str, Tensor], rank_dump: RankDump) -> None:
        self.whole = whole
        self.rank_dump = rank_dump
        self.distinctive = [name for name, value in whole.items() if not _is_constant(value)]
        self.placed: dict[str, tuple[str, Index]] = {}
        """Local name -> name and index in the unsharded tensors."""
        self.prefixes: dict[str, str] = {}
        """Prefix of a local name up to a number -> the same prefix in the unsharded names."""

    def place(self, placements: Placements) -> None:
        """Add this rank's shards to ``placements``."""
        deferred = []
        for parameter in self.rank_dump.parameters:
            found = None if _is_constant(parameter.value) else self._find_by_value(parameter)
            if found is None:
                deferred.append(parameter)
            else:
                self._record(parameter, *found)
        for parameter in deferred:
            found = self._find_by_neighbours(parameter)
            if found is not None:
                self._record(parameter, *found)
        for parameter in self.rank_dump.parameters:
            if parameter.name in self.placed:
                whole_name, index = self.placed[parameter.name]
                placements.shards[whole_name].append(_make_shard(self.rank_dump.rank, parameter, index))
            else:
                placements.unplaced.append((self.rank_dump.rank, parameter.name))

    def _record(self, parameter: Parameter, whole_name: str, index: Index) -> None:
        self.placed[parameter.name] = whole_name, index
        if not _is_constant(parameter.value):
            self.prefixes.update(_prefix_pairs(parameter.name, whole_name))

    def _find_by_value(self, parameter: Parameter) -> tuple[str, Index] | None:
        """Search for the values in the tensor with the same name, then in all others."""
        names = [name for name in self.distinctive if name != parameter.name]
        if parameter.name in self.whole:
            names.insert(0, parameter.name)
        for name in names:
            index = _find_index(parameter, self.whole[name], self.rank_dump.rank, self.rank_dump.axes)
            if index is not None:
                return name, index
        return None

    def _find_by_neighbours(self, parameter: Parameter) -> tuple[str, Index] | None:
        """Place a parameter by its name and by the index of other parameters in this module or on this rank."""
        name = self._map_name(parameter.name)
        if name not in self.whole or parameter.value.ndim != self.whole[name].ndim:
            return None
        whole = self.whole[name]
        if parameter.placements:  # a DTensor states its position
            for index in _declared_indices(parameter, whole.shape, self.rank_dump.rank, self.rank_dump.axes):
                return (name, index) if _has_values(whole, index, parameter.value) else None
        positions_by_dim = []
        for dim, (size, whole_size) in enumerate(zip(parameter.value.shape, whole.shape, strict=True)):
            positions = (
                torch.arange(whole_size)
                if size == whole_size
                else self._neighbour_positions(parameter, dim, size, whole_size)
            )
            if positions is None:
                return None
            positions_by_dim.append(positions)
        index = tuple(positions_by_dim)
        return (name, index) if _has_values(whole, index, parameter.value) else None

    def _map_name(self, name: str) -> str:
        """Convert ``name`` to the unsharded name; its layer and expert numbers follow from placed parameters."""
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            if name == prefix or name.startswith(prefix + "."):
                return self.prefixes[prefix] + name[len(prefix) :]
        return name if name in self.whole else split_chunk(name)[1]

    def _neighbour_positions(self, parameter: Parameter, dim: int, size: int, whole_size: int) -> Tensor | None:
        """Guess the positions of ``parameter`` along a dimension from placed parameters; None if they are out of range.

        A placed parameter in the same module with the same sizes has the same positions. Without one, the parameter is
        taken to be the chunk with the most frequent index among the placed shards, or, if there are none, the chunk
        with this rank's index on an axis of suitable size.
        """
        if size == 0:  # a DTensor with fewer rows than ranks
            return torch.arange(0)
        module = parameter.name.rpartition(".")[0]
        chunk_ids: Counter[int] = Counter()
        for name, (whole_name, index) in self.placed.items():
            for positions, other_size in zip(index, self.whole[whole_name].shape, strict=True):
                if (len(positions), other_size) == (size, whole_size) and name.rpartition(".")[0] == module:
                    return positions
                if len(positions) and len(positions) * whole_size == other_size * size and other_size != len(positions):
                    chunk_ids[int(positions[0]) // len(positions)] += 1
        if chunk_ids:
            chunk_id = chunk_ids.most_common(1)[0][0]
        else:
            ratio = -(-whole_size // size)
            chunk_id = next(
                (index for index, count in self.rank_dump.axes.values() if count == ratio), self.rank_dump.rank % ratio
            )
        first = chunk_id * size
        return torch.arange(first, first + size) if first + size <= whole_size else None


def _is_constant(value: Tensor) -> bool:
    return value.numel() < 2 or bool((value == value.flatten()[0]).all())


def _has_values(whole: Tensor, index: Index, value: Tensor) -> bool:
    return torch.equal(take(whole, index).to(value.dtype), value)


def _prefix_pairs(local_name: str, whole_name: str) -> Iterator[tuple[str, str]]:
    """Yield the prefixes of two names up to each number, if the names differ in numbers only.

    Only the local name may have a chunk prefix.
    """
    chunk, rest = split_chunk(local_name)
    if chunk and not whole_name.startswith(chunk):
        yield from (
            (chunk + local_prefix, whole_prefix) for local_prefix, whole_prefix in _prefix_pairs(rest, whole_name)
        )
        return
    if re.sub(r"\d+", "#", local_name) != re.sub(r"\d+", "#", whole_name):
        return
    local_parts, whole_parts = local_name.split("."), whole_name.split(".")
    for idx, part in enumerate(local_parts):
        if part.isdigit():
            yield ".".join(local_parts[: idx + 1]), ".".join(whole_parts[: idx + 1])


def _find_index(parameter: Parameter, whole: Tensor, rank: int, axes: Axes) -> Index | None:
    """Find the positions of the parameter's values in ``whole``; None if they are missing or at several places."""
    value = parameter.value
    if value.ndim != whole.ndim or any(
        size > whole_size for size, whole_size in zip(value.shape, whole.shape, strict=True)
    ):
        return None
    whole = whole.to(value.dtype)
    if value.shape == whole.shape:
        return full_index(value.shape) if torch.equal(value, whole) else None
    for index in _declared_indices(parameter, whole.shape, rank, axes):
        if torch.equal(take(whole, index), value):
            return index
    chunks = [index for index in _chunk_indices(value.shape, whole.shape) if torch.equal(take(whole, index), value)]
    if len(chunks) == 1:
        return chunks[0]
    sharded_dims = [dim for dim in range(value.ndim) if value.shape[dim] != whole.shape[dim]]
    return _match_rows(value, whole, sharded_dims[0]) if len(sharded_dims) == 1 and not chunks else None


def _declared_indices(parameter: Parameter, whole_shape: Sequence[int], rank: int, axes: Axes) -> Iterator[Index]:
    """Yield the candidate indices that follow from the DTensor placements or from the recorded dimension."""
    index = list(full_index(whole_shape))
    if parameter.placements:
        mesh = torch.tensor(parameter.mesh)
        coordinates = (mesh == rank).nonzero()
        if len(coordinates) != 1 or len(coordinates[0]) != len(parameter.placements):
            return
        for placement, coordinate, size in zip(parameter.placements, coordinates[0].tolist(), mesh.shape, strict=True):
            match = re.fullmatch(r"Shard\(dim=(-?\d+)\)", placement)
            if match is not None:
                dim = int(match[1]) % len(index)
                chunks = index[dim].chunk(size)  # as DTensor does: the last ranks may have less or nothing
                index[dim] = chunks[coordinate] if coordinate < len(chunks) else index[dim][:0]
        if tuple(len(positions) for positions in index) == tuple(parameter.value.shape):
            yield tuple(index)
    elif parameter.dim is not None and 0 <= parameter.dim < len(index):
        size = parameter.value.shape[parameter.dim]
        for axis_rank, axis_size in axes.values():
            if axis_size * size == whole_shape[parameter.dim]:
                chunk = torch.arange(axis_rank * size, (axis_rank + 1) * size)
                candidate = tuple(chunk if dim == parameter.dim else positions for dim, positions in enumerate(index))
                if all(
                    len(positions) == local for positions, local in zip(candidate, parameter.value.shape, strict=True)
                ):
                    yield candidate


def _chunk_indices(shape: Sequence[int], whole_shape: Sequence[int]) -> Iterator[Index]:
    """Yield all contiguous chunks of ``whole_shape`` that are aligned to multiples of ``shape``."""
    if any(size == 0 or whole_size % size for size, whole_size in zip(shape, whole_shape, strict=True)):
        return
    offsets = itertools.product(
        *(range(0, whole_size, size) for size, whole_size in zip(shape, whole_shape, strict=True))
    )
    for starts in itertools.islice(offsets, MAX_CHUNK_OFFSETS):
        yield tuple(torch.arange(start, start + size) for start, size in zip(starts, shape, strict=True))


def _match_rows(value: Tensor, whole: Tensor, dim: int) -> Index | None:
    """Match single slices along ``dim``; None if a slice is missing or occurs twice."""
    seen: dict[bytes, int] = {}
    repeated = set()
    for position, row in enumerate(_row_bytes(whole, dim)):
        if row in seen:
            repeated.add(row)
        seen[row] = position
    positions = []
    for row in _row_bytes(value, dim):
        if row not in seen or row in repeated:
            return None
        positions.append(seen[row])
    index = list(full_index(whole.shape))
    index[dim] = torch.tensor(positions)
    return tuple(index)


def _row_bytes(tensor: Tensor, dim: int) -> Iterator[bytes]:
    for row in tensor.movedim(dim, 0).contiguous():
        yield row.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
