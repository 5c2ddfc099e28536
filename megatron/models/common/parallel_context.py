"""ParallelContext: the process groups and dropout streams that layers are built with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron.config.parallel import ALL_GATHER, ALL_TO_ALL, HIERARCHICAL
from megatron.models.common.model_args import Module
from megatron.mpu.context_parallel import gather_rows, local_positions, split_along_context
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import set_partial
from tds.renamed import Renamed, warn_renamed


@dataclass(frozen=True)
class ParallelContext:
    """Parallelism of a module: its process groups and its source of dropout masks.

    With ``sequence_parallel``, hidden states between tensor-parallel regions are this rank's shard, [s/t, b, h]. With a
    ``context`` group of c ranks, a rank has s/c positions of a sequence, and only attention combines all s positions
    (``megatron.mpu.context_parallel``).

    Args:
        cp_comm_type: communication of attention over the context group, documented in ``ContextAttention``: one type,
            or a type for each layer.
        context_inner, context_outer: with the type a2a+p2p, the context ranks that exchange tokens for heads, and the
            context ranks with the same rank in ``context_inner``.
        expert: group of ranks over which the experts of a layer are distributed.
        expert_tensor: the consecutive tensor ranks over which each expert is sharded; None: all. With fewer ranks than
            in ``group``, they apply their experts to their shards of the sequence.
    """

    group: Group = SINGLE
    streams: DropoutStreams = field(default_factory=DropoutStreams)
    sequence_parallel: bool = False
    context: Group = SINGLE
    cp_comm_type: str | tuple[str, ...] = ALL_GATHER
    context_inner: Group = SINGLE
    context_outer: Group = SINGLE
    expert: Group = SINGLE
    expert_tensor: Group | None = None

    cut = Renamed("layer_kwargs")
    part = Renamed("shard_sequence")
    length = Renamed("full_length")
    on_part = Renamed("mark_sequence_parallel")

    @property
    def layer_kwargs(self) -> dict[str, Any]:
        """Keyword arguments with which the layers of ``megatron.mpu.layers`` are constructed."""
        return {"group": self.group, "sequence_parallel": self.sequence_parallel}

    @property
    def for_experts(self) -> ParallelContext:
        """``ParallelContext`` of a layer's experts, whose tensor parallelism is that of ``expert_tensor``."""
        if not self.has_expert_tensor_group:
            return self
        assert self.expert_tensor is not None
        sequence_parallel = self.sequence_parallel and self.expert_tensor.size > 1
        return replace(self, group=self.expert_tensor, sequence_parallel=sequence_parallel, expert_tensor=None)

    @property
    def has_expert_tensor_group(self) -> bool:
        """True if experts are sharded over fewer tensor ranks than other layers."""
        return self.expert_tensor is not None and self.expert_tensor.size < self.group.size

    def dropout(
        self, x: torch.Tensor, probability: float, *, training: bool, layer: int, site: str,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply dropout to hidden states with the mask of ``layer`` and ``site``, and add ``residual`` if given."""
        return self.streams.dropout(
            x,
            probability,
            training=training,
            layer=layer,
            site=site,
            is_sequence_slice=self.sequence_parallel,
            residual=residual,
        )

    def uses_kernels(self, x: torch.Tensor) -> bool:
        """Return True if layers process ``x`` by Triton kernels; compiled layers use torch's operators."""
        return not torch.compiler.is_compiling() and self.streams.uses_kernel(x)

    def shard_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` [s, ...] that belong to this rank's shard of the sequence.

        Raises:
            ValueError: with ``sequence_parallel``, the number of rows is not divisible by the group size.
        """
        if not self.sequence_parallel:
            return x
        if x.shape[0] % self.group.size:
            raise ValueError(
                "with --sequence-parallel, the sequence length must be a multiple of --model-parallel-size, got "
                f"{x.shape[0]} and {self.group.size}. Change one of them"
            )
        return x.chunk(self.group.size)[self.group.rank]

    def full_length(self, x: torch.Tensor) -> int:
        """Return the full sequence length of hidden states ``x`` [s, b, h] or [s/t, b, h]."""
        return x.shape[0] * (self.group.size if self.sequence_parallel else 1) * self.context.size

    def for_layer(self, layer: int) -> ParallelContext:
        """Return the ``ParallelContext`` of a layer, whose ``cp_comm_type`` is one type; later layers have the last."""
        if isinstance(self.cp_comm_type, str):
            return self
        return replace(self, cp_comm_type=self.cp_comm_type[min(layer, len(self.cp_comm_type) - 1)])

    @property
    def head_group(self) -> Group:
        """The context ranks that exchange tokens for heads: each attends with all their tokens and a share of heads."""
        groups = {ALL_TO_ALL: self.context, HIERARCHICAL: self.context_inner}
        return groups.get(self.cp_comm_type, SINGLE) if isinstance(self.cp_comm_type, str) else SINGLE

    @property
    def query_group(self) -> Group:
        """The context ranks that attend with different queries: each with two chunks, and all keys."""
        groups = {ALL_TO_ALL: SINGLE, HIERARCHICAL: self.context_outer}
        return groups.get(self.cp_comm_type, self.context) if isinstance(self.cp_comm_type, str) else self.context

    @property
    def has_sharded_heads(self) -> bool:
        """True if this rank attends with a share of the heads of its tensor rank."""
        return self.head_group.size > 1

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the full-sequence positions of the ``length`` tokens of this context rank: int64 [length]."""
        return local_positions(length, self.context, device)

    def query_positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's queries in a full sequence of ``length`` tokens."""
        return local_positions(length // self.query_group.size, self.query_group, device)

    def query_and_key_segments(self, segment_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the segment ids of the queries that this rank attends with, and of all keys. Collective.

        Shapes:
            segment_ids [b, s/c], of this rank's tokens
            output      [b, s/q] with q ranks in ``query_group``, and [b, s]
        """
        key_segment_ids = gather_rows(segment_ids.t(), self.context).t()
        return self.select_local_queries(key_segment_ids), key_segment_ids

    def select_local_queries(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Select the positions of this rank's queries from ``x``, which has the full sequence along ``dim``."""
        return split_along_context(x, self.query_group, dim)

    def mark_sequence_parallel(self, module: Module) -> Module:
        """Return ``module``; with ``sequence_parallel``, mark its weights as applied to a shard of the sequence."""
        if self.sequence_parallel:
            module.parallel = self  # type: ignore[assignment]
            for parameter in module.parameters():
                set_partial(parameter)
        return module


def get_parallel_context(module: nn.Module) -> ParallelContext | None:
    """Return the ``ParallelContext`` that a layer or a model was built with, or None."""
    parallel = getattr(module, "parallel", None)
    if parallel is None and isinstance(getattr(module, "place", None), ParallelContext):
        warn_renamed(f"{type(module).__name__}.place", "parallel")
        parallel = module.place
    return parallel if isinstance(parallel, ParallelContext) else None
