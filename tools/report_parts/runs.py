"""Data of a run for the report: files of the run folder, curves, and pipeline timeline.

A run may be incomplete, interrupted, or from an older version. Records are converted to columns of numbers. If there
are too many records to draw, a subset is drawn that includes the extremes of loss and gradient norm.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.callbacks.metrics_writer import EVALUATIONS, METRICS, read_metrics
from megatron.training.callbacks.stability_journal import read_journal
from tools.report_parts.words import Html, bilingual, join_html, tag

RUN_FILES = (METRICS, "config.json", EVALUATIONS)


@dataclass(frozen=True)
class RunFolder:
    """Contents of a run folder. Fields of missing files are empty; ``notes`` lists problems like unreadable files."""

    path: Path
    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    operators: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def records_of_type(self, record_type: str) -> list[dict[str, Any]]:
        """Return the records of one type: train, valid, test, tasks or save."""
        return [record for record in self.records if record["kind"] == record_type]

    def setting(self, section: str, name: str) -> Any:
        """Return a setting of the run; None if it is unknown."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None


def run_folders(paths: list[Path]) -> list[Path]:
    """Return the run folders among ``paths``; a path to another folder is replaced by its run folders, sorted by name.

    Raises:
        ValueError: a path is not a run folder and contains none; the message lists all such paths.
    """
    folders: list[Path] = []
    problems = []
    for path in paths:
        candidates = [path] if _is_run(path) else sorted(child for child in path.glob("*") if _is_run(child))
        if not candidates:
            problem = "contains no run" if path.is_dir() else "is not a folder"
            problems.append(
                f"{path} must be a run folder with {' or '.join(RUN_FILES)}, or contain run folders, but it {problem}"
            )
        folders += [folder for folder in candidates if folder not in folders]
    if problems:
        raise ValueError("\n".join(problems))
    return folders


def read_run(path: Path, name: str) -> RunFolder:
    """Read the run in ``path``; problems with its files become notes."""
    notes: list[str] = []
    records = [record for record in read_metrics(path / METRICS) if _is_record(record)]
    evaluations = [record for record in read_metrics(path / EVALUATIONS) if _is_record(record)]
    if not records and not evaluations:
        notes.append("no records yet: the run has not finished its first step")
    return RunFolder(
        path,
        name,
        records=records,
        evaluations=evaluations,
        config=_read_json(path / "config.json", dict, notes) or _evaluated_config(evaluations),
        versions=_read_json(path / "versions.json", dict, notes),
        stages=_read_json(path / "stages.json", list, notes),
        starts=[line for line in _read_json_lines(path / "starts.jsonl") if _has_step(line)],
        journal=[line for line in _read_journal_events(path, notes) if _has_step(line)],
        operators=_read_json(path / "profile" / "top.json", dict, notes),
        commands=_read_text(path / "command.txt").splitlines(),
        notes=notes,
    )


def names_of(paths: list[Path]) -> list[str]:
    """Return a unique name for each run: the folder's name, with as many parent folders as needed."""
    absolute = [path.resolve() for path in paths]
    for depth in range(1, max((len(path.parts) for path in absolute), default=1)):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in absolute]


def _is_run(path: Path) -> bool:
    return any((path / file_name).is_file() for file_name in RUN_FILES)


def _is_record(value: Any) -> bool:
    return _has_step(value) and isinstance(value.get("kind"), str)


def _has_step(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("step"), int) and not isinstance(value["step"], bool)


def _read_json(path: Path, expected_type: type, notes: list[str]) -> Any:
    if not path.is_file():
        return expected_type()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error})")
        return expected_type()
    if not isinstance(value, expected_type):
        notes.append(f"{path.name} has unexpected content")
        return expected_type()
    return value


