"""ParallelContext: the process groups, random streams and devices a layer is built with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron.models.common.model_args import Module
from megatron.mpu.context_parallel import gather_rows, own_positions, split_along_context
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import set_partial


@dataclass(frozen=True)
class ParallelContext:
    """Where a module runs: its tensor-parallel group and its source of dropout masks.

    With ``sequence_parallel`` hidden states between tensor-parallel regions are this rank's part, [s/t, b, h]. With a
    ``context`` group of c ranks s is s/c everywhere but in attention: see ``megatron.mpu.context_parallel``.

    Args:
        cp_comm_type: what attention sends over the context group, as ``ContextAttention`` says.
        expert: ranks that share out the experts of a layer.
        cuts_experts: each expert is cut over the tensor ranks; else each of these has whole ones, for its part of the
            sequence.
    """

    group: Group = SINGLE
    streams: DropoutStreams = field(default_factory=DropoutStreams)
    sequence_parallel: bool = False
    context: Group = SINGLE
    cp_comm_type: str = "all_gather"
    expert: Group = SINGLE
    cuts_experts: bool = True

    @property
    def cut(self) -> dict[str, Any]:
        """What a layer of ``megatron.mpu.layers`` is told of it."""
        return {"group": self.group, "sequence_parallel": self.sequence_parallel}

    @property
    def of_experts(self) -> ParallelContext:
        """Where a layer's experts run, over which tensor ranks they are cut."""
        return self if self.cuts_experts else replace(self, group=SINGLE, sequence_parallel=False)

    def dropout(self, x: torch.Tensor, probability: float, *, training: bool, layer: int, site: str) -> torch.Tensor:
        """Return hidden states with elements dropped by the mask of ``layer`` and ``site``."""
        return self.streams.dropout(
            x, probability, training=training, layer=layer, site=site, is_part=self.sequence_parallel
        )

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` [s, ...] that the hidden states of this rank stand for.

        Raises:
            ValueError: with ``sequence_parallel`` the group size does not divide them.
        """
        if not self.sequence_parallel:
            return x
        if x.shape[0] % self.group.size:
            raise ValueError(
                "with --sequence-parallel the sequence must be a multiple of --model-parallel-size, got "
                f"{x.shape[0]} and {self.group.size}"
            )
        return x.chunk(self.group.size)[self.group.rank]

    def length(self, x: torch.Tensor) -> int:
        """Return the length of the sequence of which ``x`` [s, b, h] or [s/t, b, h] are hidden states."""
        return x.shape[0] * (self.group.size if self.sequence_parallel else 1) * self.context.size

    @property
    def cuts_heads(self) -> bool:
        """Whether attention has whole sequences of 1/c of the heads, rather than some queries of all of them."""
        return self.context.size > 1 and self.cp_comm_type == "a2a"

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's ``length`` tokens in the whole sequence: int64 [length]."""
        return own_positions(length, self.context, device)

    def query_positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of the queries that this rank's attention has, of a whole sequence of ``length``."""
        own = length if self.cuts_heads else length // self.context.size
        return own_positions(own, SINGLE if self.cuts_heads else self.context, device)

    def queries_and_keys(self, segment_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the documents of the queries that this rank's attention has, and those of the keys. Collective.

        Shapes:
            segment_ids [b, s/c], of this rank's tokens
            output      [b, s/c] or [b, s], and [b, s]
        """
        every = gather_rows(segment_ids.t(), self.context).t()
        return every if self.cuts_heads else segment_ids, every

    def own_queries(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return what ``x``, of all positions of a sequence along ``dim``, has for the queries of this rank."""
        return x if self.cuts_heads else split_along_context(x, self.context, dim)

    def on_part(self, module: Module) -> Module:
        """Return ``module``, whose full weights every rank applies to its part of the sequence."""
        if self.sequence_parallel:
            module.place = self  # type: ignore[assignment]
            for parameter in module.parameters():
                set_partial(parameter)
        return module


def context_of(module: nn.Module) -> ParallelContext | None:
    """Return the context that a layer or a model was built with; None for a module that has none."""
    context = getattr(module, "place", None)
    return context if isinstance(context, ParallelContext) else None
