"""The last traced step of a pipeline as a drawing: a row for each stage, a box for each action, a gap where it idles.

A run with --pipeline-trace DIR leaves the files; below what was measured stands what the simulation says with the same
costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.report_parts.folder import RunFolder
from tools.report_parts.markup import Html, joined, tag
from tools.report_parts.words import bilingual

WIDTH, LEFT, ROW, GAP = 1200, 64, 22, 4
MOST_BOXES = 6000


def timeline(run: RunFolder) -> Html | None:
    """Return the drawing; a note where the files cannot be read, None where the run was not traced."""
    folder = _trace_folder(run)
    if folder is None:
        return None
    from tds.schedule import simulate
    from tds.trace import read_traces  # torch comes with it: runs without a trace do not need it

    try:
        step = read_traces(folder)[-1]
    except Exception as error:  # a trace of anything: the page of all other runs counts more
        return tag("p", bilingual("The trace cannot be drawn: {}", error), class_="note")
    order = [[span.action for span in spans] for spans in step.timeline.spans]
    predicted = simulate(order, step.costs, step.num_chunks)
    longest = max(step.timeline.step_s, predicted.step_s)
    about = bilingual(
        "{}, step {}, {} micro-batches. Trace: {}", step.schedule, step.step, step.num_micro_batches, folder
    )
    return tag(
        "div",
        tag("p", about),
        _panel(bilingual("measured"), step.timeline, longest),
        _panel(bilingual("simulated with the measured costs"), predicted, longest),
        LEGEND,
    )


def _trace_folder(run: RunFolder) -> Path | None:
    """Return where the trace lies: as the flag names it from here, or from where the run's own folder stands."""
    named = run.setting("parallel", "pipeline_trace")
    if not isinstance(named, str) or not named:
        return None
    places = [Path(named), *[parent / named for parent in run.path.resolve().parents[:3]]]
    return next((place for place in places if any(place.glob("trace-rank*.json"))), None)


def _panel(title: Html, line: Any, longest: float) -> Html:
    scale, height = (WIDTH - LEFT) / longest, line.num_stages * ROW
    rows = [
        joined(
            [
                tag("text", f"stage {stage}", x=0, y=stage * ROW + ROW - GAP - 4),
                tag("rect", x=LEFT, y=stage * ROW, width=f"{line.step_s * scale:.2f}", height=ROW - GAP, class_="idle"),
            ]
        )
        for stage in range(line.num_stages)
    ]
    shown = sum(map(len, line.spans)) <= MOST_BOXES
    boxes = [_box(stage, span, scale) for stage, spans in enumerate(line.spans) for span in spans] if shown else []
    told = [bilingual("{}: {} ms, bubble {} %", title, f"{1e3 * line.step_s:.4g}", f"{100 * line.bubble:.1f}")]
    told += [] if shown else [bilingual(" (more than {} boxes, which are not drawn)", f"{MOST_BOXES:,}")]
    drawing = tag("svg", *rows, *boxes, viewBox=f"0 0 {WIDTH} {height}", class_="timeline", role="img")
    return tag("figure", tag("figcaption", *told), tag("div", drawing, class_="scroll"))


def _box(stage: int, span: Any, scale: float) -> Html:
    action, width = span.action, (span.end_s - span.start_s) * scale
    kind = type(action).__name__
    x, y = LEFT + span.start_s * scale, stage * ROW
    told = f"{kind} of micro-batch {action.micro_batch}" + (f", chunk {action.chunk}" if action.chunk else "")
    told += f": {1e3 * (span.end_s - span.start_s):.4g} ms"
    box = tag("rect", tag("title", told), x=f"{x:.2f}", y=y, width=f"{max(width, 0.3):.2f}", height=ROW - GAP,
              class_=f"box {kind}")  # fmt: skip
    if width < 9 * len(str(action.micro_batch)):
        return box
    return joined([box, tag("text", action.micro_batch, x=f"{x + width / 2:.2f}", y=y + ROW - GAP - 4, class_="in")])


LEGEND = tag(
    "p",
    *[
        tag("span", tag("i", class_=f"swatch {kind}"), " ", bilingual(name), " ")
        for kind, name in (
            ("Forward", "forward"),
            ("Backward", "backward"),
            ("BackwardInput", "backward for the input"),
            ("BackwardWeight", "backward for the weights"),
        )
    ],
    class_="legend",
)
