"""The grid of ranks, as arithmetic: no torch, no processes.

``rank = (pipe * d + data) * t + tensor``: the tensor axis runs fastest, so that a tensor group lies within a node;
the pipe axis runs slowest. DeepSpeed's ``PipeModelDataParallelTopology`` has the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True)
class Coordinate:
    """The place of one rank on the three axes."""

    pipe: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the three axes: ``p`` pipe, ``d`` data, ``t`` tensor."""

    pipe: int
    data: int
    tensor: int

    @classmethod
    def of_world(cls, world_size: int, tensor: int, pipe: int) -> Topology:
        """Return the grid of ``world_size`` ranks, the data axis taking what the others leave.

        Raises:
            ValueError: ``world_size`` is not a multiple of ``tensor * pipe``.
        """
        if world_size % (tensor * pipe):
            raise ValueError(
                f"world size must be a multiple of tensor x pipe, got world_size={world_size}, "
                f"--model-parallel-size {tensor}, --pipe-parallel-size {pipe} ({tensor} x {pipe} = {tensor * pipe}). "
                f"Start {(world_size // (tensor * pipe) + 1) * tensor * pipe} processes, or lower one of the two."
            )
        return cls(pipe=pipe, data=world_size // (tensor * pipe), tensor=tensor)

    @property
    def world_size(self) -> int:
        return self.pipe * self.data * self.tensor

    def rank(self, coordinate: Coordinate) -> int:
        """Return the global rank at ``coordinate``."""
        return (coordinate.pipe * self.data + coordinate.data) * self.tensor + coordinate.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """Return where ``rank`` stands."""
        rest, tensor = divmod(rank, self.tensor)
        pipe, data = divmod(rest, self.data)
        return Coordinate(pipe=pipe, data=data, tensor=tensor)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return every set of ranks that differ only along ``axes``, each set in rising order.

        ``groups("tensor")`` are the tensor-parallel groups, ``groups("pipe", "tensor")`` the ranks of one replica.
        """
        unknown = set(axes) - set(AXES)
        if unknown:
            raise ValueError(f"axes must be among {AXES}, got {sorted(unknown)}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinate(rank)
            key = tuple(getattr(place, axis) for axis in AXES if axis not in axes)
            members.setdefault(key, []).append(rank)
        return list(members.values())