def _evaluated_config(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the configuration of the last evaluation, used if the folder contains no training run."""
    config = evaluations[-1].get("config") if evaluations else None
    return config if isinstance(config, dict) else {}


def _read_json_lines(path: Path) -> list[Any]:
    values = []
    for line in _read_text(path).splitlines():
        with suppress(ValueError):  # a killed process leaves a truncated line
            values.append(json.loads(line))
    return values


def _read_journal_events(path: Path, notes: list[str]) -> list[Any]:
    try:
        return [*read_journal(path.resolve() / "stability.jsonl")]
    except (OSError, ValueError) as error:
        notes.append(f"stability.jsonl cannot be read ({error})")
        return []


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


EXTREME_KEYS = ("loss", "grad_norm")
Column = list[float | None]


def thin_records(records: Sequence[dict[str, Any]], max_records: int) -> list[dict[str, Any]]:
    """Return about ``max_records`` records: from each block, the first and those with extreme loss or gradient norm."""
    if len(records) <= max_records:
        return list(records)
    per_block = 1 + 2 * len(EXTREME_KEYS)
    num_blocks = max(max_records // per_block, 1)
    selected_idx = {0, len(records) - 1}
    for block in range(num_blocks):
        start, stop = block * len(records) // num_blocks, (block + 1) * len(records) // num_blocks
        selected_idx.add(start)
        for name in EXTREME_KEYS:
            values = [
                (value, i) for i in range(start, stop) if (value := finite_number(records[i].get(name))) is not None
            ]
            selected_idx |= {min(values)[1], max(values)[1]} if values else set()
    return [records[i] for i in sorted(selected_idx)]


def to_columns(records: Sequence[dict[str, Any]]) -> dict[str, Column]:
    """Return name -> column of numbers, with None for missing values.

    Each key of a dictionary in a record, such as values by stage, layer or corpus, becomes a column "name/key".
    """
    flat = [dict(_flatten(record)) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    return {name: [record.get(name) for record in flat] for name in names}


def finite_number(value: Any) -> float | None:
    """Return an int unchanged, a finite float rounded to six significant digits, and None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def interpolate(steps: Sequence[float | None], values: Column, step: float) -> float | None:
    """Interpolate ``values`` linearly at ``step``; outside the increasing ``steps``, return the first or last value."""
    points = [(s, v) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
    if not points:
        return None
    after = bisect_right(points, step, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (s0, v0), (s1, v1) = points[after - 1 : after + 1]
    return finite_number(v0 + (v1 - v0) * (step - s0) / (s1 - s0))


def _flatten(record: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, value in record.items():
        if name == "time" and isinstance(value, int | float):
            yield name, value  # not rounded: six digits of a timestamp resolve only hours
        elif isinstance(value, dict):
            scalars = {inner: item for inner, item in value.items() if not isinstance(item, list)}
            yield from ((f"{name}/{inner}", finite_number(item)) for inner, item in scalars.items())
        elif not isinstance(value, str):
            yield name, finite_number(value)


# Chart definitions, and the data of the curves.

MAX_LINES = 24
"""Maximum number of lines per run in a family chart, such as one line per layer; longer lists are thinned evenly."""


@dataclass(frozen=True)
class Chart:
    """A chart of curves over steps, tokens or hours.

    Args:
        keys: columns that are drawn as curves.
        unit: number format of the values.
        x: column on the x axis; "" if it is selected in the report.
        is_family: draw all columns whose names begin with "KEY/", where KEY is the only entry of ``keys``.
        is_by_ending: split a family into one chart per last component of the column names, such as the metric.
        points: type of records whose ``loss`` is drawn as points.
        source: key of ``run_data`` under which the columns of the curves are stored.
    """

    id: str
    title: str
    keys: tuple[str, ...]
    unit: str = ""
    x: str = ""
    log: bool = False
    is_family: bool = False
    is_by_ending: bool = False
    points: str = ""
    about: str = ""
    source: str = "columns"


CHARTS = (
    Chart("loss", "Loss over steps", ("loss",), x="step", points="valid", about="nats per token; circles: validation"),
    Chart("loss-tokens", "Loss over tokens", ("loss",), x="tokens", points="valid", about="nats per token"),
    Chart("valid-loss", "Validation loss", ("loss",), about="nats per token", source="valid"),
    Chart("valid-perplexity", "Validation perplexity", ("perplexity",), log=True, about="exp(loss)", source="valid"),
    Chart(
        "tasks",
        "Tasks",
        ("tasks",),
        is_family=True,
        is_by_ending=True,
        source="tasks",
        about="lm_eval tasks from --eval-tasks",
    ),
    Chart("learning-rate", "Learning rate", ("learning_rate",)),
    Chart("grad-norm", "Gradient norm", ("grad_norm",), log=True, about="before clipping"),
    Chart("tokens-per-s", "Throughput", ("tokens_per_s",), "si", about="tokens/s"),
    Chart("mfu", "MFU", ("mfu",), "percent", about="fraction of the devices' peak"),
    Chart("bubble", "Pipeline bubble", ("bubble", "bubble_predicted"), "percent", about="dashed: predicted"),
    Chart("work", "Compute time by stage", ("work_s",), "s", is_family=True, about="seconds per step"),
    Chart("memory", "Memory by stage", ("memory_bytes",), "bytes", is_family=True, about="peak so far"),
    Chart("data-wait", "Waiting for data", ("data_wait",), "percent", about="fraction of time"),
    Chart("stall", "Waiting for checkpoints", ("checkpoint_stall_s",), "s", about="since the previous record"),
    Chart("layer-norms", "Gradient norm by layer", ("layer_norms",), log=True, is_family=True),
    Chart(
        "load-imbalance",
        "Expert load imbalance",
        ("moe_load_imbalance",),
        log=True,
        is_family=True,
        about="largest load divided by the mean, by layer",
    ),
    Chart(
        "expert-entropy",
        "Expert load entropy",
        ("moe_entropy",),
        is_family=True,
        about="by layer; 1: uniform load",
    ),
    Chart("dropped", "Dropped selections", ("moe_dropped",), "percent", is_family=True, about="fraction over capacity"),
    Chart("corpora", "Tokens by corpus", ("corpus_tokens",), "si", is_family=True),
    Chart("loss-scale", "Loss scale", ("loss_scale",), "si", log=True),
    Chart("skipped", "Skipped steps", ("skipped",)),
)
HIDDEN_IF_CONSTANT = ("loss-scale", "skipped", "stall")
HIDDEN_IF_SINGLE = ("corpora",)


def run_data(run: RunFolder, max_points: int) -> dict[str, Any]:
    """Return the chart data of a run: columns, evaluation points, and marks."""
    train_columns = to_columns(thin_records(run.records_of_type("train"), max_points))
    if "tokens" not in train_columns and "samples" in train_columns and (sample_tokens := _tokens_per_sample(run)):
        train_columns["tokens"] = [
            None if samples is None else sample_tokens * samples for samples in train_columns["samples"]
        ]
    start_time = next((start.get("time") for start in run.starts if finite_number(start.get("time")) is not None), None)
    times = train_columns.pop("time", [])
    if any(time is not None for time in times):
        start_time = start_time or next(time for time in times if time is not None)
        train_columns["hours"] = [None if time is None else finite_number((time - start_time) / 3600) for time in times]
    return {
        "name": run.name,
        "columns": train_columns,
        "valid": _validation_columns(run, train_columns),
        "tasks": _task_columns(run, train_columns),
        "points": {record_type: _point_list(run, record_type, train_columns) for record_type in ("valid", "test")},
        "marks": [{**mark, **_axis_positions(train_columns, mark["step"])} for mark in marks(run)],
    }


def chart_data(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts for which at least one run has data, with the keys that occur in any run."""
    charts = []
    for chart, keys in ((template, keys) for template in CHARTS for keys in _keys_of_charts(template, runs)):
        values = [
            value for run in runs for key in keys for value in run[chart.source].get(key, []) if value is not None
        ]
        has_axis = not chart.x or any(chart.x in run[chart.source] for run in runs)
        if not values or not has_axis or (chart.id in HIDDEN_IF_CONSTANT and len(set(values)) == 1):
            continue
        if chart.id in HIDDEN_IF_SINGLE and len(keys) == 1:
            continue
        charts.append({**asdict(chart), "keys": keys})
    return charts


def _keys_of_charts(chart: Chart, runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a list of keys per chart: several lists if ``chart`` is split by the last component of its columns."""
    groups: dict[str, list[str]] = {}
    for key in _keys(chart, runs):
        groups.setdefault(key.rpartition("/")[2] if chart.is_by_ending else "", []).append(key)
    return list(groups.values())


def marks(run: RunFolder) -> list[dict[str, Any]]:
    """Return the marks of a run: checkpoints, restarts, and events of the stability guard."""
    saves = {record["step"]: "failed" in record for record in run.records_of_type("save")}
    result = [
        {"step": step, "kind": "failed" if has_failed else "save", "text": f"checkpoint of step {step}"}
        for step, has_failed in saves.items()
    ]
    for start in run.starts[1:]:
        result.append({"step": start["step"], "kind": "start", "text": f"restarted after step {start['step']}"})
    for record in run.journal:
        event = f"{record.get('event', 'skipped')} {record.get('reason', '')}".strip()
        result.append({"step": record["step"], "kind": "guard", "text": f"step {record['step']}: {event}"})
    return result


def _tokens_per_sample(run: RunFolder) -> float:
    """Return the tokens per sample from the settings; used if the records contain samples but no tokens."""
    if run.config.get("family") == "t5":
        lengths = (run.setting("t5", "enc_seq_length"), run.setting("t5", "dec_seq_length"))
    else:
        lengths = (run.setting("batch", "seq_length"),)
    return sum(finite_number(length) or 0 for length in lengths)


def _keys(chart: Chart, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not chart.is_family:
        return [key for key in chart.keys if any(key in run[chart.source] for run in runs)]
    all_keys = dict.fromkeys(key for run in runs for key in run[chart.source] if key.startswith(f"{chart.keys[0]}/"))
    keys = list(all_keys)
    return keys if len(keys) <= MAX_LINES else [keys[i * len(keys) // MAX_LINES] for i in range(MAX_LINES)]


def _point_list(run: RunFolder, record_type: str, train_columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    return [
        {
            "step": record["step"],
            "loss": finite_number(record.get("loss")),
            **_axis_positions(train_columns, record["step"]),
        }
        for record in run.records_of_type(record_type)
    ]


def _validation_columns(run: RunFolder, train_columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of the evaluations on the validation split."""
    records = [{**record, **_axis_positions(train_columns, record["step"])} for record in run.records_of_type("valid")]
    values = to_columns(records)
    return {name: values[name] for name in ("step", "tokens", "hours", "loss", "perplexity") if name in values}


def _task_columns(run: RunFolder, train_columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns "tasks/NAME/METRIC" of the task evaluations, without standard errors."""
    records = []
    for record in run.records_of_type("tasks"):
        values = {
            f"tasks/{task}/{metric}": value
            for task, metrics in record.items()
            if isinstance(metrics, dict)
            for metric, value in metrics.items()
            if "_stderr" not in metric
        }
        records.append({"step": record["step"], **_axis_positions(train_columns, record["step"]), **values})
    return to_columns(records)


def _axis_positions(train_columns: Mapping[str, Column], step: int) -> dict[str, float | None]:
    """Return the positions of ``step`` on the axes "tokens" and "hours", as far as these columns exist."""
    steps = train_columns.get("step", [])
    return {
        axis: interpolate(steps, train_columns[axis], step) for axis in ("tokens", "hours") if axis in train_columns
    }


# Drawing of the last traced pipeline step: a row per stage, a box per action, a gap for idle time.
#
# --pipeline-trace DIR writes the trace files. A simulation with the measured costs is drawn below the measured step.

WIDTH, LEFT, ROW_HEIGHT, GAP = 1200, 64, 22, 4
MAX_BOXES = 6000


def timeline(run: RunFolder) -> Html | None:
    """Return the pipeline drawing; a note if the trace cannot be read, None if the run was not traced."""
    folder = _trace_folder(run)
    if folder is None:
        return None
    from tds.schedule import simulate
    from tds.trace import read_traces  # imports torch, which is not needed without a trace

    try:
        step = read_traces(folder)[-1]
    except Exception as error:  # an invalid trace must not prevent the report of other runs
        return tag("p", bilingual("The trace cannot be drawn: {}", error), class_="note")
    order = [[span.action for span in spans] for spans in step.timeline.spans]
    predicted = simulate(order, step.costs, step.num_chunks, step.placement)
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
    """Return the trace folder; its path may be relative to the working directory or to a parent of the run folder."""
    name = run.setting("parallel", "pipeline_trace")
    if not isinstance(name, str) or not name:
        return None
    candidates = [Path(name), *[parent / name for parent in run.path.resolve().parents[:3]]]
    return next((folder for folder in candidates if any(folder.glob("trace-rank*.json"))), None)


def _panel(title: Html, stage_timeline: Any, longest: float) -> Html:
    scale, height = (WIDTH - LEFT) / longest, stage_timeline.num_stages * ROW_HEIGHT
    rows = [
        join_html(
            [
                tag("text", f"stage {stage}", x=0, y=stage * ROW_HEIGHT + ROW_HEIGHT - GAP - 4),
                tag(
                    "rect",
                    x=LEFT,
                    y=stage * ROW_HEIGHT,
                    width=f"{stage_timeline.step_s * scale:.2f}",
                    height=ROW_HEIGHT - GAP,
                    class_="idle",
                ),
            ]
        )
        for stage in range(stage_timeline.num_stages)
    ]
    is_drawn = sum(map(len, stage_timeline.spans)) <= MAX_BOXES
    boxes = (
        [_box(stage, span, scale) for stage, spans in enumerate(stage_timeline.spans) for span in spans]
        if is_drawn
        else []
    )
    caption = [
        bilingual(
            "{}: {} ms, bubble {} %", title, f"{1e3 * stage_timeline.step_s:.4g}", f"{100 * stage_timeline.bubble:.1f}"
        )
    ]
    caption += [] if is_drawn else [bilingual(" (not drawn: more than {} boxes)", f"{MAX_BOXES:,}")]
    svg = tag("svg", *rows, *boxes, viewBox=f"0 0 {WIDTH} {height}", class_="timeline", role="img")
    return tag("figure", tag("figcaption", *caption), tag("div", svg, class_="scroll"))


def _box(stage: int, span: Any, scale: float) -> Html:
    action, width = span.action, (span.end_s - span.start_s) * scale
    action_type = type(action).__name__
    x, y = LEFT + span.start_s * scale, stage * ROW_HEIGHT
    title = f"{action_type} of micro-batch {action.micro_batch}" + (f", chunk {action.chunk}" if action.chunk else "")
    title += f": {1e3 * (span.end_s - span.start_s):.4g} ms"
    box = tag("rect", tag("title", title), x=f"{x:.2f}", y=y, width=f"{max(width, 0.3):.2f}", height=ROW_HEIGHT - GAP,
              class_=f"box {action_type}")  # fmt: skip
    if width < 9 * len(str(action.micro_batch)):
        return box
    return join_html(
        [box, tag("text", action.micro_batch, x=f"{x + width / 2:.2f}", y=y + ROW_HEIGHT - GAP - 4, class_="in")]
    )


LEGEND = tag(
    "p",
    *[
        tag("span", tag("i", class_=f"swatch {action_type}"), " ", bilingual(name), " ")
        for action_type, name in (
            ("Forward", "forward"),
            ("Backward", "backward"),
            ("BackwardInput", "backward for the input"),
            ("BackwardWeight", "backward for the weights"),
        )
    ],
    class_="legend",
)
