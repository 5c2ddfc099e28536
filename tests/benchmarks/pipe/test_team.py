"""Contenders in processes of their own: they wait without work, a failure is told, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.contenders import GPTSizes
from benchmarks.pipe.cuts import assembled
from benchmarks.pipe.model import Case, Contender
from benchmarks.turns import Team

SIZES = GPTSizes(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, seq_length=8)
CASE = Case(name="toy", sizes=SIZES, micro_batch_size=1, num_micro_batches=4)
TORCH = Contender(name="torch", kind="torch", partition=(0, 2, 5))
OURS = Contender(name="ours", kind="ours", partition=(0, 2, 5))
SIDE = Contender(name="side", kind="side by side")


def cpu_ticks(team: Team) -> int:
    """Return processor time of all ranks, in hundredths of a second."""
    found = 0
    for pid in team.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found += int(fields[11]) + int(fields[12])
    return found


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ranks_wait_without_using_the_processor_and_end_with_the_run() -> None:
    with assembled(CASE, [TORCH, OURS, SIDE], "fork") as teams:
        losses = {name: team.ask("run", 0, 2)[-1]["losses"] for name, team in teams.items()}
        before = {name: cpu_ticks(team) for name, team in teams.items()}
        time.sleep(1.0)
        for name, team in teams.items():
            assert cpu_ticks(team) - before[name] <= 30, name  # one that spins takes 100
        pids = [pid for team in teams.values() for pid in team.pids]
    assert losses["torch"] == losses["ours"] == pytest.approx(losses["side"], abs=1e-6)
    assert len(pids) == 6 and all(map(is_gone, pids))


def test_a_rank_that_dies_ends_the_run_and_takes_the_others_along() -> None:
    with pytest.raises(RuntimeError, match=r'"torch", rank \d'), assembled(CASE, [TORCH], "fork") as teams:
        pids = teams["torch"].pids
        os.kill(pids[1], signal.SIGKILL)
        teams["torch"].ask("run", 0)
    assert all(map(is_gone, pids))


def test_an_error_of_a_rank_is_told_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="no_such_order"), assembled(CASE, [SIDE], "fork") as teams:
        teams["side"].ask("no_such_order")
