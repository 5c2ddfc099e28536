"""``stages.json`` in the run folder: layers and parameters by stage.

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
from megatron.training.dry_run import layers_text, stage_layers_text
from megatron.training.estimates import is_config_model, stage_memory

FILE_NAME = "stages.json"


def stage_entries(
    config: Config,
    topology: Topology,
    bounds: Sequence[int],
    parameter_counts: Sequence[int],
    bytes_before_model: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return layers, parameters per rank and estimated bytes per rank by stage.

    The estimate covers only the model and its training; bytes allocated before the model was built are a separate
    entry.

    Args:
        bounds: virtual-stage bounds, as in ``megatron.training.dry_run.plan_rows``.
        parameter_counts: parameter count in the full model, then per rank of each stage.
        bytes_before_model: "stage 0" and so on -> maximum bytes on a rank of the stage before the model was built.
    """
    is_known_model, num_stages = is_config_model(config, parameter_counts), topology.pipe
    memory = stage_memory(config, topology, bounds, config.precision.dtype or "") if is_known_model else None
    return [
        {
            "stage": stage,
            "ranks": topology.data_context * topology.tensor,
            "layers": (
                stage_layers_text(config, bounds, num_stages, stage)
                if is_known_model
                else layers_text(bounds, num_stages, stage, config.parallel.placement)
            ),
            "parameters": parameter_counts[1 + stage],
            "estimated_bytes": memory[stage].total if memory is not None else None,
            "estimated_parts": asdict(memory[stage]) if memory is not None else None,
            "before_bytes": bytes_before_model[f"stage {stage}"],
        }
        for stage in range(num_stages)
    ]


def write(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Write ``stage_entries`` to the run folder."""
    files.replace_bytes(folder / FILE_NAME, json.dumps(entries, indent=2).encode() + b"\n")
