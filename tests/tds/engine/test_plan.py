"""Which order of actions an engine runs."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from tds.deepspeed.checks import log_unused_settings
from tds.engine.pipeline_json import max_ctas, timeout_of
from tds.engine.schedule_plan import SchedulePlan
from tds.p2p.process_groups import MAX_CTAS
from tds.schedule import Placement, gpipe


def test_rejected_schedule_leaves_plan_unchanged() -> None:
    plan = SchedulePlan("gpipe", placement=Placement(2), stage=0)
    with pytest.raises(ValueError, match="no-such-schedule"):
        plan.set_schedule("no-such-schedule")
    assert plan.name == "gpipe"
    assert plan.training_actions(3) == gpipe(2, 3, 0)


def test_p2p_max_ctas_must_be_non_negative_integer() -> None:
    assert (max_ctas({}), max_ctas({"p2p_max_ctas": 0}), max_ctas({"p2p_max_ctas": 9})) == (MAX_CTAS, 0, 9)
    for value in (-1, 2.0, True, "4"):
        with pytest.raises(ValueError, match='"p2p_max_ctas": ...} must be a non-negative integer'):
            max_ctas({"p2p_max_ctas": value})


def test_removed_json_key_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for section, num_lines in (({}, 0), ({"overlap_forward_backward": True}, 1)):
        engine = SimpleNamespace(user_config={"pipeline": section}, global_rank=0, is_flops_profiler_enabled=False)
        log_unused_settings(engine)
        assert len(caplog.records) == num_lines
    assert "overlap_forward_backward" in caplog.text and "has no effect" in caplog.text


def test_time_limit_is_a_positive_number_of_seconds() -> None:
    default = timedelta(seconds=7)
    assert timeout_of({}, default) == default
    assert timeout_of({"timeout_s": 2.5}, default) == timedelta(seconds=2.5)
    for limit in (True, 0, -1, "3"):
        with pytest.raises(ValueError, match=f"must be a positive number of seconds, got {limit!r}"):
            timeout_of({"timeout_s": limit}, default)
