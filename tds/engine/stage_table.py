"""Table with each stage's layers, parameters and costs, logged once by rank 0."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tds.bubble_timer import Row
from tds.log import log_rank_0
from tds.p2p.collective_scope import collective_scope
from tds.schedule import LOOP, Placement

_log = logging.getLogger("tds")
MEBI = 2**20


@dataclass(frozen=True)
class LayerCost:
    """A layer's cost per micro-batch; times are means over the ranks."""

    name: str
    num_parameters: int
    forward_s: float
    backward_s: float
    activation_bytes: int
    shapes: str = ""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class StageChunk:
    """One run of layers on a stage. ``costs`` are per micro-batch, and None if they were not measured."""

    stage: int
    chunk: int
    layers: str
    num_parameters: int
    weight_bytes: int
    costs: Sequence[LayerCost] | None = None

    def format_cells(self) -> list[str]:
        row = [f"{self.stage}" + (f".{self.chunk}" if self.chunk else ""), self.layers, f"{self.num_parameters:,}"]
        row.append(f"{self.weight_bytes / MEBI:.1f}")
        if self.costs is not None:
            row.append(f"{sum(cost.forward_s for cost in self.costs) * 1e3:.2f}")
            row.append(f"{sum(cost.backward_s for cost in self.costs) * 1e3:.2f}")
            row.append(f"{sum(cost.activation_bytes for cost in self.costs) / MEBI:.1f}")
        return row


def format_table(stage_chunks: Sequence[StageChunk]) -> str:
    """Format the table with one line per virtual stage, in the order of the layers."""
    header = ["stage", "layers", "parameters", "weights MiB"]
    if any(stage_chunk.costs is not None for stage_chunk in stage_chunks):
        header += ["forward ms", "backward ms", "activations MiB"]
    rows = [header, *(stage_chunk.format_cells() for stage_chunk in stage_chunks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index == 1 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_layers(names: Sequence[str], start: int) -> str:
    """Format the indices of the first and last layer and the layer names in order: "3-6 Block x 3, Norm"."""
    runs = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    span = f"{start}" if len(names) == 1 else f"{start}-{start + len(names) - 1}"
    return f"{span} " + ", ".join(name if count == 1 else f"{name} x {count}" for name, count in runs)


def log_stage_table(module: Any, layer_names: Sequence[str], stage: int, group: Any, device: torch.device) -> None:
    """Log the table of ``module`` on rank 0. Collective.

    The table is always shown if the layers were partitioned by measured times; otherwise it is logged at level INFO.

    Args:
        layer_names: names of all model layers; empty: there is no table.
    """
    if not layer_names:
        return
    num_chunks = getattr(module, "chunks", 1)
    counts = _gather_parameter_counts(module, stage, num_chunks, group, device)
    placement = Placement(len(counts), num_chunks, getattr(module, "placement", LOOP))
    profile = getattr(module, "profile", None)
    names = layer_names
    stage_chunks = []
    for virtual_stage, (start, stop) in enumerate(itertools.pairwise(module.parts)):
        chunk, owner_stage = virtual_stage // len(counts), placement.stage_of(virtual_stage)
        num_parameters, weight_bytes = counts[owner_stage][chunk]
        costs = None if profile is None else profile.layers[start:stop]
        stage_chunks.append(
            StageChunk(owner_stage, chunk, format_layers(names[start:stop], start), num_parameters, weight_bytes, costs)
        )
    if dist.get_rank() != 0:
        return
    if profile is not None:
        log_rank_0(f"stages by measured time, per micro-batch:\n{format_table(stage_chunks)}")
    else:
        _log.info("stages:\n%s", format_table(stage_chunks))


def _gather_parameter_counts(
    module: Any, stage: int, num_chunks: int, group: Any, device: torch.device
) -> list[list[tuple[int, int]]]:
    """Gather (number of parameters, their bytes) by stage and chunk. Collective over the pipeline."""
    counts = []
    for chunk in range(num_chunks):
        parameters = list(module.parameters()) if num_chunks == 1 else module.parameters_of(chunk)
        counts.append((sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)))
    if dist.get_world_size(group) == 1:
        return [counts]
    local = torch.tensor(counts, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    with collective_scope(stage, "counting the parameters of the stages"):
        dist.all_gather(gathered, local, group=group)
    return [[(int(numel), int(num_bytes)) for numel, num_bytes in stage_counts.tolist()] for stage_counts in gathered]


def compute_bubble(stages: Sequence[Sequence[Row]]) -> float | None:
    """Compute the idle fraction over all stages and steps; None if there is no step."""
    idle_ns = total_ns = 0
    for rows in zip(*stages, strict=True):
        step_ns = max(row[1] for row in rows) - rows[0][0]
        busy_ns = sum(end - start - wait_ns for start, end, wait_ns in rows)
        total_ns += step_ns * len(rows)
        idle_ns += max(0, step_ns * len(rows) - busy_ns)
    return idle_ns / total_ns if total_ns else None


def gather_bubble(rows: Sequence[Row], stage: int, group: Any, device: torch.device) -> float | None:
    """Compute the bubble over all stages. Collective over the pipeline's ``group``.

    Args:
        rows: step times on this stage; every stage passes the same steps.
    """
    if dist.get_world_size(group) == 1:
        return compute_bubble([rows])
    local = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 3)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    with collective_scope(stage, "gathering the times of the stages"):
        dist.all_gather(gathered, local, group=group)
    return compute_bubble(
        [
            [(int(start_ns), int(end_ns), int(wait_ns)) for start_ns, end_ns, wait_ns in stage_rows.tolist()]
            for stage_rows in gathered
        ]
    )
