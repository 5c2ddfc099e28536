"""What the launcher says of a rank that died: where it was, what crashed, and whether memory ran out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.launch import attempt
from tests.helpers.launch_jobs import Job


def test_killed_rank_is_reported_with_stage_and_operation(tmp_path):
    """Row A02."""
    job = Job(tmp_path, [["leave", "wait"], ["at:step 7, forward of micro-batch 3", "kill"]])
    pid = job.wait_for_ranks(2)[1]["pid"]
    assert job.wait(5) == 4
    message = f"rank 1 (stage 1, tensor 0, data 0; pid {pid}) by SIGKILL, at step 7, forward of micro-batch 3"
    assert f"rank 0 leaves: a peer died: {message}\n" in job.output
    ended = re.escape(f"launch: ended by {message} (")
    assert re.search(rf"{ended}(possibly|probably not) the OOM killer", job.output)


def test_native_crash_trace_names_rank(tmp_path):
    """Row A17."""
    job = Job(tmp_path, [["leave", "wait"], ["segv"]])
    assert job.wait(5) == 4
    assert "rank 1: Fatal Python error: Segmentation fault" in job.output
    assert "rank 1:   File " in job.output and "script.py" in job.output
    assert "by SIGSEGV; the job ends with code 4" in job.output


def test_terminated_ranks_show_no_oom_hint(tmp_path):
    job = Job(tmp_path, [["stubborn", "wait"], ["exit:5"]])
    assert job.wait(5) == 5
    assert "OOM" not in job.output


def write_kernel_files(root: Path, cgroup: str, files: dict[str, int]) -> Path:
    """Make what the kernel shows of memory below ``root``."""
    for name, count in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/job/7\n", "sys/fs/cgroup/job/7/memory.events"),
        ("4:cpu,memory:/slurm/7\n0::/\n", "sys/fs/cgroup/memory/slurm/7/memory.oom_control"),
    ],
)
def test_oom_counts_are_read_from_cgroup_v1_and_v2(cgroup, file, tmp_path):
    before = attempt.count_oom_kills(write_kernel_files(tmp_path, cgroup, {file: 1, "proc/vmstat": 4}))
    assert before == {"this job's memory cgroup": 1, "this machine": 4}
    after = attempt.count_oom_kills(write_kernel_files(tmp_path, cgroup, {file: 2, "proc/vmstat": 5}))
    message = attempt.explain_kill(before, after)
    assert (
        "this job's memory cgroup: 1 to 2" in message
        and "this machine: 4 to 5" in message
        and "lower --batch-size" in message
    )
    assert "whose count has not risen" in attempt.explain_kill(before, before)


def test_unreadable_oom_counts_fall_back_to_guess(tmp_path):
    assert attempt.count_oom_kills(tmp_path) == {}
    assert attempt.explain_kill({}, {}) == "possibly the OOM killer, whose counts cannot be read"
