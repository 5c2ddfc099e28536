"""``plan.json``: what a run of ``benchmarks/plan.py`` measured and on which machines; and its estimates, made again.

So a change of the planner can be held against measurements of an idle machine without one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.plan_cases import CASES
from benchmarks.plan_parts.verdict import UNTIMED, Row, estimate_of
from megatron.planner.machine import Machine


def recorded(rows: Sequence[Row], machines: Mapping[int, Machine], *, is_smoke: bool) -> dict[str, Any]:
    """Return what ``rows_now`` needs, for JSON; of the machines all but their notes, which name a host."""
    told = {str(ranks): json.loads(replace(machine, notes="").to_json()) for ranks, machine in machines.items()}
    return {"is_smoke": is_smoke, "machines": told, "rows": [row.told() for row in rows]}


def rows_now(recording: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of ``recording``: what was measured then beside what the planner says now.

    Raises:
        KeyError: a layout is none of ``CASES``.
        ConfigError: a machine cannot be read.
    """
    cases = {case.name: case for case in CASES}
    machines = {
        int(ranks): Machine.from_json(json.dumps(told), f"a recording of {ranks} ranks")
        for ranks, told in recording["machines"].items()
    }
    for told in recording["rows"]:
        case = cases[told["name"]]
        estimate = estimate_of(case, machines.get(case.ranks, UNTIMED), is_smoke=recording["is_smoke"])
        yield Row(
            name=case.name,
            estimated_s=estimate.step_s,
            measured_s=told["measured_s"],
            estimated_bytes=estimate.memory[told["stage"]].total,
            measured_bytes=told["measured_bytes"],
            stage=told["stage"],
            parts=dict(estimate.parts),
            bubble=estimate.bubble,
        )
