"""The settings of several runs side by side: those that differ, and on request all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.report_parts.folder import RunFolder
from tools.report_parts.markup import Html, tag
from tools.report_parts.words import bilingual

MISSING = "-"


def settings(run: RunFolder) -> dict[str, str]:
    """Return section.name -> value of a run's settings, and version.name -> value, as text."""
    of_config = {name: json.dumps(value, ensure_ascii=False) for name, value in _flat(run.config)}
    return {**of_config, **{f"version.{name}": str(value) for name, value in run.versions.items()}}


def compared(runs: Sequence[RunFolder]) -> list[tuple[str, list[str], bool]]:
    """Return (name, value of each run, whether they differ) of every setting."""
    each = [settings(run) for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    rows = [(name, [one.get(name, MISSING) for one in each]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def differences(runs: Sequence[RunFolder]) -> Html:
    """Return the table; rows in which nothing differs are hidden until all are asked for."""
    rows = compared(runs)
    found = sum(differs for _, _, differs in rows)
    if len(runs) == 1:
        told = bilingual("{} settings of the run.", len(rows))
    else:
        told = bilingual("{} of {} settings differ.", found, len(rows))
    button = tag("button", bilingual("show all"), type="button", class_="all-settings", hidden=not rows)
    head = tag("thead", tag("tr", tag("th", bilingual("setting")), *[tag("th", run.name) for run in runs]))
    body = [
        tag("tr", tag("th", name), *[tag("td", value) for value in values], class_=None if differs else "same")
        for name, values, differs in rows
    ]
    table = tag("table", head, tag("tbody", *body), class_="settings only-differences")
    return tag("div", tag("p", told, " ", button), tag("div", table, class_="scroll"))


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
