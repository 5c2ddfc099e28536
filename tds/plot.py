"""Schedule timelines drawn by matplotlib."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tds import trace
from tds.schedule import Action, Backward, BackwardInput, BackwardWeight, Forward, Timeline, simulate, validate

if TYPE_CHECKING:
    from tds.trace import MeasuredStep

# A picture has a row per stage and a box per action. Idle time is shown without a box.
#
# This module is only imported if a picture is wanted, so training does not need matplotlib.

COLOURS: dict[type[Action], tuple[str, str]] = {
    Forward: ("#3B7DC4", "forward"),
    Backward: ("#E9743A", "backward"),
    BackwardInput: ("#F2A22C", "backward for the input"),
    BackwardWeight: ("#1B7F5F", "backward for the weights"),
}
"""Colour and name of each action type. The colours are distinguishable for colour-blind readers and in greyscale."""

IDLE = "#EFEFEF"
WIDTH_IN, DPI = 16.0, 120
LEFT_IN, RIGHT_IN, TOP_IN, BETWEEN_IN, BOTTOM_IN = 0.85, 1.75, 0.9, 0.8, 0.55
BOX_HEIGHT = 0.84
MIN_FONT_SIZE = 5.0


@dataclass(frozen=True)
class Panel:
    """One timeline to draw.

    Attributes:
        peaks: peak number of forwards in flight on each stage.
        factor: converts the timeline's unit to the axis unit.
    """

    timeline: Timeline
    title: str
    peaks: Sequence[int]
    num_chunks: int = 1
    factor: float = 1.0


def draw_planned(
    name: str,
    timeline: Timeline,
    peaks: Sequence[int],
    num_micro_batches: int,
    num_chunks: int,
    out: str | os.PathLike[str],
) -> None:
    """Draw a simulated schedule in the PNG file ``out``.

    Args:
        name: the schedule's name, for the title.
        peaks: peak number of forwards in flight on each stage.
    """
    title = f"{_format_sizes(name, timeline, num_micro_batches, num_chunks)}: bubble {100 * timeline.bubble:.1f} %"
    draw_panels(
        [Panel(timeline, f"step {timeline.step_s:.6g}", peaks, num_chunks)], title, "time in the unit of the costs", out
    )


def draw_measured(step: MeasuredStep, out: str | os.PathLike[str]) -> None:
    """Draw a measured step and its simulation with the measured costs in the PNG file ``out``."""
    measured, simulated = step.timeline, simulate_measured(step)
    peaks = validate(
        _actions_by_stage(measured), step.num_micro_batches, num_chunks=step.num_chunks, placement=step.placement
    )
    unit, factor = ("s", 1.0) if measured.step_s >= 10 else ("ms", 1e3)
    panels = [
        Panel(timeline, f"{title}: step {timeline.step_s * factor:.4g} {unit}", peaks, step.num_chunks, factor)
        for title, timeline in (("measured", measured), ("simulated with the measured costs", simulated))
    ]
    title = (
        f"{_format_sizes(step.schedule, measured, step.num_micro_batches, step.num_chunks)}, step {step.step}: "
        f"bubble {100 * measured.bubble:.1f} % measured, {100 * simulated.bubble:.1f} % predicted"
    )
    draw_panels(panels, title, f"time in {unit}", out)


def simulate_measured(step: MeasuredStep) -> Timeline:
    """Simulate a measured step with its order of actions and its measured costs."""
    return simulate(_actions_by_stage(step.timeline), step.costs, step.num_chunks, step.placement)


def _actions_by_stage(timeline: Timeline) -> list[list[Action]]:
    return [[span.action for span in spans] for spans in timeline.spans]


def _format_sizes(name: str, timeline: Timeline, num_micro_batches: int, num_chunks: int) -> str:
    chunks = f" of {num_chunks} chunks" if num_chunks > 1 else ""
    return f"{name}, {timeline.num_stages} stages{chunks}, {num_micro_batches} micro-batches"


def draw_panels(panels: Sequence[Panel], title: str, unit: str, out: str | os.PathLike[str]) -> None:
    """Draw the panels below each other with a common time axis."""
    num_stages = panels[0].timeline.num_stages
    row_in = min(max(6.0 / num_stages, 0.16), 0.5)
    rows_in = row_in * num_stages
    height_in = TOP_IN + len(panels) * rows_in + (len(panels) - 1) * BETWEEN_IN + BOTTOM_IN
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI)
    figure.text(LEFT_IN / WIDTH_IN, 1 - 0.3 / height_in, title, fontsize=14, weight="bold", va="center")
    end = max(panel.timeline.step_s * panel.factor for panel in panels) or 1.0
    for index, panel in enumerate(panels):
        bottom = height_in - TOP_IN - (index + 1) * rows_in - index * BETWEEN_IN
        width = WIDTH_IN - LEFT_IN - RIGHT_IN
        axes = figure.add_axes((LEFT_IN / WIDTH_IN, bottom / height_in, width / WIDTH_IN, rows_in / height_in))
        _draw_panel(axes, panel, end, row_in)
    axes.set_xlabel(unit)
    handles = _legend(panels[0])
    size, down_in = (9, TOP_IN - 0.02) if len(handles) < 8 else (7, TOP_IN - 0.26)  # many handles go above the title
    figure.legend(
        handles=handles, loc="lower right", ncols=9, frameon=False, fontsize=size, borderaxespad=0.0,
        bbox_to_anchor=(1 - RIGHT_IN / WIDTH_IN, 1 - down_in / height_in), columnspacing=1.2, handlelength=1.2,
    )  # fmt: skip
    figure.savefig(out)


def _draw_panel(axes: Axes, panel: Panel, end: float, row_in: float) -> None:
    timeline, factor = panel.timeline, panel.factor
    num_stages = timeline.num_stages
    axes.set_xlim(0, end)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_title(panel.title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    tick_step = max(1, round(0.16 / row_in))
    axes.set_yticks(range(0, num_stages, tick_step), [f"stage {i}" for i in range(0, num_stages, tick_step)])
    axes.tick_params(axis="y", length=0, labelsize=min(10.0, 45 * row_in))
    step_time = timeline.step_s * factor
    axes.add_collection(PolyCollection([_corners(0, step_time, i) for i in range(num_stages)], facecolors=IDLE))
    points_per_unit = (WIDTH_IN - LEFT_IN - RIGHT_IN) * 72 / end
    _draw_boxes(axes, panel, points_per_unit)
    _draw_numbers(axes, panel, points_per_unit, row_in)
    _label_stages(axes, panel, row_in)


def _draw_boxes(axes: Axes, panel: Panel, points_per_unit: float) -> None:
    """Draw one box collection per colour, because pictures have tens of thousands of boxes."""
    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    for stage, spans in enumerate(panel.timeline.spans):
        for span in spans:
            colour = _colour(type(span.action), span.action.chunk, panel.num_chunks)
            boxes.setdefault(colour, []).append(_corners(span.start_s * panel.factor, span.end_s * panel.factor, stage))
    edge = min(0.8, 0.12 * _median_width(panel) * points_per_unit)
    for colour, corners in boxes.items():
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=edge))


def _draw_numbers(axes: Axes, panel: Panel, points_per_unit: float, row_in: float) -> None:
    """Write the micro-batch index into each box that is wide enough."""
    widest = max((len(str(span.action.micro_batch)) for spans in panel.timeline.spans for span in spans), default=1)
    size = min(9.0, 0.55 * row_in * 72, _median_width(panel) * points_per_unit / (0.68 * widest))
    if size < MIN_FONT_SIZE:
        return
    for stage, spans in enumerate(panel.timeline.spans):
        for span in spans:
            text = str(span.action.micro_batch)
            if (span.end_s - span.start_s) * panel.factor * points_per_unit < 0.65 * size * len(text):
                continue
            colour = _text_colour(_colour(type(span.action), span.action.chunk, panel.num_chunks))
            middle = (span.start_s + span.end_s) / 2 * panel.factor
            axes.text(middle, stage, text, ha="center", va="center_baseline", fontsize=size, color=colour, clip_on=True)


def _label_stages(axes: Axes, panel: Panel, row_in: float) -> None:
    """Write each stage's idle time and peak number in flight next to its row."""
    size = min(9.0, 50 * row_in)
    label_step = max(1, round(0.16 / row_in))
    step = panel.timeline.step_s or 1.0
    unit = "chunks" if panel.num_chunks > 1 else "in flight"
    for stage in range(0, panel.timeline.num_stages, label_step):
        text = f"idle {100 * panel.timeline.idle_s[stage] / step:.1f} %, {panel.peaks[stage]} {unit}"
        axes.text(1.008, stage, text, transform=axes.get_yaxis_transform(), va="center", fontsize=size, color="#444444")


