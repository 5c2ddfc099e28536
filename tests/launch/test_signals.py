"""What SIGTERM, Ctrl-C and the launcher's death do to the ranks."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from megatron.runtime import exit_signals
from tests.helpers.launch_jobs import Job, find_free_port, is_alive


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_ranks_save_and_exit_75(tmp_path, signal_number):
    job = Job(tmp_path, [["save", "wait"], ["save", "wait"]])
    job.wait_for_ranks(2)
    job.send_signal(signal_number)
    assert job.wait() == 75


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_ends_job_immediately(tmp_path, signal_number, code, monkeypatch):
    monkeypatch.setattr(exit_signals, "KEY_PRESS_S", 0.05)
    job = Job(tmp_path, [["stubborn", "wait"]])
    ranks = job.wait_for_ranks(1)
    job.send_signal(signal_number)
    time.sleep(0.1)
    job.send_signal(signal_number)
    assert job.wait(5) == code
    assert not is_alive(ranks[0]["pid"])


def test_duplicate_ctrl_c_counts_once(tmp_path, monkeypatch):
    """Row A12: the terminal sends it to the launcher and to `timeout --foreground`, which passes it on."""
    monkeypatch.setattr(exit_signals, "KEY_PRESS_S", 60.0)
    job = Job(tmp_path, [["save", "wait"], ["save", "wait"]])
    job.wait_for_ranks(2)
    job.send_signal(signal.SIGINT)
    job.wait_for_output("SIGINT: the ranks finish their step")
    job.send_signal(signal.SIGINT)
    assert job.wait(5) == 75


def test_ranks_exceeding_stop_grace_are_killed(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"]], "--stop-grace", "0.2")
    job.wait_for_ranks(1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(5) == 4
    assert "rank 0 did not exit within --stop-grace 0.2 s" in job.output


def test_ranks_without_handler_exit_with_signal_code(tmp_path):
    job = Job(tmp_path, [["wait"]])
    job.wait_for_ranks(1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(5) == 143


def test_ranks_die_with_killed_launcher(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"], ["stubborn", "wait"]])
    ranks = job.wait_for_ranks(2)
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    end = time.monotonic() + 2
    while any(is_alive(rank["pid"]) for rank in ranks) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(is_alive(rank["pid"]) for rank in ranks)


def test_signal_before_ranks_start_ends_launcher(tmp_path):
    job = Job(tmp_path, [["exit:0"]], "--nnodes", "2", "--master-addr", "127.0.0.1")
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    assert job.wait(5) == 143


def test_repeated_slurm_warning_lets_ranks_save(tmp_path):
    job = Job(tmp_path, [["save", "wait"], ["save", "wait"]])
    job.wait_for_ranks(2)
    job.send_signal(signal.SIGUSR1)
    job.wait_for_output("SIGUSR1: the ranks finish their step")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(5) == 75


def test_signal_after_slurm_warning_ends_job_immediately(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"]])
    job.wait_for_ranks(1)
    job.send_signal(signal.SIGUSR1)
    job.wait_for_output("the ranks finish their step")
    job.send_signal(signal.SIGTERM)
    assert job.wait(5) == 143


def test_slurm_warning_without_handlers_requests_rerun(tmp_path):
    """As `scancel --signal=USR1` sends it: the ranks outlive it, and the launcher ends them."""
    job = Job(tmp_path, [["wait"], ["wait"]])
    for rank in job.wait_for_ranks(2):
        os.kill(rank["pid"], signal.SIGUSR1)
    time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(5) == 75
    assert "nothing was lost: run the same command later; code 75" in job.output


def test_slurm_warning_before_ranks_start_requests_rerun(tmp_path):
    job = Job(tmp_path, [["exit:0"]], "--nnodes", "2")
    time.sleep(0.3)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(5) == 75
    assert "SIGUSR1 before the ranks were started: nothing to save, code 75" in job.output


def test_ctrl_c_leaves_no_orphan_and_frees_port(tmp_path):
    """Rows A12 and A18: what a rank has started goes with it, whether the launcher leaves or is killed."""
    for signal_number, code in ((signal.SIGINT, 75), (signal.SIGKILL, -signal.SIGKILL)):
        port = find_free_port()
        folder = tmp_path / str(int(signal_number))
        job = Job(folder, [["save", "child", "wait"]], "--master-port", str(port))
        (rank,) = job.wait_for_ranks(1)
        end = time.monotonic() + 10
        while not (folder / "child").exists() or not (folder / "child").read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
        child = int((folder / "child").read_text())
        job.send_signal(signal_number)
        assert job.wait(5) == code
        end = time.monotonic() + 2
        while is_alive(rank["pid"]) and time.monotonic() < end:
            time.sleep(0.01)
        assert not is_alive(rank["pid"])
        if signal_number == signal.SIGINT:
            assert not is_alive(child)
        else:
            os.kill(child, signal.SIGKILL)  # `sleep` does not ask the kernel to die with its parent, as readers do
        socket.create_server(("127.0.0.1", port)).close()
