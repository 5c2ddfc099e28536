"""What recompute keeps of a forward: inputs of runs of layers, and where they wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.cost.memory import Memory


@dataclass(frozen=True)
class Kept:
    """Bytes that a unit keeps of a micro-batch until its backward: in full, or its input when it is recomputed.

    ``core`` of ``full`` is kept by what selective recompute runs again.
    """

    full: int = 0
    input: int = 0
    core: int = 0

    def without_core(self) -> Kept:
        """Return what is left where selective recompute runs."""
        return replace(self, full=self.full - self.core, core=0)


@dataclass(frozen=True)
class Waiting:
    """One input for ``every`` layers, of which each of ``parts`` tensor ranks keeps a part; or on the host."""

    every: int = 1
    parts: int = 1
    is_on_host: bool = False

    def placed(
        self, memory: Memory, pieces: Sequence[Sequence[Kept]], forwards: float, read: int, work: int = 0
    ) -> Memory:
        """Return ``memory`` with what recompute keeps of so many ``forwards`` through all ``pieces`` of a stage.

        Args:
            read: bytes that all layers of the pieces read, of one forward; they count in full and on the device.
            work: bytes that the backward of a layer that was run again works in.
        """
        inputs = sum(sum([unit.input for unit in piece if unit.input][:: self.every]) for piece in pieces)
        waits = -(-int(forwards * inputs) // self.parts)
        others = sum(unit.full for piece in pieces for unit in piece if not unit.input)
        run_again = max(
            sum(sorted((unit.full for unit in piece if unit.input), reverse=True)[: self.every]) for piece in pieces
        )
        again = max(run_again + work - memory.logits, 0)  # the logits are gone when a layer runs again
        on_device, on_host = (0, waits) if self.is_on_host else (waits, 0)
        kept = int(forwards * (read + others)) + on_device
        return replace(memory, activations=kept + again, host=memory.host + on_host)


def waiting_of(config: Any) -> Waiting:
    """Return how a run of ``config``, a ``megatron.config.Config``, keeps the inputs of what it recomputes."""
    parallel = config.parallel
    parts = parallel.model_parallel_size if parallel.partition_activations else 1
    return Waiting(parallel.checkpoint_num_layers, parts, parallel.checkpoint_in_cpu)
