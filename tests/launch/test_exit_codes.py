"""The job's exit code is the culprit's, and the culprit is named."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest

from tests.helpers.launch_jobs import Job, free_port, is_alive


@pytest.mark.parametrize(
    ("status", "code"), [("exit:2", 2), ("exit:3", 3), ("exit:5", 5), ("exit:75", 75), ("raise", 1), ("exit:9", 1)]
)
def test_job_ends_with_the_code_of_the_rank_that_failed(tmp_path, status, code):
    job = Job(tmp_path, [["exit:75"], [status]] if code == 75 else [["leave", "wait"], [status]])
    assert job.wait() == code
    if code not in (75,):
        assert "launch: ended by rank 1" in job.output
    assert job.output.count("Traceback") == (1 if status == "raise" else 0)


def test_a_users_mistake_that_rank_0_has_told_is_not_told_again_by_the_launcher(tmp_path):
    job = Job(tmp_path, [["exit:2"], ["exit:2"]])
    assert job.wait() == 2
    assert job.output == ""


def test_all_ranks_with_0_is_success_even_if_one_takes_longer(tmp_path):
    job = Job(tmp_path, [["sleep:0.5", "exit:0"], ["exit:0"]])
    assert job.wait() == 0
    assert "launch:" not in job.output


def test_a_rank_that_leaves_early_with_0_fails_the_job(tmp_path):
    job = Job(tmp_path, [["leave", "wait"], ["exit:0"]], "--exit-grace", "0.3")
    assert job.wait() == 4
    assert "rank 1" in job.output
    assert "exited early with code 0" in job.output


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_that_all_leave_with_0_before_their_run_is_done_fail_the_job(tmp_path, num_ranks):
    plan = ["at:step 3, forward of micro-batch 1", "run", "sleep:0.1", "quit"]
    job = Job(tmp_path, [plan, ["run", "sleep:0.3", "quit"]][:num_ranks])
    pid = job.ranks(num_ranks)[0]["pid"]
    assert job.wait() == 4
    message = f"ended by rank 0 (stage 0, tensor 0, data 0; pid {pid}), which exited early with code 0 before its run"
    assert f"launch: {message} was complete, at step 3, forward of micro-batch 1; the job ends with" in job.output


def test_ranks_whose_run_is_done_may_leave_with_0(tmp_path):
    job = Job(tmp_path, [["run", "done", "sleep:0.2", "quit"], ["run", "done", "exit:0"]])
    assert job.wait() == 0
    assert "launch:" not in job.output


def test_a_wall_clock_that_is_set_ahead_ends_nothing(tmp_path, monkeypatch):
    now = itertools.count(time.time(), 1000)
    monkeypatch.setattr(time, "time", lambda: next(now))
    job = Job(tmp_path, [["sleep:0.4", "exit:0"], ["exit:0"]])
    assert job.wait() == 0


def test_a_peer_that_notices_an_early_leaver_is_not_the_culprit(tmp_path):
    job = Job(tmp_path, [["sleep:0.3", "exit:4"], ["exit:0"]])
    assert job.wait() == 4
    assert "ended by rank 1" in job.output


def test_lost_peers_do_not_hide_the_rank_that_caused_it(tmp_path):
    job = Job(tmp_path, [["exit:4"], ["exit:4"], ["sleep:0.25", "exit:5"]])
    assert job.wait() == 5
    assert "ended by rank 2" in job.output


def test_killed_rank_ends_the_others_within_a_second_and_is_named(tmp_path):
    job = Job(tmp_path, [["leave", "wait"], ["stubborn", "wait"], ["sleep:0.2", "kill"]])
    ranks = job.ranks(3)
    assert job.wait(5) == 4
    pid = ranks[2]["pid"]
    assert f"rank 0 leaves: a peer died: rank 2 (pid {pid}) by SIGKILL" in job.output
    assert f"launch: ended by rank 2 (pid {pid}) by SIGKILL (possibly the OOM killer" in job.output
    assert "; the job ends with code 4" in job.output
    assert not any(is_alive(rank["pid"]) for rank in ranks)


def test_ranks_get_the_variables_that_torch_expects(tmp_path):
    job = Job(tmp_path, [["exit:0"], ["exit:0"]])
    assert job.wait() == 0
    first, second = (rank["env"] for rank in job.ranks(2))
    assert [first["RANK"], second["RANK"]] == ["0", "1"]
    assert second["LOCAL_RANK"] == "1"
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["GROUP_RANK"] == "0"
    assert int(first["OMP_NUM_THREADS"]) >= 1
    assert first["MEGATRON_RUN_ID"] == second["MEGATRON_RUN_ID"] != ""


def test_forked_ranks_form_a_process_group_over_the_launchers_store(tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "open(f'{__file__}.{dist.get_rank()}', 'w').write(str(total.item()))\n"
        "dist.destroy_process_group()\n"
    )
    job = Job(tmp_path, [[], []], "--preload", "torch", script=script)
    assert job.wait(30) == 0, job.output
    assert [(tmp_path / f"reduce.py.{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]


@pytest.mark.slow
def test_a_forked_rank_collects_no_garbage_among_what_the_launcher_imported(tmp_path):
    """In a Python of its own: what the test run forks has it frozen anyway."""
    script = tmp_path / "frozen.py"
    script.write_text("import gc\nprint(gc.get_freeze_count(), gc.isenabled())\n")
    launch = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "1", "--master-port", str(free_port())]
    done = subprocess.run([*launch, "--preload", "json.tool", str(script)], capture_output=True, text=True, timeout=60)
    frozen, is_on = done.stdout.split()
    assert int(frozen) > 10_000 and is_on == "True"
