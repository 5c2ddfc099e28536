"""Which charts there are and what each run draws in them, and the timeline of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.report_parts.folder import Column, RunFolder, at_step, columns, number, thinned
from tools.report_parts.words import Html, bilingual, joined, tag

MOST_LINES = 24
"""Lines by layer of one run; of more, some are left out evenly."""


@dataclass(frozen=True)
class Chart:
    """One chart: the columns ``keys``, or with ``is_family`` all "key/..." of them.

    ``x``: what it is drawn over; "" leaves it to the reader. ``unit``: how numbers are written.
    ``points``: kind of records that are drawn as points, by their ``loss``. ``source``: which records are the lines.
    """

    id: str
    title: str
    keys: tuple[str, ...]
    unit: str = ""
    x: str = ""
    log: bool = False
    is_family: bool = False
    points: str = ""
    about: str = ""
    source: str = "columns"


CHARTS = (
    Chart("loss", "Loss over steps", ("loss",), x="step", points="valid", about="nats per token; rings: validation"),
    Chart("loss-tokens", "Loss over tokens", ("loss",), x="tokens", points="valid", about="nats per token"),
    Chart("valid-loss", "Validation loss", ("loss",), about="nats per token", source="valid"),
    Chart(
        "valid-perplexity", "Validation perplexity", ("perplexity",), log=True, about="e to the loss", source="valid"
    ),
    Chart("learning-rate", "Learning rate", ("learning_rate",)),
    Chart("grad-norm", "Gradient norm", ("grad_norm",), log=True, about="before clipping"),
    Chart("tokens-per-s", "Throughput", ("tokens_per_s",), "si", about="tokens/s"),
    Chart("mfu", "MFU", ("mfu",), "percent", about="of what the devices could do"),
    Chart("bubble", "Pipeline bubble", ("bubble", "bubble_predicted"), "percent", about="dashed: predicted"),
    Chart("work", "Work by stage", ("work_s",), "s", is_family=True, about="seconds of a step"),
    Chart("memory", "Memory by stage", ("memory_bytes",), "bytes", is_family=True, about="the most so far"),
    Chart("data-wait", "Waiting for data", ("data_wait",), "percent", about="of the time"),
    Chart("stall", "Waiting for checkpoints", ("checkpoint_stall_s",), "s", about="since the record before"),
    Chart("layer-norms", "Gradient norm by layer", ("layer_norms",), log=True, is_family=True),
    Chart("corpora", "Tokens of each corpus", ("corpus_tokens",), "si", is_family=True),
    Chart("loss-scale", "Loss scale", ("loss_scale",), "si", log=True),
    Chart("skipped", "Skipped steps", ("skipped",)),
)
ONLY_IF_IT_MOVES = ("loss-scale", "skipped", "stall")
ONLY_IF_SEVERAL = ("corpora",)


def run_data(run: RunFolder, limit: int) -> dict[str, Any]:
    """Return what the page draws of a run: columns, points of evaluations, and marks at steps."""
    found = columns(thinned(run.of_kind("train"), limit))
    if "tokens" not in found and "samples" in found and (each := _tokens_per_sample(run)):
        found["tokens"] = [None if samples is None else each * samples for samples in found["samples"]]
    began = next((start.get("time") for start in run.starts if number(start.get("time")) is not None), None)
    times = found.pop("time", [])
    if any(time is not None for time in times):
        began = began or next(time for time in times if time is not None)
        found["hours"] = [None if time is None else number((time - began) / 3600) for time in times]
    return {
        "name": run.name,
        "columns": found,
        "valid": _evaluated(run, found),
        "points": {kind: _points(run, kind, found) for kind in ("valid", "test")},
        "marks": [{**mark, **_places(found, mark["step"])} for mark in marks(run)],
    }


def chart_data(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts that have something to draw, with the keys that any run has."""
    shown = []
    for chart in CHARTS:
        keys = _keys(chart, runs)
        values = [v for run in runs for key in keys for v in run[chart.source].get(key, []) if v is not None]
        has_axis = not chart.x or any(chart.x in run[chart.source] for run in runs)
        if not values or not has_axis or (chart.id in ONLY_IF_IT_MOVES and len(set(values)) == 1):
            continue
        if chart.id in ONLY_IF_SEVERAL and len(keys) == 1:
            continue
        shown.append({**asdict(chart), "keys": keys})
    return shown


def marks(run: RunFolder) -> list[dict[str, Any]]:
    """Return the checkpoints, starts after the first, and returns to a checkpoint of a run, by step."""
    saves = {record["step"]: "failed" in record for record in run.of_kind("save")}
    found = [
        {"step": step, "kind": "failed" if has_failed else "save", "text": f"checkpoint of step {step}"}
        for step, has_failed in saves.items()
    ]
    for start in run.starts[1:]:
        found.append({"step": start["step"], "kind": "start", "text": f"started again behind step {start['step']}"})
    for record in run.journal:
        what = f"{record.get('event', 'left out')} {record.get('reason', '')}".strip()
        found.append({"step": record["step"], "kind": "guard", "text": f"step {record['step']}: {what}"})
    return found


def _tokens_per_sample(run: RunFolder) -> float:
    """Return the tokens of a sample by the settings: of runs whose records do not tell of tokens yet."""
    if run.config.get("family") == "t5":
        lengths = (run.setting("t5", "enc_seq_length"), run.setting("t5", "dec_seq_length"))
    else:
        lengths = (run.setting("batch", "seq_length"),)
    return sum(number(length) or 0 for length in lengths)


def _keys(chart: Chart, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not chart.is_family:
        return [key for key in chart.keys if any(key in run[chart.source] for run in runs)]
    every = dict.fromkeys(key for run in runs for key in run["columns"] if key.startswith(f"{chart.keys[0]}/"))
    keys = list(every)
    return keys if len(keys) <= MOST_LINES else [keys[i * len(keys) // MOST_LINES] for i in range(MOST_LINES)]


def _points(run: RunFolder, kind: str, found: Mapping[str, Column]) -> list[dict[str, Any]]:
    return [
        {"step": record["step"], "loss": number(record.get("loss")), **_places(found, record["step"])}
        for record in run.of_kind(kind)
    ]


def _evaluated(run: RunFolder, found: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of the evaluations on the validation split."""
    records = [{**record, **_places(found, record["step"])} for record in run.of_kind("valid")]
    named = columns(records)
    return {name: named[name] for name in ("step", "tokens", "hours", "loss", "perplexity") if name in named}


def _places(found: Mapping[str, Column], step: int) -> dict[str, float | None]:
    """Return where a step lies on the other axes."""
    steps = found.get("step", [])
    return {axis: at_step(steps, found[axis], step) for axis in ("tokens", "hours") if axis in found}


# The last traced step of a pipeline as a drawing: a row for each stage, a box for each action, a gap where it idles.
#
# A run with --pipeline-trace DIR leaves the files; below what was measured stands what the simulation says with the
# same costs.

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
