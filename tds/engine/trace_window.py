"""Tracing: traces the first steps and draws a picture."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tds import trace
from tds.action_times import Work

_log = logging.getLogger("tds")


def parse_trace_window(section: Mapping[str, Any]) -> tuple[str, int] | None:
    """Parse the trace's (folder, number of steps) in the JSON's "pipeline" section; None without a trace.

    Raises:
        ValueError: "trace" is not a folder name, or "trace_steps" is not a positive int.
    """
    folder, num_steps = section.get("trace"), section.get("trace_steps", trace.DEFAULT_STEPS)
    if folder is None:
        if "trace_steps" in section:
            raise ValueError('"pipeline": {"trace_steps": ...} has no effect without "trace". Set "trace" to a folder')
        return None
    if not isinstance(folder, str) or not folder:
        raise ValueError(f'"pipeline": {{"trace": ...}} must be the name of a folder, got {folder!r}')
    if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
        raise ValueError(f'"pipeline": {{"trace_steps": ...}} must be a positive integer, got {num_steps!r}')
    return folder, num_steps


class Tracing:
    """Traces one rank's first steps; rank 0 draws the last traced step at the end.

    If the folder or file cannot be written, this rank warns once and continues without a trace, so that no other rank
    waits for it.

    Args:
        owner: the picture is drawn when ``close`` is called, when this object is deleted, or when the program ends.
        metadata: "stage", "replica" and other file metadata.
        origin_ns: zero point for trace times, on the clock of ``Work`` plus ``offset_ns``.
    """

    def __init__(
        self, owner: Any, folder: str, num_steps: int, rank: int, metadata: Mapping[str, Any], *, origin_ns: int,
        offset_ns: int,
    ) -> None:  # fmt: skip
        self._metadata = {**metadata, "max_steps": num_steps, "run": origin_ns}
        self._num_steps_left = num_steps
        self._file: trace.TraceFile | None = None
        try:
            self._file = trace.TraceFile(folder, rank, self._metadata)
        except OSError as error:
            self._disable(error)
        self._origin_ns = origin_ns - offset_ns
        from tds.plot import draw  # imported here because it imports matplotlib

        self._draw_finalizer = weakref.finalize(owner, draw, Path(folder)) if rank == 0 else None

    @property
    def records_step(self) -> bool:
        """True if the next step is traced."""
        return self._num_steps_left > 0

    def close(self) -> None:
        """Draw the picture now, if this is rank 0 and the picture has not been drawn."""
        if self._draw_finalizer is not None:
            self._draw_finalizer()

    def write(self, work: Sequence[Work], *, step: int, schedule: str, num_micro_batches: int) -> None:
        """Append a step to the file."""
        if self._file is None:
            return
        self._num_steps_left -= 1
        position = {
            "replica": self._metadata["replica"],
            "stage": self._metadata["stage"],
            "origin_ns": self._origin_ns,
        }
        events = trace.events(work, step=step, schedule=schedule, num_micro_batches=num_micro_batches, **position)
        try:
            self._file.add(events)
        except OSError as error:
            self._disable(error)

    def _disable(self, error: OSError) -> None:
        """Warn and stop tracing; a failing trace must not end the run."""
        rank, problem = dist.get_rank() if dist.is_initialized() else 0, f"{type(error).__name__}: {error}"
        _log.warning("rank %d continues without a trace, which cannot be written (%s)", rank, problem)
        self._num_steps_left, self._file = 0, None
