"""The grid of ranks, as arithmetic: no torch, no processes.

``rank = ((pipe * d + data) * c + context) * t + tensor``: the tensor axis runs fastest, so that a tensor group lies
within a node; the pipe axis runs slowest. DeepSpeed's ``PipeModelDataParallelTopology`` has the same order, with data
and context as one axis, and so has Megatron-LM by default (tp-cp-ep-dp-pp).
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pipe", "data", "context", "tensor")


@dataclass(frozen=True)
class Coordinate:
    """The place of one rank on the four axes."""

    pipe: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True)
class Topology:
    """Sizes of the four axes: ``p`` pipe, ``d`` data, ``t`` tensor, ``c`` context.

    ``expert`` is no axis of its own: so many neighbours along data and context share out the experts of a layer.
    """

    pipe: int
    data: int
    tensor: int
    context: int = 1
    expert: int = 1

    @classmethod
    def of_world(cls, world_size: int, tensor: int, pipe: int, context: int = 1, expert: int = 1) -> Topology:
        """Return the grid of ``world_size`` ranks, the data axis taking what the others leave.

        Raises:
            ValueError: ``world_size`` is not a multiple of ``tensor * pipe * context``, or ``expert`` does not divide
                what data and context have.
        """
        rest, got = tensor * pipe * context, sizes_text(world_size, tensor, pipe, context)
        if world_size % rest:
            raise ValueError(
                f"world size must be a multiple of {axes_text(context)}, {got}. "
                f"Start {(world_size // rest + 1) * rest} processes, or lower one of the "
                f"{'two' if context == 1 else 'three'}."
            )
        data = world_size // rest
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
        """Ranks that hold the same weights and add up their gradients: ``d c``."""
        return self.data * self.context

    def sizes(self) -> dict[str, int]:
        """Return the sizes by name, as a checkpoint keeps them: those of context and expert where they are above 1."""
        found = {"pipe": self.pipe, "data": self.data, "tensor": self.tensor}
        beside = {"context": self.context, "expert": self.expert}
        return {**found, **{name: size for name, size in beside.items() if size > 1}}

    def expert_groups(self, *, of_replicas: bool = False) -> list[list[int]]:
        """Return every set of ranks that share out the experts of a layer, in the order of their experts.

        Args:
            of_replicas: those that have the same experts.
        """
        every = self.groups("data", "context")
        if of_replicas:
            return [ranks[place :: self.expert] for ranks in every for place in range(self.expert)]
        return [ranks[first : first + self.expert] for ranks in every for first in range(0, len(ranks), self.expert)]

    def rank(self, coordinate: Coordinate) -> int:
        """Return the global rank at ``coordinate``."""
        replica = (coordinate.pipe * self.data + coordinate.data) * self.context + coordinate.context
        return replica * self.tensor + coordinate.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """Return where ``rank`` stands."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipe, data = divmod(rest, self.data)
        return Coordinate(pipe=pipe, data=data, tensor=tensor, context=context)

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


def axes_text(context: int) -> str:
    """Return the axes whose product divides the world size, in words; that of size 1 which few know is left out."""
    return "tensor x pipe" if context == 1 else "tensor x pipe x context"


def sizes_text(world_size: int, tensor: int, pipe: int, context: int) -> str:
    """Return what was got, with flags and product."""
    flags = f"--model-parallel-size {tensor}, --pipe-parallel-size {pipe}"
    product, whole = f"{tensor} x {pipe}", tensor * pipe * context
    if context > 1:
        flags, product = f"{flags}, --context-parallel-size {context}", f"{product} x {context}"
    return f"got world_size={world_size}, {flags} ({product} = {whole})"


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks of a sequence, of 2 ``size``, that ``rank`` of ``size`` context ranks has.

    The first sees few keys and the last sees most, so that causal work is even.
    """
    return rank, 2 * size - 1 - rank
