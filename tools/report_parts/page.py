"""One HTML page of some runs: it fetches nothing, and what it shows of a run is escaped."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.report_parts.charts import chart_data, run_data
from tools.report_parts.columns import number
from tools.report_parts.differences import differences
from tools.report_parts.facts import summary
from tools.report_parts.folder import RunFolder
from tools.report_parts.markup import Html, html, joined, section, tag
from tools.report_parts.pipeline import timeline
from tools.report_parts.stages import evaluation_table, memory_table, operator_table, stage_table
from tools.report_parts.words import OF_SCRIPTS, ZH, bilingual

HERE = Path(__file__).resolve().parent
SCRIPTS = ("scale.js", "chart.js", "report.js")
POINTS = 2000


def page(runs: Sequence[RunFolder], title: str, limit: int = POINTS) -> str:
    """Return the page.

    Args:
        limit: about so many points of a curve are drawn.
    """
    of_runs = [run_data(run, limit) for run in runs]
    parts = {
        "title": html(title),
        "style": (HERE / "style.css").read_text(encoding="utf-8"),
        "when": bilingual(
            "{} run, {}" if len(runs) == 1 else "{} runs, {}", len(runs), time.strftime("%Y-%m-%d %H:%M")
        ),
        "notes": _notes(runs),
        "summary": summary(runs),
        "sections": joined(_sections(runs)),
        "data": as_script({"runs": of_runs, "charts": (charts := chart_data(of_runs)), "zh": _chinese(charts)}),
        "script": "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    template = (HERE / "page.html").read_text(encoding="utf-8")
    template = re.sub(r"\[\[(.+?)\]\]", lambda found: bilingual(found.group(1)), template)
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)


def _chinese(charts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the words that scripts write."""
    of_charts = [chart[name] for chart in charts for name in ("title", "about") if chart[name]]
    return {text: ZH[text] for text in (*OF_SCRIPTS, *of_charts)}


def as_script(value: object) -> str:
    """Return JSON that can stand within a script element: nothing in it ends the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _sections(runs: Sequence[RunFolder]) -> list[Html]:
    return [
        section(bilingual("Settings"), differences(runs), id_="settings"),
        *_of_each(runs, "Stages", "stages", stage_table),
        *_of_each(runs, "Memory, estimated and measured", "memory", memory_table),
        *_of_each(runs, "Evaluations", "evaluations", evaluation_table),
        *_of_each(runs, "Pipeline", "pipeline", timeline),
        *_of_each(runs, "Operators that take longest", "operators", operator_table),
        *_of_each(runs, "Commands and versions", "commands", _commands),
    ]


def _of_each(runs: Sequence[RunFolder], title: str, name: str, make: Callable[[RunFolder], Html | None]) -> list[Html]:
    """Return a section with what ``make`` gives of each run, none where that is nothing."""
    made = [(run, found) for run in runs if (found := make(run)) is not None]
    within = [joined([tag("h3", run.name), found]) for run, found in made]
    return [section(bilingual(title), *within, id_=name)] if made else []


def _commands(run: RunFolder) -> Html | None:
    """Return how each start was made, with which versions, and what the run has read."""
    train = run.of_kind("train")
    samples = number(train[-1].get("samples")) if train else None
    told: list[Any] = [f"{name} {value}" for name, value in run.versions.items()]
    told += [bilingual("{} samples read", f"{samples:,}")] if samples is not None else []
    if not told and not run.commands:
        return None
    return tag("div", tag("p", joined(told, ", ")), tag("pre", "\n".join(run.commands)))


def _notes(runs: Sequence[RunFolder]) -> Html:
    return joined(tag("p", f"{run.name}: {note}", class_="note") for run in runs for note in run.notes)
