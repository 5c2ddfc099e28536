"""Forked ranks wait until all of them are there."""

from __future__ import annotations

import os
import time

from megatron.launch import processes


def test_no_rank_runs_before_the_last_one_is_forked(tmp_path):
    """Else one forked while another connects to the store may hang for ever in a lock of glibc."""
    script, sign = tmp_path / "script.py", tmp_path / "all-are-there"
    script.write_text("import os, sys\nos._exit(0 if os.path.exists(sys.argv[1]) else 7)\n")
    gate = processes.Gate()
    started = [
        processes.RankProcess(
            rank, rank, processes.start(str(script), [str(sign)], dict(os.environ), in_fork=True, gate=gate)
        )
        for rank in range(2)
    ]
    time.sleep(0.2)  # for a rank that does not wait
    sign.touch()
    gate.open()
    end = time.monotonic() + 30
    while any(one.is_alive and not one.reap() for one in started) and time.monotonic() < end:
        time.sleep(0.005)
    assert [one.status for one in started] == [0, 0]


def test_a_rank_in_a_python_of_its_own_needs_no_gate(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    gate = processes.Gate()
    one = processes.RankProcess(0, 0, processes.start(str(script), [], dict(os.environ), in_fork=False, gate=gate))
    end = time.monotonic() + 30
    while not one.reap() and time.monotonic() < end:
        time.sleep(0.005)
    assert one.status == 0
    gate.open()
