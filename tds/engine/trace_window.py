"""Steps that are traced, and the picture drawn from them."""

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


def asked_window(section: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return (folder, number of steps) that the JSON's "pipeline" section asks for, or None.

    Raises:
        ValueError: "trace" is no folder's name, or "trace_steps" no whole number of 1 or more.
    """
    folder, number = section.get("trace"), section.get("trace_steps", trace.DEFAULT_STEPS)
    if folder is None:
        if "trace_steps" in section:
            raise ValueError('"pipeline": {"trace_steps": ...} has no effect without "trace": name a folder there')
        return None
    if not isinstance(folder, str) or not folder:
        raise ValueError(f'"pipeline": {{"trace": ...}} must be the name of a folder, got {folder!r}')
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f'"pipeline": {{"trace_steps": ...}} must be a whole number of 1 or more, got {number!r}')
    return folder, number


class Tracing:
    """Writes the first steps of one rank; on rank 0 the last of them is drawn at the end.

    A folder or file that cannot be written is told once, and this rank goes on without a trace: the others do not wait.

    Args:
        owner: the end is when ``close`` is called, or this goes, or the program ends.
        about: "stage", "replica" and what else the file says of itself.
        origin_ns: what times count from, on the clock of ``Work`` plus ``offset_ns``.
    """

    def __init__(
        self, owner: Any, folder: str, num_steps: int, rank: int, about: Mapping[str, Any], *, origin_ns: int,
        offset_ns: int,
    ) -> None:  # fmt: skip
        self._about = {**about, "max_steps": num_steps, "run": origin_ns}
        self._left = num_steps
        self._file: trace.TraceFile | None = None
        try:
            self._file = trace.TraceFile(folder, rank, self._about)
        except OSError as error:
            self._give_up(error)
        self._origin_ns = origin_ns - offset_ns
        from tds.plot import draw  # only where it is wanted: it imports matplotlib

        self._picture = weakref.finalize(owner, draw, Path(folder)) if rank == 0 else None

    @property
    def records_step(self) -> bool:
        """True if the step that comes is to be traced."""
        return self._left > 0

    def close(self) -> None:
        """Draw the picture now, if this is rank 0 and it is not drawn yet."""
        if self._picture is not None:
            self._picture()

    def write(self, work: Sequence[Work], *, step: int, schedule: str, num_micro_batches: int) -> None:
        """Add a step to the file."""
        if self._file is None:
            return
        self._left -= 1
        place = {"replica": self._about["replica"], "stage": self._about["stage"], "origin_ns": self._origin_ns}
        more = trace.events(work, step=step, schedule=schedule, num_micro_batches=num_micro_batches, **place)
        try:
            self._file.add(more)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Trace no more. No run ends for a trace."""
        rank, problem = dist.get_rank() if dist.is_initialized() else 0, f"{type(error).__name__}: {error}"
        _log.warning("rank %d goes on without a trace, which cannot be written (%s)", rank, problem)
        self._left, self._file = 0, None
