"""What SIGTERM, Ctrl-C and the launcher's death do to the ranks."""

from __future__ import annotations

import signal
import time

import pytest

from tests.launch.jobs import Job, is_alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_lets_the_ranks_save_and_leave_with_75(tmp_path, number):
    job = Job(tmp_path, [["save", "wait"], ["save", "wait"]])
    job.ranks(2)
    job.signal(number)
    assert job.wait() == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_everything_at_once(tmp_path, number, code):
    job = Job(tmp_path, [["stubborn", "wait"]])
    ranks = job.ranks(1)
    job.signal(number)
    time.sleep(0.1)
    job.signal(number)
    assert job.wait(5) == code
    assert not is_alive(ranks[0]["pid"])


def test_ranks_that_do_not_leave_in_time_are_ended(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"]], "--stop-grace", "0.2")
    job.ranks(1)
    job.signal(signal.SIGTERM)
    assert job.wait(5) == 4
    assert "rank 0 did not leave within --stop-grace 0.2 s" in job.output


def test_ranks_without_a_handler_end_with_the_signals_code(tmp_path):
    job = Job(tmp_path, [["wait"]])
    job.ranks(1)
    job.signal(signal.SIGTERM)
    assert job.wait(5) == 143


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"], ["stubborn", "wait"]])
    ranks = job.ranks(2)
    job.signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    end = time.monotonic() + 2
    while any(is_alive(rank["pid"]) for rank in ranks) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(is_alive(rank["pid"]) for rank in ranks)


def test_a_signal_before_the_ranks_exist_ends_the_launcher(tmp_path):
    job = Job(tmp_path, [["exit:0"]], "--nnodes", "2", "--master-addr", "127.0.0.1")
    time.sleep(0.3)
    job.signal(signal.SIGTERM)
    assert job.wait(5) == 143
