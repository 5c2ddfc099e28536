"""``stages.json`` in the run folder: layers and parameters of each stage.

Rank 0 writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron import files
from megatron.config import Config
from megatron.mpu.topology import Topology
from megatron.training.dry_run import layers_text, place_text
from megatron.training.estimates import is_known, stage_memory

NAME = "stages.json"


def stage_facts(
    config: Config, topology: Topology, bounds: Sequence[int], counted: Sequence[int], before: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the layers, the parameters per rank and the estimated bytes per rank of each stage.

    The estimate covers only the model and its training; the bytes allocated before are a separate entry.

    Args:
        bounds: bounds of the pieces, as in ``megatron.training.dry_run.plan_rows``.
        counted: number of parameters of the full model, then of one rank of each stage.
        before: "stage 0" and so on -> largest number of bytes on a rank of the stage before the model was built.
    """
    known, stages = is_known(config, counted), topology.pipe
    memory = stage_memory(config, topology, bounds, config.precision.dtype or "") if known else None
    return [
        {
            "stage": stage,
            "ranks": topology.data_context * topology.tensor,
            "layers": (
                place_text(config, bounds, stages, stage)
                if known
                else layers_text(bounds, stages, stage, config.parallel.placement)
            ),
            "parameters": counted[1 + stage],
            "estimated_bytes": memory[stage].total if memory is not None else None,
            "estimated_parts": asdict(memory[stage]) if memory is not None else None,
            "before_bytes": before[f"stage {stage}"],
        }
        for stage in range(stages)
    ]


def write(folder: Path, facts: list[dict[str, Any]]) -> None:
    """Write the result of ``stage_facts`` to the run folder."""
    files.replace_bytes(folder / NAME, json.dumps(facts, indent=2).encode() + b"\n")
