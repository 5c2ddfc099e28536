"""What SIGTERM, Ctrl-C and the launcher's death do to the ranks."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from megatron.runtime import exit_signals
from tests.helpers.launch_jobs import Job, free_port, is_alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_lets_the_ranks_save_and_leave_with_75(tmp_path, number):
    job = Job(tmp_path, [["save", "wait"], ["save", "wait"]])
    job.ranks(2)
    job.signal(number)
    assert job.wait() == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_everything_at_once(tmp_path, number, code, monkeypatch):
    monkeypatch.setattr(exit_signals, "PRESS_S", 0.05)
    job = Job(tmp_path, [["stubborn", "wait"]])
    ranks = job.ranks(1)
    job.signal(number)
    time.sleep(0.1)
    job.signal(number)
    assert job.wait(5) == code
    assert not is_alive(ranks[0]["pid"])


def test_a_ctrl_c_that_arrives_twice_is_one(tmp_path, monkeypatch):
    """Row A12: the terminal sends it to the launcher and to `timeout --foreground`, which passes it on."""
    monkeypatch.setattr(exit_signals, "PRESS_S", 60.0)
    job = Job(tmp_path, [["save", "wait"], ["save", "wait"]])
    job.ranks(2)
    job.signal(signal.SIGINT)
    job.until("SIGINT: the ranks finish their step")
    job.signal(signal.SIGINT)
    assert job.wait(5) == 75


def test_ranks_that_do_not_leave_in_time_are_ended(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"]], "--stop-grace", "0.2")
    job.ranks(1)
    job.signal(signal.SIGTERM)
    assert job.wait(5) == 4
    assert "rank 0 did not exit within --stop-grace 0.2 s" in job.output


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


def test_slurms_warning_lets_the_ranks_save_and_a_further_one_is_no_news(tmp_path):
    job = Job(tmp_path, [["save", "wait"], ["save", "wait"]])
    job.ranks(2)
    job.signal(signal.SIGUSR1)
    job.until("SIGUSR1: the ranks finish their step")
    job.signal(signal.SIGUSR1)
    assert job.wait(5) == 75


def test_a_second_signal_after_slurms_warning_ends_everything_at_once(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"]])
    job.ranks(1)
    job.signal(signal.SIGUSR1)
    job.until("the ranks finish their step")
    job.signal(signal.SIGTERM)
    assert job.wait(5) == 143


def test_slurms_warning_to_all_processes_ahead_of_any_handler_asks_for_another_start(tmp_path):
    """As `scancel --signal=USR1` sends it: the ranks outlive it, and the launcher ends them."""
    job = Job(tmp_path, [["wait"], ["wait"]])
    for rank in job.ranks(2):
        os.kill(rank["pid"], signal.SIGUSR1)
    time.sleep(0.1)
    job.signal(signal.SIGUSR1)
    assert job.wait(5) == 75
    assert "nothing was lost: run the same command later; code 75" in job.output


def test_slurms_warning_before_the_ranks_exist_asks_for_another_start(tmp_path):
    job = Job(tmp_path, [["exit:0"]], "--nnodes", "2")
    time.sleep(0.3)
    job.signal(signal.SIGUSR1)
    assert job.wait(5) == 75
    assert "SIGUSR1 before the ranks were started: nothing to save, code 75" in job.output


def test_ctrl_c_leaves_no_orphan_and_the_port_free(tmp_path):
    """Rows A12 and A18: what a rank has started goes with it, whether the launcher leaves or is killed."""
    for number, code in ((signal.SIGINT, 75), (signal.SIGKILL, -signal.SIGKILL)):
        port = free_port()
        place = tmp_path / str(int(number))
        job = Job(place, [["save", "child", "wait"]], "--master-port", str(port))
        (rank,) = job.ranks(1)
        end = time.monotonic() + 10
        while not (place / "child").exists() or not (place / "child").read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
        child = int((place / "child").read_text())
        job.signal(number)
        assert job.wait(5) == code
        end = time.monotonic() + 2
        while is_alive(rank["pid"]) and time.monotonic() < end:
            time.sleep(0.01)
        assert not is_alive(rank["pid"])
        if number == signal.SIGINT:
            assert not is_alive(child)
        else:
            os.kill(child, signal.SIGKILL)  # `sleep` does not ask the kernel to die with its parent, as readers do
        socket.create_server(("127.0.0.1", port)).close()
