"""The job's exit code is the culprit's, and the culprit is named."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time

import pytest

from tests.helpers.launch_jobs import Job, find_free_port, is_alive


@pytest.mark.parametrize(
    ("status", "code"), [("exit:2", 2), ("exit:3", 3), ("exit:5", 5), ("exit:75", 75), ("raise", 1), ("exit:9", 1)]
)
def test_job_exits_with_code_of_failed_rank(tmp_path, status, code):
    job = Job(tmp_path, [["exit:75"], [status]] if code == 75 else [["leave", "wait"], [status]])
    assert job.wait() == code
    if code not in (75,):
        assert "launch: ended by rank 1" in job.output
    assert job.output.count("Traceback") == (1 if status == "raise" else 0)


def test_config_error_is_reported_once(tmp_path):
    job = Job(tmp_path, [["exit:2"], ["exit:2"]])
    assert job.wait() == 2
    assert job.output == ""


def test_all_ranks_exiting_0_succeed(tmp_path):
    job = Job(tmp_path, [["sleep:0.5", "exit:0"], ["exit:0"]])
    assert job.wait() == 0
    assert "launch:" not in job.output


def test_early_exit_0_of_one_rank_fails_job(tmp_path):
    job = Job(tmp_path, [["leave", "wait"], ["exit:0"]], "--exit-grace", "0.3")
    assert job.wait() == 4
    assert "rank 1" in job.output
    assert "exited early with code 0" in job.output


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_early_exit_0_of_all_ranks_fails_job(tmp_path, num_ranks):
    plan = ["at:step 3, forward of micro-batch 1", "run", "sleep:0.1", "quit"]
    job = Job(tmp_path, [plan, ["run", "sleep:0.3", "quit"]][:num_ranks])
    pid = job.wait_for_ranks(num_ranks)[0]["pid"]
    assert job.wait() == 4
    message = f"ended by rank 0 (stage 0, tensor 0, data 0; pid {pid}), which exited early with code 0 before its run"
    assert f"launch: {message} was complete, at step 3, forward of micro-batch 1; the job ends with" in job.output


def test_completed_ranks_may_exit_0(tmp_path):
    job = Job(tmp_path, [["run", "done", "sleep:0.2", "quit"], ["run", "done", "exit:0"]])
    assert job.wait() == 0
    assert "launch:" not in job.output


def test_wall_clock_jump_does_not_end_job(tmp_path, monkeypatch):
    now = itertools.count(time.time(), 1000)
    monkeypatch.setattr(time, "time", lambda: next(now))
    job = Job(tmp_path, [["sleep:0.4", "exit:0"], ["exit:0"]])
    assert job.wait() == 0


def test_peer_error_after_early_exit_is_not_culprit(tmp_path):
    job = Job(tmp_path, [["sleep:0.3", "exit:4"], ["exit:0"]])
    assert job.wait() == 4
    assert "ended by rank 1" in job.output


def test_peer_errors_do_not_hide_root_cause(tmp_path):
    job = Job(tmp_path, [["exit:4"], ["exit:4"], ["sleep:0.25", "exit:5"]])
    assert job.wait() == 5
    assert "ended by rank 2" in job.output


def test_killed_rank_is_named_and_ends_other_ranks(tmp_path):
    job = Job(tmp_path, [["leave", "wait"], ["stubborn", "wait"], ["sleep:0.2", "kill"]])
    ranks = job.wait_for_ranks(3)
    assert job.wait(5) == 4
    pid = ranks[2]["pid"]
    assert f"rank 0 leaves: a peer died: rank 2 (pid {pid}) by SIGKILL" in job.output
    ended = rf"launch: ended by rank 2 \(pid {pid}\) by SIGKILL \("
    assert re.search(rf"{ended}(possibly|probably not) the OOM killer", job.output)
    assert "; the job ends with code 4" in job.output
    assert not any(is_alive(rank["pid"]) for rank in ranks)


def test_ranks_get_torch_distributed_variables(tmp_path):
    job = Job(tmp_path, [["exit:0"], ["exit:0"]])
    assert job.wait() == 0
    first, second = (rank["env"] for rank in job.wait_for_ranks(2))
    assert [first["RANK"], second["RANK"]] == ["0", "1"]
    assert second["LOCAL_RANK"] == "1"
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["GROUP_RANK"] == "0"
    assert int(first["OMP_NUM_THREADS"]) >= 1
    assert first["MEGATRON_RUN_ID"] == second["MEGATRON_RUN_ID"] != ""


def test_forked_ranks_form_process_group(tmp_path):
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
def test_forked_rank_freezes_gc_of_launcher_imports(tmp_path):
    """In a Python of its own: what the test run forks has it frozen anyway."""
    script = tmp_path / "frozen.py"
    script.write_text("import gc\nprint(gc.get_freeze_count(), gc.isenabled())\n")
    launch = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "1", "--master-port", str(find_free_port())]
    result = subprocess.run(
        [*launch, "--preload", "json.tool", str(script)], capture_output=True, text=True, timeout=60
    )
    frozen, is_on = result.stdout.split()
    assert int(frozen) > 10_000 and is_on == "True"
