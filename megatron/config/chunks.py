"""``chunks = layers / (stages x layers of a chunk)``: Megatron's way to say how many chunks a stage holds.

The layers of an encoder-decoder are those of both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.scan import Scan
from megatron.models.registry import FAMILIES

FLAG = "--num-layers-per-virtual-pipeline-stage"


def resolve_chunks(found: Scan, firm: Mapping[str, Any], soft: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunks that follow from the layers of one; a contradiction goes to ``found.problems``.

    Args:
        firm: field -> value from flags and JSON.
        soft: field -> value from defaults.
    """
    both = {**soft, **firm}
    each, stages = both.get("layers_per_chunk"), both.get("pipe_parallel_size", 0)
    if not each or stages < 2 or ("layers_per_chunk" not in firm and "pipeline_chunks" in firm):
        return {}
    layers = both.get("num_layers", ModelConfig().num_layers)
    name = "--num-layers"
    if sides := FAMILIES[found.family].config.SIDES:
        layers = sum(both.get(side) or layers for side in sides)
        name = "the layers of both sides"
    if layers % (stages * each):
        found.problems.append(
            f"{name} must be a multiple of --pipe-parallel-size x {FLAG}, got {layers} and {stages} x {each} = "
            f"{stages * each}. Change one of them, or use --pipeline-chunks, which takes any number of layers"
        )
        return {}
    chunks = layers // (stages * each)
    if firm.get("pipeline_chunks", chunks) != chunks:
        found.problems.append(
            f"{FLAG} and --pipeline-chunks must agree, got {layers} layers / ({stages} stages x {each}) = {chunks} and "
            f"{firm['pipeline_chunks']}. Leave one of them out"
        )
    return {"pipeline_chunks": chunks}
