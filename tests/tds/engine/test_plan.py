"""Which order of actions an engine runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tds.deepspeed.checks import log_unused_settings
from tds.engine.pipeline_json import max_ctas
from tds.engine.schedule_plan import SchedulePlan
from tds.p2p.process_groups import MAX_CTAS
from tds.schedule import Placement, gpipe


def test_a_schedule_that_is_refused_leaves_the_plan_as_it_was() -> None:
    plan = SchedulePlan("gpipe", placement=Placement(2), stage=0)
    with pytest.raises(ValueError, match="no-such-schedule"):
        plan.set("no-such-schedule")
    assert plan.name == "gpipe"
    assert plan.training(3) == gpipe(2, 3, 0)


def test_processors_of_a_message_are_a_whole_number() -> None:
    assert (max_ctas({}), max_ctas({"p2p_max_ctas": 0}), max_ctas({"p2p_max_ctas": 9})) == (MAX_CTAS, 0, 9)
    for wrong in (-1, 2.0, True, "4"):
        with pytest.raises(ValueError, match='"p2p_max_ctas": ...} must be a non-negative integer'):
            max_ctas({"p2p_max_ctas": wrong})


def test_a_removed_key_of_the_json_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for section, num_lines in (({}, 0), ({"overlap_forward_backward": True}, 1)):
        engine = SimpleNamespace(config_given={"pipeline": section}, global_rank=0, asks_for_flops=False)
        log_unused_settings(engine)
        assert len(caplog.records) == num_lines
    assert "overlap_forward_backward" in caplog.text and "has no effect" in caplog.text
