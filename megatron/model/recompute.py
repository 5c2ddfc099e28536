"""What a model recomputes in backward, and how it keeps what it recomputes from.

| ``Sizes`` | flag | what is run again |
|---|---|---|
| ``checkpoint_activations`` | --checkpoint-activations | every ``checkpoint_num_layers`` layers, from their input |
| ``recompute_attention`` | --recompute-granularity selective | the core of each attention, from query, key and value |

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.model.sizes import Place, Sizes
from megatron.mpu.kept import Keeper, Keeping
from megatron.mpu.random import checkpoint
from megatron.stages import in_flight


class Recompute:
    """Runs layers so that backward runs them again; of one stage of a pipeline, or of one side of a model.

    Args:
        slots: as of ``Keeper``; None: those of ``num_layers`` layers and one forward at a time.
        num_layers: None: those of ``sizes``.

    Attributes:
        every: layers between two kept inputs; 0 keeps all activations.
    """

    def __init__(
        self,
        sizes: Sizes,
        place: Place,
        slots: Callable[[], tuple[int, int]] | None = None,
        num_layers: int | None = None,
    ) -> None:
        self.every = sizes.checkpoint_num_layers if sizes.checkpoint_activations else 0
        self._streams = place.streams
        how = Keeping(
            is_partitioned=sizes.partition_activations,
            is_on_host=sizes.checkpoint_in_cpu,
            is_contiguous=sizes.contiguous_checkpointing,
            group=place.group,
        )
        own = -(-(num_layers or sizes.num_layers) // max(self.every, 1))
        self.keeper = None if how.is_plain else Keeper(how, slots or (lambda: (own, 1)))

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return ``function(*inputs)``, which keeps ``inputs`` only."""
        return checkpoint(self._streams, function, *inputs, keeper=self.keeper)


def recompute_switches(config: Any) -> dict[str, Any]:
    """Return the fields of ``Sizes`` by which a run of ``config``, a ``megatron.config.Config``, recomputes."""
    parallel, number = config.parallel, config.batch.num_micro_batches
    stages = parallel.num_stages
    of_stage = [in_flight(stages, number, parallel.schedule, parallel.chunks, stage) for stage in range(stages)]
    return {
        "checkpoint_activations": parallel.checkpoint_activations,
        "checkpoint_num_layers": parallel.checkpoint_num_layers,
        "recompute_attention": parallel.recompute_granularity == "selective",
        "partition_activations": parallel.partition_activations,
        "checkpoint_in_cpu": parallel.checkpoint_in_cpu,
        "contiguous_checkpointing": parallel.contiguous_checkpointing,
        "forwards_in_flight": tuple(of_stage) if parallel.has_pipeline else (1,),
    }
