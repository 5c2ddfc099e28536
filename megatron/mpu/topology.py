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

    ``expert`` and ``expert_tensor`` are no axes. Each expert is sharded over ``expert_tensor`` consecutive tensor ranks
    (0: all ``t``). Among the ranks of a stage with the same shard, the experts of a layer are distributed over groups
    of ``expert`` consecutive ranks. So the stage's ranks, in the order tensor, context, data, are split into expert
    tensor ranks, expert ranks and copies, as with Megatron-LM's ``tp-cp-ep-dp-pp`` for experts.

    ``context_inner`` splits the context axis into groups of consecutive ranks (hierarchical context parallelism).
    """

    pipe: int
    data: int
    tensor: int
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    context_inner: int = 1

    def __post_init__(self) -> None:
        if self.expert_tensor == self.tensor:
            object.__setattr__(self, "expert_tensor", 0)

    of_world = Renamed("from_world_size")
    sizes = Renamed("axis_sizes")

    @classmethod
    def from_world_size(
        cls, world_size: int, tensor: int, pipe: int, context: int = 1, expert: int = 1, expert_tensor: int = 0,
        context_inner: int = 1,
    ) -> Topology:  # fmt: skip
        """Build the topology for ``world_size`` ranks; the data size follows from the other sizes.

        Raises:
            ValueError: ``world_size`` is not a multiple of ``tensor * pipe * context``, ``expert_tensor`` does not
                divide ``tensor``, ``expert`` does not divide the ranks of a stage that hold the same shard of an
                expert, or ``context_inner`` does not divide ``context``.
        """
        divisor, got_text = tensor * pipe * context, format_sizes(world_size, tensor, pipe, context)
        if world_size % divisor:
            raise ValueError(
                f"world size must be a multiple of {format_axes(context)}, {got_text}. "
                f"Start {(world_size // divisor + 1) * divisor} processes, or lower one of the "
                f"{'two' if context == 1 else 'three'} sizes."
            )
        data = world_size // divisor
        if expert_tensor and tensor % expert_tensor:
            raise ValueError(
                f"--expert-tensor-parallel-size must divide --model-parallel-size, got {expert_tensor} and {tensor}"
            )
        num_ranks = data * context * (tensor // (expert_tensor or tensor))
        if num_ranks % expert:
            raise ValueError(
                "--expert-model-parallel-size must divide the data x context x tensor / expert tensor ranks, got "
                f"{expert} and {data} x {context} x {tensor} / {expert_tensor or tensor} = {num_ranks}. Use one of "
                f"{[n for n in range(1, num_ranks + 1) if num_ranks % n == 0]}"
            )
        if context % context_inner:
            raise ValueError(
                "the first of --hierarchical-context-parallel-sizes must divide --context-parallel-size, got "
                f"{context_inner} and {context}"
            )
        return cls(pipe, data, tensor, context, expert, expert_tensor, context_inner)

    @property
    def world_size(self) -> int:
        return self.pipe * self.data_context * self.tensor

    @property
    def data_context(self) -> int:
        """Number of ranks that hold the same weights and all-reduce their gradients: ``d c``."""
        return self.data * self.context

    def axis_sizes(self) -> dict[str, int]:
        """Return the sizes by name, as checkpoints save them; optional axes only if they have an effect."""
        axis_sizes = {"pipe": self.pipe, "data": self.data, "tensor": self.tensor}
        optional = {"context": self.context, "expert": self.expert}
        axis_sizes |= {name: size for name, size in optional.items() if size > 1}
        return axis_sizes | ({"expert_tensor": self.expert_tensor} if self.expert_tensor else {})

    @property
    def expert_shards(self) -> int:
        """Number of tensor ranks over which an expert is sharded."""
        return self.expert_tensor or self.tensor

    @property
    def expert_copies(self) -> int:
        """Number of ranks that hold the same experts, and the same shard of them."""
        return self.data_context * self.tensor // (self.expert_shards * self.expert)

    def expert_groups(self, *, same_experts: bool = False) -> list[list[int]]:
        """Return the rank groups that share a layer's experts, in expert order.

        Args:
            same_experts: instead return the rank groups that hold the same experts.
        """
        stages = self.groups("data", "context", "tensor")
        same_shard = [ranks[shard :: self.expert_shards] for ranks in stages for shard in range(self.expert_shards)]
        if same_experts:
            return [ranks[offset :: self.expert] for ranks in same_shard for offset in range(self.expert)]
        return [
            ranks[start : start + self.expert] for ranks in same_shard for start in range(0, len(ranks), self.expert)
        ]

    def expert_tensor_groups(self) -> list[list[int]]:
        """Return the rank groups over which an expert is sharded."""
        size = self.expert_shards
        return [ranks[start : start + size] for ranks in self.groups("tensor") for start in range(0, len(ranks), size)]

    def context_groups(self, *, is_inner: bool) -> list[list[int]]:
        """Return the groups of ``context_inner`` consecutive context ranks, or of ranks with the same inner rank."""
        size = self.context_inner
        if is_inner:
            starts = range(0, self.context, size)
            return [ranks[start : start + size] for ranks in self.groups("context") for start in starts]
        return [ranks[offset::size] for ranks in self.groups("context") for offset in range(size)]

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
