"""What ours should hold, by ``megatron.models.common.cost``, for the rows of ``zero.py``."""

from __future__ import annotations

from typing import Any

from benchmarks.zero_team import Case, Contender, config_of


def expected(contender: Contender, case: Case) -> tuple[int, int]:
    """Return the bytes of ours that are kept between steps, and those of gradients, activations and gathered weights.

    On CPUs what is offloaded lies in the same memory, so it counts.
    """
    from megatron.models import registry
    from megatron.training.dry_run import zero_of

    config = config_of(contender, case)
    settings: dict[str, Any] = {"micro_batch_size": case.batch_size, "dtype": case.dtype}
    costs = registry.costs_of(config, is_on_cpu=True)
    units = case.sizes.num_layers + 3
    (memory,) = costs.memory_per_stage([0, units], zero=zero_of(config, case.replicas), **settings)
    kept = memory.weights + memory.optimizer + memory.host
    return kept, memory.gradients + memory.gathered + memory.activations + memory.logits
