"""Write a self-contained HTML report of training runs: overlaid curves, differing settings, stages and timelines.

    python tools/report.py runs/gpt2-20261122-150000 runs/gpt2-20261122-151500
    python tools/report.py runs                        # every run in a folder
    python tools/report.py runs -o runs/all.html

The report is written to report.html in RUN, or in the common parent of several RUNs; -o selects another file. Runs may
be in progress, interrupted, or without records. Open the report in a browser; docs/monitoring.md describes it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.log import human_bytes, human_count, human_time  # noqa: E402
from tools.report_parts.experts import expert_map  # noqa: E402
from tools.report_parts.runs import (  # noqa: E402
    RunFolder,
    chart_data,
    finite_number,
    names_of,
    read_run,
    run_data,
    run_folders,
    timeline,
)
from tools.report_parts.words import (  # noqa: E402
    SCRIPT_TEXTS,
    ZH,
    Html,
    bilingual,
    html,
    join_html,
    section,
    table,
    tag,
)

REPORT_NAME = "report.html"
DEFAULT_POINTS = 2000
TEMPLATE_DIR = ROOT / "tools" / "report_parts"


def main() -> int:
    """Write the report that the command line requests; return the exit code."""
    flags = parse_args()
    try:
        paths = run_folders(flags.runs)
        runs = [read_run_or_error(path, name) for path, name in zip(paths, names_of(paths), strict=True)]
        title = flags.title or (runs[0].name if len(runs) == 1 else "Training runs")
        text = render_report(runs, title, flags.points)
        out = flags.out or default_path(flags.runs)
        out.write_text(text, encoding="utf-8", errors="replace")
    except (ValueError, OSError) as error:
        hint = ". Name another file with -o" if isinstance(error, OSError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    print(f"{out}: {len(runs)} run{'' if len(runs) == 1 else 's'}, {len(text) / 1e6:.1f} MB")
    return 0


def default_path(paths: Sequence[Path]) -> Path:
    """Return the report's default path: in the folder if ``paths`` has one entry, otherwise in the common parent."""
    return (
        paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))
    ) / REPORT_NAME


def read_run_or_error(path: Path, name: str) -> RunFolder:
    """Read a run; on failure, return a run with only its name and a note about the error."""
    try:
        return read_run(path, name)
    except Exception as error:
        return _damaged_run(path, name, error)


def render_report(runs: Sequence[RunFolder], title: str, points: int) -> str:
    """Return the report's HTML. For a run that cannot be drawn, it contains only the name and the error."""
    try:
        return render_page(runs, title, points)
    except Exception:
        return render_page([_drawable(run, points) for run in runs], title, points)


def _drawable(run: RunFolder, points: int) -> RunFolder:
    try:
        render_page([run], run.name, points)
    except Exception as error:
        return _damaged_run(run.path, run.name, error)
    return run


def _damaged_run(path: Path, name: str, error: Exception) -> RunFolder:
    return RunFolder(path, name, notes=[f"the run is damaged and was skipped ({type(error).__name__}: {error})"])


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or a folder of run folders")
    parser.add_argument(
        "-o", "--out", type=Path,
        help=f"output file (default: {REPORT_NAME} in RUN, or in the common parent of several RUNs)",
    )  # fmt: skip
    parser.add_argument("--title", help="title of the report (default: the run's name, or 'Training runs')")
    parser.add_argument(
        "--points", type=positive_int, default=DEFAULT_POINTS, metavar="N",
        help=f"draw about N points per curve (default {DEFAULT_POINTS}); extremes of loss and gradient norm are kept",
    )  # fmt: skip
    return parser.parse_args(words)


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


# The page. It loads nothing from the network, and all text from runs is escaped.


def render_page(runs: Sequence[RunFolder], title: str, max_points: int = DEFAULT_POINTS) -> str:
    """Return the HTML of the report.

    Args:
        max_points: approximate number of points per curve.
    """
    data = [run_data(run, max_points) for run in runs]
    fields = {
        "title": html(title),
        "when": bilingual(
            "{} run, {}" if len(runs) == 1 else "{} runs, {}", len(runs), time.strftime("%Y-%m-%d %H:%M")
        ),
        "notes": _notes(runs),
        "summary": summary(runs),
        "sections": join_html(_sections(runs)),
        "data": to_script_json(
            {"runs": data, "charts": (charts := chart_data(data)), "zh": _script_translations(charts)}
        ),
        "script": (TEMPLATE_DIR / "report.js").read_text(encoding="utf-8"),
    }
    template = (TEMPLATE_DIR / "page.html").read_text(encoding="utf-8")
    template = re.sub(r"\[\[(.+?)\]\]", lambda match: bilingual(match.group(1)), template)
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match.group(1)], template)


