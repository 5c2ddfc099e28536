"""One way to lay a model over a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron import cost
from megatron.cost.waiting import Waiting
from megatron.stages import bubble, candidates

RECOMPUTE = ("none", "selective", "full")
SPLITTING = "zb-h1"
"""The schedule that puts the gradients of weights off."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes, what a step is cut into, and what is shared, recomputed or put elsewhere.

    Args:
        recompute: "none", "selective" (the core of attention), "full" (each layer from its input).
        sequence_parallel: tokens are cut over the tensor ranks between the products.
        overlaps_sums: gradients are summed over the replicas while the last backward runs.
        overlaps_tensor: gradients of activations are summed over the tensor ranks while those of weights are computed.
        is_compiled: each layer is.
    """

    tensor: int = 1
    pipe: int = 1
    data: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    recompute: str = "none"
    zero_stage: int = 0
    sequence_parallel: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    waiting: Waiting = Waiting()  # noqa: RUF009 - frozen
    dtype: str = "bf16"
    optimizer: str = "adamw"
    overlaps_sums: bool = True
    overlaps_tensor: bool = True
    is_compiled: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipe * self.data

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all replicas."""
        return self.micro_batch_size * self.num_micro_batches * self.data

    @property
    def zero(self) -> cost.Zero:
        """How replicas share what they hold."""
        return cost.Zero(self.zero_stage, self.data, self.offload_optimizer, self.offload_parameters)

    @property
    def sequence(self) -> int:
        """Over how many tensor ranks tokens are cut between the products."""
        return self.tensor if self.sequence_parallel else 1

    def __str__(self) -> str:
        words = [f"tp {self.tensor}", f"pp {self.pipe}", f"dp {self.data}"]
        if self.pipe > 1:
            words.append(self.schedule + (f" x {self.chunks} chunks" if self.chunks > 1 else ""))
        words.append(f"micro-batch {self.micro_batch_size} x {self.num_micro_batches}")
        words += [f"ZeRO {self.zero_stage}"] * bool(self.zero_stage)
        words += [f"recompute {self.recompute}"] * (self.recompute != "none")
        words += ["sequence parallel"] * self.sequence_parallel
        words += ["optimizer on the host"] * self.offload_optimizer
        words += ["weights on the host"] * self.offload_parameters
        return ", ".join(words)


def layout_of(config: Any, world_size: int) -> Layout:
    """Return the layout of a ``megatron.config.Config`` on so many ranks; the schedule "auto" as its best one."""
    parallel, optimizer, batch = config.parallel, config.optimizer, config.batch
    stages, chunks, m = parallel.num_stages, parallel.chunks, batch.num_micro_batches
    names = candidates(parallel.schedule, chunks) if stages > 1 else ("1f1b",)
    recompute = "full" if parallel.checkpoint_activations else parallel.recompute_granularity or "none"
    return Layout(
        tensor=parallel.model_parallel_size,
        pipe=stages,
        data=parallel.data_parallel_size(world_size),
        chunks=chunks,
        schedule=min(names, key=lambda name: bubble(stages, m, name, chunks)),
        micro_batch_size=batch.micro_batch_size,
        num_micro_batches=m,
        recompute=recompute,
        zero_stage=optimizer.zero_stage,
        sequence_parallel=getattr(parallel, "sequence_parallel", False),
        offload_optimizer=optimizer.offload_optimizer,
        offload_parameters=optimizer.offload_parameters,
        waiting=cost.waiting_of(config),
        dtype=config.precision.dtype or "bf16",
        optimizer=optimizer.optimizer,
        overlaps_sums=parallel.overlap_grad_reduce,
        overlaps_tensor=not parallel.compile,
        is_compiled=parallel.compile,
    )
