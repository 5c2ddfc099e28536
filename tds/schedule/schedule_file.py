"""Schedules in files: reads, validates and writes torch's compute-only CSV format."""

from __future__ import annotations

import csv
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tds.schedule.actions import (
    PLACEMENTS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
)
from tds.schedule.validate import ScheduleError, validate

# The format of ``torch.distributed.pipelining`` has a line per stage and a cell per action in order; an empty cell
# means that the stage idles. ``2F5`` is the forward of micro-batch 5 in virtual stage 2. The letters are F (forward), B
# (full backward), I (backward for the input) and W (backward for the weights). The file contains no messages, because
# they follow from the actions. A pair of torch's DualPipeV, ``(0F7;7B3)OVERLAP_F_B``, is read as two actions that run
# one after the other.
#
# torch's "rank" is a stage in tds, and torch's "stage" is a virtual stage.

LETTERS: dict[str, type[Action]] = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
_LETTER_OF = {action_type: letter for letter, action_type in LETTERS.items()}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


class FileSchedule:
    """A schedule from a file, a ``tds.schedule.Order`` for one number of stages and micro-batches.

    Attributes:
        placement: virtual-stage placement, derived from the file.
        peaks: maximum forwards in flight on each stage.
        has_split_backwards: the schedule defers weight gradients.
    """

    def __init__(self, path: str, stages: Sequence[list[Action]], placement: Placement) -> None:
        self.path, self.placement, self.__name__ = Path(path), placement, f"in {path}"
        self.num_micro_batches = 1 + max(action.micro_batch for actions in stages for action in actions)
        self.has_split_backwards = any(isinstance(action, BackwardInput) for actions in stages for action in actions)
        self._stages = stages
        self.peaks = validate(
            stages, self.num_micro_batches, num_chunks=placement.num_chunks, placement=placement.style
        )

    def __call__(self, num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
        """Return the actions of ``stage``.

        Raises:
            ScheduleError: the file is for another number of stages or micro-batches.
        """
        expected_sizes = self.placement.num_stages, self.num_micro_batches
        if (num_stages, num_micro_batches) != expected_sizes:
            raise ScheduleError(
                f"{self.path} is a schedule for {expected_sizes[0]} stages and {expected_sizes[1]} micro-batches, got "
                f"{num_stages} stages "
                f"and {num_micro_batches} micro-batches. Train with the sizes of the file, or write another file"
            )
        return list(self._stages[stage])


def read_schedule(path: str) -> FileSchedule:
    """Read a schedule from a CSV file in torch's format and validate it.

    The result is cached: for an unchanged file, the same object is returned.

    Raises:
        OSError: the file does not exist.
        ScheduleError: (a ValueError) the file has another format, or its schedule cannot run. The message names the
            stages of a deadlock.
    """
    status = os.stat(path)
    return _read_cached(path, os.path.abspath(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _read_cached(path: str, *_: Any) -> FileSchedule:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row]
    cells = [
        [item for cell in row for item in _parse_cell(path, line, cell.strip())] for line, row in enumerate(rows, 1)
    ]
    if not all(cells) or not cells:
        raise ScheduleError(f"{path} must have a line with actions such as 0F0 for each stage, got an empty line")
    placement = _placement_of(path, [{virtual_stage for virtual_stage, _, _ in row} for row in cells])
    stages = [
        [LETTERS[letter](mb, virtual_stage // placement.num_stages) for virtual_stage, letter, mb in row]
        for row in cells
    ]
    try:
        return FileSchedule(path, stages, placement)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule in {path} cannot run: {error}") from error


def _parse_cell(path: str, line: int, cell: str) -> list[tuple[int, str, int]]:
    """Parse a cell's actions (none, one or a pair), each as (virtual stage, letter, micro-batch)."""
    pair = _PAIR.fullmatch(cell)
    texts = pair[1].split(";") if pair else [cell] if cell else []
    matches = [_CELL.fullmatch(entry.strip()) for entry in texts]
    if not all(matches):
        raise ScheduleError(
            f"{path}, line {line}: a cell must consist of a virtual stage, one of F, B, I and W, and a micro-batch, "
            f"such as 0F0, got {cell[:40]!r}. Use the compute-only format, without communication"
        )
    return [(int(entry[1]), entry[2], int(entry[3])) for entry in matches if entry]


def _placement_of(path: str, virtual_stages_by_stage: Sequence[set[int]]) -> Placement:
    """Find the placement in which stage ``i`` has ``virtual_stages_by_stage[i]``."""
    num_stages = len(virtual_stages_by_stage)
    for style in PLACEMENTS:
        num_chunks = len(virtual_stages_by_stage[0])
        if num_chunks > 1 or style == PLACEMENTS[0]:
            placement = Placement(num_stages, num_chunks, style)
            if all(
                set(placement.virtual_stages_of(stage)) == virtual_stages
                for stage, virtual_stages in enumerate(virtual_stages_by_stage)
            ):
                return placement
    listed = "; ".join(
        f"stage {stage}: {sorted(virtual_stages)}" for stage, virtual_stages in enumerate(virtual_stages_by_stage)
    )
    raise ScheduleError(
        f"the virtual stages in {path} must be placed in a loop (virtual stage k on stage k mod {num_stages}) or in a "
        f"V (down the stages, then up), got {listed}"
    )


def write_schedule(path: str, stages: Sequence[Sequence[Action]], placement: Placement) -> None:
    """Write a schedule as a CSV file in torch's format."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [
                f"{placement.virtual_stage(stage, action.chunk)}{_LETTER_OF[type(action)]}{action.micro_batch}"
                for action in actions
            ]
            for stage, actions in enumerate(stages)
        )