def _script_translations(charts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return English -> Chinese text for the texts that report.js inserts."""
    chart_texts = [chart[name] for chart in charts for name in ("title", "about") if chart[name]]
    return {text: ZH[text] for text in (*SCRIPT_TEXTS, *chart_texts)}


def to_script_json(value: object) -> str:
    """Return ``value`` as JSON, escaped so that its text cannot close the enclosing script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _sections(runs: Sequence[RunFolder]) -> list[Html]:
    return [
        section(bilingual("Settings"), settings_section(runs), id_="settings"),
        *_section_of_runs(runs, "Stages", "stages", stage_table),
        *_section_of_runs(runs, "Estimated and measured memory", "memory", memory_table),
        *_section_of_runs(runs, "Tokens by expert", "experts", expert_map),
        *_section_of_runs(runs, "Evaluations", "evaluations", evaluation_table),
        *_section_of_runs(runs, "Pipeline", "pipeline", timeline),
        *_section_of_runs(runs, "Slowest operators", "operators", operator_table),
        *_section_of_runs(runs, "Commands and versions", "commands", _commands),
    ]


def _section_of_runs(
    runs: Sequence[RunFolder], title: str, name: str, make: Callable[[RunFolder], Html | None]
) -> list[Html]:
    """Return a list of one section with the output of ``make`` per run; [] if ``make`` returns None for all runs."""
    results = [(run, content) for run in runs if (content := make(run)) is not None]
    children = [join_html([tag("h3", run.name), content]) for run, content in results]
    return [section(bilingual(title), *children, id_=name)] if results else []


def _commands(run: RunFolder) -> Html | None:
    """Return the commands of all starts, the versions, and the number of samples read; None if unknown."""
    train = run.records_of_type("train")
    samples = finite_number(train[-1].get("samples")) if train else None
    lines: list[Any] = [f"{name} {value}" for name, value in run.versions.items()]
    lines += [bilingual("{} samples read", f"{samples:,}")] if samples is not None else []
    if not lines and not run.commands:
        return None
    return tag("div", tag("p", join_html(lines, ", ")), tag("pre", "\n".join(run.commands)))


def _notes(runs: Sequence[RunFolder]) -> Html:
    return join_html(tag("p", f"{run.name}: {note}", class_="note") for run in runs for note in run.notes)


# Summary table: one row per run with progress, losses and speed.

RUN_COLUMNS = ("run", "state", "model", "ranks", "steps", "loss", "validation", "test", "tokens", "time", "tokens/s",
               "MFU", "memory", "skipped", "starts")  # fmt: skip


def summary(runs: Sequence[RunFolder]) -> Html:
    """Return the table of all runs, with checkboxes that hide a run's curves."""
    return table(
        [*map(bilingual, RUN_COLUMNS)],
        [[_swatch(index, run), *summary_cells(run)] for index, run in enumerate(runs)],
        class_="runs",
    )


def summary_cells(run: RunFolder) -> list[str]:
    """Return the cells of a run's row after its name; "" for unknown values."""
    train = run.records_of_type("train")
    last_record = train[-1] if train else {}
    memory = [
        value
        for value in map(finite_number, _dict_or_empty(last_record.get("memory_bytes")).values())
        if value is not None
    ]
    valid = [loss for record in run.records_of_type("valid") if (loss := finite_number(record.get("loss"))) is not None]
    tested = run.records_of_type("test") or run.evaluations
    test = [loss for record in tested if (loss := finite_number(record.get("loss"))) is not None]
    return [
        bilingual(*describe_state(run)),
        _model(run),
        _layout(run),
        f"{last_record.get('step', 0):,}",
        _format_number(last_record.get("loss"), ".4f"),
        _validation(valid),
        f"{test[-1]:.4f}" if test else "",
        human_count(tokens) if (tokens := finite_number(last_record.get("tokens"))) is not None else "",
        human_time(_elapsed_s(run, train)) if train else "",
        _format_number(_median(train, "tokens_per_s"), ",.0f"),
        f"{100 * mfu:.1f} %" if (mfu := _median(train, "mfu")) is not None else "",
        human_bytes(max(memory)) if memory else "",
        str(last_record.get("skipped", "")),
        str(len(run.starts) or ""),
    ]


def _validation(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    best = min(losses)
    return f"{losses[-1]:.4f}" + (f" (best {best:.4f})" if best < losses[-1] else "")


def describe_state(run: RunFolder) -> tuple[str, ...]:
    """Return the run's progress as arguments for ``bilingual``: a text and its values."""
    train, total = run.records_of_type("train"), finite_number(run.setting("batch", "train_iters"))
    if not train:
        return ("evaluated" if run.records_of_type("test") or run.evaluations else "no records",)
    step = train[-1]["step"]
    if finite_number(train[-1].get("loss")) is None:
        return "non-finite loss at step {}", f"{step:,}"
    limit, is_reached = _sample_limit(run, train)
    if limit is not None:
        return ("finished",) if is_reached else ("at sample {} of {}", f"{train[-1]['samples']:,}", f"{limit:,.0f}")
    # A run that was stopped between two logged steps has saved a later step.
    step = max([step, *(record["step"] for record in run.records_of_type("save") if "failed" not in record)])
    if total is None or step >= total:
        return ("finished",) if total is not None else ("at step {}", f"{step:,}")
    return "at step {} of {}", f"{step:,}", f"{total:,.0f}"


def _sample_limit(run: RunFolder, train: Sequence[Mapping[str, Any]]) -> tuple[float | None, bool]:
    """Return the run's limit in samples and True if it is reached; (None, False) if the run is limited by steps.

    --train-samples is reached if another step with the last step's number of samples would exceed it.
    """
    samples, tokens = (finite_number(run.setting("batch", name)) for name in ("train_samples", "train_tokens"))
    consumed = finite_number(train[-1].get("samples"))
    if consumed is None or (samples is None and tokens is None) or run.setting("batch", "requested_train_iters"):
        return None, False
    before = train[-2] if len(train) > 1 else {"step": 0, "samples": 0}
    size = (consumed - (finite_number(before.get("samples")) or 0)) / max(train[-1]["step"] - before["step"], 1)
    limits = [] if samples is None else [(samples, consumed + size > samples)]
    if tokens is not None:
        length = (
            finite_number(run.setting("t5", "enc_seq_length")) or finite_number(run.setting("batch", "seq_length")) or 1
        )
        limits.append((math.ceil(tokens / length), consumed * length >= tokens))
    return min(limits)[0], any(is_reached for _, is_reached in limits)


def _swatch(index: int, run: RunFolder) -> Html:
    box = tag("input", type="checkbox", checked=True, data_run=index)
    return tag("label", Html(box.replace("</input>", "")), tag("i", class_="swatch", data_run=index), html(run.name))


def _model(run: RunFolder) -> str:
    layers, hidden = run.setting("model", "num_layers"), run.setting("model", "hidden_size")
    family = run.config.get("family", "")
    if family == "t5":
        layers = f"{run.setting('t5', 'enc_layers')} + {run.setting('t5', 'dec_layers')}"
    return f"{family}, {layers} layers, hidden {hidden}" if layers is not None else str(family)


def _layout(run: RunFolder) -> str:
    ranks = run.versions.get("world_size")
    pipe, tensor = run.setting("parallel", "pipe_parallel_size"), run.setting("parallel", "model_parallel_size")
    context = run.setting("parallel", "context_parallel_size") or 1  # older runs do not have this setting
    if not isinstance(ranks, int) or not isinstance(pipe, int) or not isinstance(tensor, int):
        return str(ranks or "")
    stages = max(pipe, 1)
    context_text = f" x {context}" if context != 1 else ""
    return f"{ranks} = {stages} x {ranks // (stages * max(tensor, 1) * max(int(context), 1))}{context_text} x {tensor}"


def _elapsed_s(run: RunFolder, train: Sequence[dict[str, Any]]) -> float:
    """Return the seconds from the first start to the last record; without timestamps, the sum of the step times."""
    ended = finite_number(train[-1].get("time"))
    began = next((finite_number(start.get("time")) for start in run.starts), None)
    if ended is not None and began is not None:
        return train[-1]["time"] - run.starts[0]["time"]
    before, seconds = 0, 0.0
    for record in train:
        seconds += (finite_number(record.get("step_s")) or 0.0) * (record["step"] - before)
        before = record["step"]
    return seconds


def _median(train: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [value for record in train if (value := finite_number(record.get(name))) is not None]
    return statistics.median(values) if values else None


def _format_number(value: Any, format_spec: str) -> str:
    finite = finite_number(value)
    return "" if finite is None else format(finite, format_spec)


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


MISSING = "-"


def settings(run: RunFolder) -> dict[str, str]:
    """Return "section.name" -> value for the settings of a run and "version.name" -> value for its versions."""
    config_values = {name: json.dumps(value, ensure_ascii=False) for name, value in _flatten(run.config)}
    return {**config_values, **{f"version.{name}": str(value) for name, value in run.versions.items()}}


def compare_settings(runs: Sequence[RunFolder]) -> list[tuple[str, list[str], bool]]:
    """Return (name, value in each run, True if the values differ) for every setting."""
    all_settings = [settings(run) for run in runs]
    names = dict.fromkeys(name for run_settings in all_settings for name in run_settings)
    rows = [(name, [run_settings.get(name, MISSING) for run_settings in all_settings]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def settings_section(runs: Sequence[RunFolder]) -> Html:
    """Return the settings table, in which rows without differences are hidden until a button is clicked."""
    rows = compare_settings(runs)
    num_different = sum(differs for _, _, differs in rows)
    if len(runs) == 1:
        about = bilingual("{} settings.", len(rows))
    else:
        about = bilingual("{} of {} settings differ.", num_different, len(rows))
    button = tag("button", bilingual("show all"), type="button", class_="all-settings", hidden=not rows)
    head = tag("thead", tag("tr", tag("th", bilingual("setting")), *[tag("th", run.name) for run in runs]))
    body = [
        tag("tr", tag("th", name), *[tag("td", value) for value in values], class_=None if differs else "same")
        for name, values, differs in rows
    ]
    settings_html = tag("table", head, tag("tbody", *body), class_="settings only-differences")
    return tag("div", tag("p", about, " ", button), tag("div", settings_html, class_="scroll"))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


STAGE_COLUMNS = ("stage", "layers", "parameters per rank", "memory", "compute time per step", "idle")
MEMORY_COMPONENTS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "buffers")
"""Components of the planner's memory estimate; their sum is the estimated memory of the device."""
MEMORY_COLUMNS = ("estimated", "before model build", "measured", "measured - before - estimated")
MEMORY_NOTES = (
    "The estimated memory is the planner's estimate for the model and its training on one rank, the sum of the columns "
    "to its left. The measured memory is a rank's peak: memory allocated by torch on a GPU, the resident set size of "
    "the process on a CPU.",
    "They differ by the memory in use before the model was built (Python, torch, libraries) and by the remainder in "
    "the last column. A positive remainder is memory that the estimate does not include: temporary tensors within "
    "operators, memory cached by the allocator, threads, files and prefetched data. A negative remainder means that "
    "the estimated tensors were not all allocated at the same time, or that they reused free memory.",
)
MAX_OPERATORS = 20
SPLIT_NAMES = {"valid": "validation", "test": "test"}


def stage_table(run: RunFolder) -> Html | None:
    """Return the table of a run's stages, with memory and compute time from its last record; None without stages."""
    train = run.records_of_type("train")
    last_record = train[-1] if train else {}
    memory, work = _by_stage(last_record, "memory_bytes"), _by_stage(last_record, "work_s")
    step_s = finite_number(last_record.get("step_s"))
    rows = {f"stage {row.get('stage')}": row for row in run.stages if isinstance(row, dict)}
    names = list(dict.fromkeys([*rows, *memory, *work]))
    if not names:
        return None
    table_rows = [_stage_row(name, rows.get(name, {}), memory.get(name), work.get(name), step_s) for name in names]
    return table([*map(bilingual, STAGE_COLUMNS), ""], table_rows)


def memory_table(run: RunFolder) -> Html | None:
    """Return a table of estimated memory by component and measured memory per stage; None if no stage has both."""
    train = run.records_of_type("train")
    measured, rows = _by_stage(train[-1] if train else {}, "memory_bytes"), []
    stages = [item for item in run.stages if isinstance(item, dict)]
    used = [name for name in MEMORY_COMPONENTS if any(_estimated_components(stage).get(name) for stage in stages)]
    for stage in stages:
        estimated, before = finite_number(stage.get("estimated_bytes")), finite_number(stage.get("before_bytes"))
        measured_bytes = measured.get(f"stage {stage.get('stage')}")
        if estimated is None or measured_bytes is None:
            continue
        remainder = measured_bytes - before - estimated if before is not None else None
        values = [*(_estimated_components(stage).get(name) for name in used), estimated, before, measured_bytes]
        rows.append([bilingual("stage {}", stage.get("stage")), *map(_bytes, values), _signed(remainder)])
    notes = [tag("p", bilingual(text)) for text in MEMORY_NOTES]
    return tag("div", *notes, table([*map(bilingual, ("stage", *used, *MEMORY_COLUMNS))], rows)) if rows else None


def _estimated_components(stage: Mapping[str, Any]) -> dict[str, float]:
    return _by_stage(stage, "estimated_parts")


def _bytes(value: float | None) -> str:
    return human_bytes(value) if value is not None else ""


def _signed(value: float | None) -> str:
    return ("-" if value < 0 else "+") + human_bytes(abs(value)) if value is not None else ""


def evaluation_table(run: RunFolder) -> Html | None:
    """Return the table of evaluations from training and from --eval-only; None if there are none."""
    rows = []
    for record in [*run.records_of_type("valid"), *run.records_of_type("test"), *run.evaluations]:
        loss, perplexity = (finite_number(record.get(name)) for name in ("loss", "perplexity"))
        losses = record.get("losses")
        rows.append([
            f"{record['step']:,}",
            bilingual(SPLIT_NAMES[record["kind"]]) if record["kind"] in SPLIT_NAMES else record["kind"],
            f"{loss:.4f}" if loss is not None else "",
            f"{perplexity:.2f}" if perplexity is not None else "",
            ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if finite_number(value) is not None)
            if isinstance(losses, dict)
            else "",
            record.get("checkpoint", ""),
        ])  # fmt: skip
    head = ("step", "split", "loss", "perplexity", "by corpus", "checkpoint")
    return table([*map(bilingual, head)], rows) if rows else None


def operator_table(run: RunFolder) -> Html | None:
    """Return the table of the slowest operators in the run's profile (--profile); None without a profile."""
    entries = run.operators.get("operators")
    if not isinstance(entries, list) or not entries:
        return None
    num_passes = (finite_number(run.operators.get("steps")) or 1) * (finite_number(run.operators.get("ranks")) or 1)
    operators = [operator for operator in entries if isinstance(operator, dict)]
    times = [
        name for name in ("device_us", "host_us") if any(finite_number(operator.get(name)) for operator in operators)
    ]
    units = [bilingual("{} ms", bilingual(name.removesuffix("_us"))) for name in times]
    head = [bilingual("operator"), *units, "", bilingual("calls")]
    longest = max((finite_number(operator.get(times[0])) or 0 for operator in operators), default=0) if times else 0
    rows = []
    for operator in operators[:MAX_OPERATORS]:
        cells = [f"{(finite_number(operator.get(name)) or 0) / 1e3 / num_passes:,.3f}" for name in times]
        share = (finite_number(operator.get(times[0])) or 0) / longest if longest else 0
        rows.append(
            [
                operator.get("name"),
                *cells,
                _bar(share),
                f"{(finite_number(operator.get('calls')) or 0) / num_passes:,.1f}",
            ]
        )
    text = "Self time per step and rank, averaged over {} steps and {} ranks. Traces: {}"
    about = bilingual(text, run.operators.get("steps"), run.operators.get("ranks"), run.path / "profile")
    return tag("div", tag("p", about), table(head, rows))


def _stage_row(
    name: str, row: Mapping[str, Any], memory: float | None, work_s: float | None, step_s: float | None
) -> list:
    parameters = finite_number(row.get("parameters"))
    idle = max(1 - work_s / step_s, 0.0) if work_s is not None and step_s else None
    return [
        bilingual("stage {}", name.removeprefix("stage ")),
        row.get("layers", ""),
        human_count(parameters) if parameters is not None else "",
        _bytes(memory),
        f"{1e3 * work_s:,.1f} ms" if work_s is not None else "",
        f"{100 * idle:.1f} %" if idle is not None else "",
        _bar(1 - idle) if idle is not None else "",
    ]


def _bar(share: float) -> Html:
    return tag("span", tag("i", style=f"width:{100 * min(max(share, 0), 1):.1f}%"), class_="bar")


def _by_stage(record: Mapping[str, Any], name: str) -> dict[str, float]:
    values = record.get(name)
    if not isinstance(values, dict):
        return {}
    return {stage: value for stage, stage_value in values.items() if (value := finite_number(stage_value)) is not None}


if __name__ == "__main__":
    sys.exit(main())
