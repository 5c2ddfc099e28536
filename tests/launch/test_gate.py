"""Forked ranks wait until all of them are there."""

from __future__ import annotations

import os
import time

from megatron.launch import processes


def test_ranks_wait_until_all_are_forked(tmp_path):
    """Else one forked while another connects to the store may hang for ever in a lock of glibc."""
    script, marker = tmp_path / "script.py", tmp_path / "all-are-there"
    script.write_text("import os, sys\nos._exit(0 if os.path.exists(sys.argv[1]) else 7)\n")
    gate = processes.Gate()
    rank_processes = [
        processes.RankProcess(
            rank, rank, processes.start_rank(str(script), [str(marker)], dict(os.environ), is_forked=True, gate=gate)
        )
        for rank in range(2)
    ]
    time.sleep(0.2)  # for a rank that does not wait
    marker.touch()
    gate.open()
    end = time.monotonic() + 30
    while any(process.is_alive and not process.reap() for process in rank_processes) and time.monotonic() < end:
        time.sleep(0.005)
    assert [process.status for process in rank_processes] == [0, 0]


def test_spawned_rank_needs_no_gate(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    gate = processes.Gate()
    process = processes.RankProcess(
        0, 0, processes.start_rank(str(script), [], dict(os.environ), is_forked=False, gate=gate)
    )
    end = time.monotonic() + 30
    while not process.reap() and time.monotonic() < end:
        time.sleep(0.005)
    assert process.status == 0
    gate.open()
