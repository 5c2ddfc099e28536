"""How long ago this process has started its last operation, whatever is done to the wall clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tds.watchdog import flight_recorder


@pytest.mark.parametrize("clock_shift_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("is_before", [True, False])
def test_wall_clock_change_does_not_affect_idle_time(
    clock_shift_s: float, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation began 5 s ago, before or after the clock was set."""
    now = flight_recorder.time.monotonic()
    operation = flight_recorder.Operation(
        "", now - 5.0 + flight_recorder._CLOCK_S + (0.0 if is_before else clock_shift_s)
    )
    monkeypatch.setattr(flight_recorder, "operations", lambda: [operation])
    clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now + flight_recorder._CLOCK_S + clock_shift_s)
    monkeypatch.setattr(flight_recorder, "time", clock)
    assert flight_recorder.idle_s() == pytest.approx(5.0, abs=1e-3)