def _legend(panel: Panel) -> list[Patch]:
    drawn_types = {type(span.action) for spans in panel.timeline.spans for span in spans}
    handles = []
    for action_type, (_, name) in COLOURS.items():
        if action_type not in drawn_types:
            continue
        for chunk in range(panel.num_chunks) if panel.num_chunks <= 3 else (0, panel.num_chunks - 1):
            label = f"{name}, chunk {chunk}" if panel.num_chunks > 1 else name
            handles.append(Patch(facecolor=_colour(action_type, chunk, panel.num_chunks), label=label))
    return [*handles, Patch(facecolor=IDLE, label="idle")]


def _median_width(panel: Panel) -> float:
    """The width is in axis units."""
    widths = sorted((span.end_s - span.start_s) * panel.factor for spans in panel.timeline.spans for span in spans)
    return widths[len(widths) // 2] if widths else 0.0


def _corners(start: float, end: float, row: int) -> list[tuple[float, float]]:
    top, bottom = row - BOX_HEIGHT / 2, row + BOX_HEIGHT / 2
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _colour(action_type: type[Action], chunk: int, num_chunks: int) -> str:
    """Later chunks have lighter colours."""
    lightness = 0.6 * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = (value + (1 - value) * lightness for value in to_rgb(COLOURS[action_type][0]))
    return "#" + "".join(f"{round(255 * value):02x}" for value in mixed)


def _text_colour(colour: str) -> str:
    """Choose black or white, whichever has more contrast on ``colour``."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else "white"


PICTURE_NAME = "timeline.png"


PATIENCE_S = 1.0


_log = logging.getLogger("tds")


_drawn_elsewhere: set[Path] = set()


def disable_drawing(folder: str | os.PathLike[str]) -> None:
    """Disable ``draw`` for ``folder``, because the program has drawn the picture elsewhere."""
    _drawn_elsewhere.add(Path(folder).resolve())


def draw(folder: Path) -> None:
    """Draw the last complete step in the traces of ``folder``. Errors are logged, not raised."""
    if folder.resolve() in _drawn_elsewhere:
        return
    try:
        draw_measured(_read_steps(folder)[-1], folder / PICTURE_NAME)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        _log.warning(
            "the trace in %s cannot be drawn (%s). Draw it later with tools/draw_schedule.py --trace %s",
            folder,
            problem,
            folder,
        )


def _read_steps(folder: Path) -> list[trace.MeasuredStep]:
    """Read the complete steps; retry while another rank may still be writing its last step."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return trace.read_traces(folder)
        except ValueError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)
