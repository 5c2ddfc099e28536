"""Orders in files: torch's compute-only CSV, read, proven and written."""

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

# The form of ``torch.distributed.pipelining``: a line for each stage from 0 on, a cell for each action in its order, an
# empty one where a stage idles. ``2F5`` is the forward of micro-batch 5 in piece 2 of the model; F forward, B whole
# backward, I backward for the input, W backward for the weights. Messages are not written: they follow.
# A pair of torch's DualPipeV, ``(0F7;7B3)OVERLAP_F_B``, is read as its two actions, which run one after the other.
#
# What torch calls a rank is a stage here, and what it calls a stage is a piece of the model.

LETTERS: dict[str, type[Action]] = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
_LETTER_OF = {kind: letter for letter, kind in LETTERS.items()}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


class FileSchedule:
    """The order of a file, for one number of stages and micro-batches: a function as ``tds.schedule.Order``.

    Attributes:
        placement: how the pieces lie, which follows from the lines.
        peaks: the most forwards in flight on each stage.
        splits: it puts gradients of weights off.
    """

    def __init__(self, path: str, stages: Sequence[list[Action]], placement: Placement) -> None:
        self.path, self.placement, self.__name__ = Path(path), placement, f"in {path}"
        self.num_micro_batches = 1 + max(action.micro_batch for actions in stages for action in actions)
        self.splits = any(isinstance(action, BackwardInput) for actions in stages for action in actions)
        self._stages = stages
        self.peaks = validate(stages, self.num_micro_batches, num_chunks=placement.num_chunks, placement=placement.kind)

    def __call__(self, num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
        """Return what ``stage`` does.

        Raises:
            ScheduleError: the file is for other numbers of stages or micro-batches.
        """
        has = self.placement.num_stages, self.num_micro_batches
        if (num_stages, num_micro_batches) != has:
            raise ScheduleError(
                f"{self.path} is a schedule of {has[0]} stages and {has[1]} micro-batches, got {num_stages} stages and "
                f"{num_micro_batches} micro-batches. Train with its numbers, or write another file"
            )
        return list(self._stages[stage])


def read_schedule(path: str) -> FileSchedule:
    """Return the order that a CSV file of torch's holds, proven to run; of an unchanged file the very same.

    Raises:
        OSError: there is no such file.
        ScheduleError: a ValueError: what is no such file, or an order that cannot run; a circle is named.
    """
    status = os.stat(path)
    return _read(path, os.path.abspath(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _read(path: str, *_: Any) -> FileSchedule:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row]
    cells = [[each for cell in row for each in _parsed(path, line, cell.strip())] for line, row in enumerate(rows, 1)]
    if not all(cells) or not cells:
        raise ScheduleError(f"{path} must have a line with actions such as 0F0 for each stage, got an empty one")
    placement = _placement_of(path, [{piece for piece, _, _ in row} for row in cells])
    stages = [
        [LETTERS[letter](number, piece // placement.num_stages) for piece, letter, number in row] for row in cells
    ]
    try:
        return FileSchedule(path, stages, placement)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule in {path} cannot run: {error}") from error


def _parsed(path: str, line: int, cell: str) -> list[tuple[int, str, int]]:
    """Return the actions of a cell, each as piece, letter and micro-batch: one, those of a pair, or none."""
    pair = _PAIR.fullmatch(cell)
    written = pair[1].split(";") if pair else [cell] if cell else []
    found = [_CELL.fullmatch(each.strip()) for each in written]
    if not all(found):
        raise ScheduleError(
            f"{path}, line {line}: a cell must be a piece, one of F, B, I and W, and a micro-batch, such as 0F0, got "
            f"{cell[:40]!r}. Write the compute-only form, in which nothing is sent or gathered"
        )
    return [(int(each[1]), each[2], int(each[3])) for each in found if each]


def _placement_of(path: str, pieces: Sequence[set[int]]) -> Placement:
    """Return the placement in which each stage has those pieces."""
    num_stages = len(pieces)
    for kind in PLACEMENTS:
        chunks = len(pieces[0])
        if chunks > 1 or kind == PLACEMENTS[0]:
            placement = Placement(num_stages, chunks, kind)
            if all(set(placement.own_pieces(stage)) == own for stage, own in enumerate(pieces)):
                return placement
    listed = "; ".join(f"stage {stage}: {sorted(own)}" for stage, own in enumerate(pieces))
    raise ScheduleError(
        f"the pieces in {path} must lie in a loop (piece k on stage k mod {num_stages}) or in a V (down the "
        f"stages, then up), got {listed}"
    )


def write_schedule(path: str, stages: Sequence[Sequence[Action]], placement: Placement) -> None:
    """Write an order as a CSV file of torch's."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [
                f"{placement.piece(stage, action.chunk)}{_LETTER_OF[type(action)]}{action.micro_batch}"
                for action in actions
            ]
            for stage, actions in enumerate(stages)
        )
