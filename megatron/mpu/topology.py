"""Rank grid arithmetic; requires neither torch nor running processes.

``rank = ((pipe * d + data) * c + context) * t + tensor``: the tensor axis varies fastest, so that a tensor group stays
within a node; the pipe axis varies slowest. Megatron-LM's default (tp-cp-ep-dp-pp) has the same order, and so has
DeepSpeed's ``PipeModelDataParallelTopology``, in which data and context form one axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from tds.renamed import Renamed

AXES = ("pipe", "data", "context", "tensor")


@dataclass(frozen=True)
class Coordinate:
    """A rank's position on the four axes."""

    pipe: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True)
class Topology:
    """Sizes of the four axes: ``p`` pipe, ``d`` data, ``t`` tensor, ``c`` context.

    ``expert`` is not an axis: a layer's experts are distributed over groups of ``expert`` consecutive ranks along data
    and context.
    """

    pipe: int
    data: int
    tensor: int
    context: int = 1
    expert: int = 1

    of_world = Renamed("from_world_size")
    sizes = Renamed("axis_sizes")

    @classmethod
    def from_world_size(cls, world_size: int, tensor: int, pipe: int, context: int = 1, expert: int = 1) -> Topology:
        """Build the topology for ``world_size`` ranks; the data size follows from the other sizes.

        Raises:
            ValueError: ``world_size`` is not a multiple of ``tensor * pipe * context``, or ``expert`` does not divide
                ``data * context``.
        """
        divisor, got_text = tensor * pipe * context, format_sizes(world_size, tensor, pipe, context)
        if world_size % divisor:
            raise ValueError(
                f"world size must be a multiple of {format_axes(context)}, {got_text}. "
                f"Start {(world_size // divisor + 1) * divisor} processes, or lower one of the "
                f"{'two' if context == 1 else 'three'} sizes."
            )
        data = world_size // divisor
        if (data * context) % expert:
            raise ValueError(
                f"--expert-model-parallel-size must divide the data x context ranks, got {expert} and {data} x "
                f"{context} = {data * context}. Use one of "
                f"{[n for n in range(1, data * context + 1) if data * context % n == 0]}"
            )
        return cls(pipe=pipe, data=data, tensor=tensor, context=context, expert=expert)

    @property
    def world_size(self) -> int:
        return self.pipe * self.data_context * self.tensor

    @property
    def data_context(self) -> int:
        """Number of ranks that hold the same weights and all-reduce their gradients: ``d c``."""
        return self.data * self.context

    def axis_sizes(self) -> dict[str, int]:
        """Return the sizes by name, as checkpoints save them; context and expert are included only if above 1."""
        axis_sizes = {"pipe": self.pipe, "data": self.data, "tensor": self.tensor}
        optional = {"context": self.context, "expert": self.expert}
        return {**axis_sizes, **{name: size for name, size in optional.items() if size > 1}}

    def expert_groups(self, *, same_experts: bool = False) -> list[list[int]]:
        """Return the rank groups that share a layer's experts, in expert order.

        Args:
            same_experts: instead return the rank groups that hold the same experts.
        """
        data_context_groups = self.groups("data", "context")
        if same_experts:
            return [ranks[offset :: self.expert] for ranks in data_context_groups for offset in range(self.expert)]
        return [
            ranks[start : start + self.expert]
            for ranks in data_context_groups
            for start in range(0, len(ranks), self.expert)
        ]

    def rank(self, coordinate: Coordinate) -> int:
        """Return the global rank at ``coordinate``."""
        replica = (coordinate.pipe * self.data + coordinate.data) * self.context + coordinate.context
        return replica * self.tensor + coordinate.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of ``rank``."""
        quotient, tensor = divmod(rank, self.tensor)
        quotient, context = divmod(quotient, self.context)
        pipe, data = divmod(quotient, self.data)
        return Coordinate(pipe=pipe, data=data, tensor=tensor, context=context)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups of ranks that differ only along ``axes``, each in ascending order.

        ``groups("tensor")`` returns the tensor-parallel groups, ``groups("pipe", "tensor")`` the ranks in each replica.
        """
        unknown = set(axes) - set(AXES)
        if unknown:
            raise ValueError(f"axes must be among {AXES}, got {sorted(unknown)}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinate = self.coordinate(rank)
            key = tuple(getattr(coordinate, axis) for axis in AXES if axis not in axes)
            members.setdefault(key, []).append(rank)
        return list(members.values())


def format_axes(context: int) -> str:
    """Format the axes whose product must divide the world size; context is omitted if its size is 1."""
    return "tensor x pipe" if context == 1 else "tensor x pipe x context"


def format_sizes(world_size: int, tensor: int, pipe: int, context: int) -> str:
    """Format the world size, the flags and their product for an error message."""
    flags = f"--model-parallel-size {tensor}, --pipe-parallel-size {pipe}"
    product, total = f"{tensor} x {pipe}", tensor * pipe * context
    if context > 1:
        flags, product = f"{flags}, --context-parallel-size {context}", f"{product} x {context}"
    return f"got world_size={world_size}, {flags} ({product} = {total})"


def chunk_indices(rank: int, size: int) -> tuple[int, int]:
    """Return the two chunk indices, out of ``2 * size``, that context rank ``rank`` holds.

    The first chunk attends to few keys and the last one to the most, so that pairing them balances causal attention.
    """
    return rank, 2 * size - 1 - rank
