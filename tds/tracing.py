"""Which steps of a run are traced, and the picture at the end."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tds import trace
from tds.recorder import Work

PICTURE = "timeline.png"
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
    """Writes the first steps of one rank, and on rank 0 draws the last of them when all are there.

    Args:
        owner: the picture is drawn when it goes or the program ends, if not before.
        about: "stage", "replica" and what else the file says of itself.
        origin_ns: what times count from, on the clock of ``Work`` plus ``offset_ns``.
    """

    def __init__(
        self, owner: Any, folder: str, num_steps: int, rank: int, about: Mapping[str, Any], *, origin_ns: int,
        offset_ns: int,
    ) -> None:  # fmt: skip
        self._about = {**about, "max_steps": num_steps, "run": origin_ns}
        self._file = trace.TraceFile(folder, rank, self._about)
        self._left = num_steps
        self._origin_ns = origin_ns - offset_ns
        self._picture = weakref.finalize(owner, draw, Path(folder)) if rank == 0 else None

    @property
    def wants_step(self) -> bool:
        """True if the step that comes is to be traced."""
        return self._left > 0

    def before_step(self) -> None:
        """Draw the picture once: in the step after the last one that is traced, every rank has written its own."""
        if self._left == 0 and self._picture is not None:
            self._picture()

    def write(self, work: Sequence[Work], *, step: int, schedule: str, num_micro_batches: int) -> None:
        """Add a step to the file."""
        self._left -= 1
        place = {"replica": self._about["replica"], "stage": self._about["stage"], "origin_ns": self._origin_ns}
        more = trace.events(work, step=step, schedule=schedule, num_micro_batches=num_micro_batches, **place)
        self._file.add(more)


def draw(folder: Path) -> None:
    """Draw the last whole step of the traces in ``folder``, if there is one and matplotlib is installed."""
    try:
        from tds import picture  # imports matplotlib, which runs without a trace do not need
    except ImportError as error:
        _log.warning("no picture of %s (%s); elsewhere run tools/draw_schedule.py --trace %s", folder, error, folder)
        return
    try:
        steps = trace.read_traces(folder)
    except (ValueError, OSError) as error:
        _log.info("no picture of %s: %s", folder, error)
        return
    picture.draw_measured(steps[-1], folder / PICTURE)
