"""Recompute on one stage of a pipeline."""

from __future__ import annotations

from functools import partial

from megatron.model.recompute import Recompute
from megatron.model.sizes import Place, Sizes
from tds.pipe import PipelineModule


def stage_recompute(module: PipelineModule, sizes: Sizes, place: Place) -> Recompute:
    """Return the ``activation_checkpoint_func`` of ``module``, which may still be without its layers."""
    return Recompute(sizes, place, partial(_slots, module, sizes))


def _slots(module: PipelineModule, sizes: Sizes) -> tuple[int, int]:
    """Return how many inputs wait on this stage at most, by the chunk with the most runs; a seam of T5 counts once."""
    chunks = [list(run.is_checkpointable_results) for run in module._runs or [module]]
    if module.stage_id == 0:
        chunks[0][0] = False  # it begins with the embedding and keeps tokens, which wait as they are
    runs = max(map(sum, chunks))
    forwards = sizes.forwards_in_flight[min(module.stage_id, len(sizes.forwards_in_flight) - 1)]
    return runs * forwards, forwards
