"""docs/pipelines.md: the table of idle shares is what the schedules of today give in the simulation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tds.schedule import LOOP, Costs, V, simulate
from tds.schedule.simulate import V_SCHEDULES, order_named

DOCS = Path(__file__).resolve().parents[2] / "docs"
STAGES = 4
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = 121, 132, 103


def simulate_idle_share(schedule: str, num_micro_batches: int) -> float:
    chunks, placement = (2, V) if schedule in V_SCHEDULES else (1, LOOP)
    order = order_named(schedule, chunks, placement)
    stages = [list(order(STAGES, num_micro_batches, stage)) for stage in range(STAGES)]
    costs = Costs.even(chunks * STAGES, FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    return simulate(stages, costs, chunks, placement).bubble


@pytest.mark.parametrize("page", [DOCS / "pipelines.md", DOCS / "zh" / "pipelines.md"], ids=["english", "chinese"])
def test_idle_share_table_equals_simulation(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(rf"{FORWARD}\D+{BACKWARD_INPUT}\D+{BACKWARD_WEIGHT}", text)
    head, *rows = re.search(r"(?m)^  \| m \|.*\n(?:  \|.*\n)+", text)[0].splitlines()  # type: ignore[index]
    schedules = [name.strip().lower() for name in head.split("|")[2:-1]]
    assert schedules == ["1f1b", "zb-h1", "zb-v", "dualpipev"] and len(rows) == 4
    for row in rows[1:]:
        micro_batches, *shares = (cell.strip() for cell in row.split("|")[1:-1])
        assert shares == [f"{100 * simulate_idle_share(name, int(micro_batches)):.1f} %" for name in schedules], row
