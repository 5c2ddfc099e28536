"""Which order of actions an engine runs."""

from __future__ import annotations

import pytest

from tds.engine.stage import SchedulePlan
from tds.schedule import gpipe


def test_a_schedule_that_is_refused_leaves_the_plan_as_it_was() -> None:
    plan = SchedulePlan("gpipe", num_stages=2, num_chunks=1, stage=0)
    with pytest.raises(ValueError, match="no-such-schedule"):
        plan.set("no-such-schedule")
    assert plan.name == "gpipe"
    assert plan.training(3) == gpipe(2, 3, 0)
