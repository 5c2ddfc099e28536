"""Runs whose hosts are killed, or whose network is cut: losses and samples are those of the undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import kill
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.launch import machine
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.elastic_jobs import ElasticNodes
from tests.helpers.launch_jobs import Job
from tests.helpers.runs import ROOT, make_flags, write_corpus

TWO_HOSTS = ROOT / "examples" / "launch" / "two_hosts.sh"
NETWORK_CUT_SCRIPT = """\
if [ "$NODE_RANK" = 0 ]; then
  ( until [ "$(grep -c '"step"' run/metrics.jsonl 2> /dev/null || echo 0)" -ge 8 ]; do sleep 0.05; done
    ip link set cable0 down; echo cut >> cut; sleep 5; ip link set cable0 up; echo joined >> cut ) &
fi
exec "$PYTHON" -m megatron.launch --nnodes 1:2 --node-list 10.77.0.1,10.77.0.2 --node-rank "$NODE_RANK" \\
  --nproc-per-node 1 --max-restarts 3 "$@" > "out-$NODE_RANK" 2>&1
"""
HELD_SAVE_SCRIPT = """\
import os, time
import pretrain_gpt2 as script
from megatron.checkpoint import folders
from megatron.training.startup import pretrain

place, commit = os.environ.get("HOLD_SAVES_IN"), folders.commit_checkpoint

def commit_when_let(temporary, target):
    if place and target.name == "step-00000008" and not os.path.exists(f"{place}/writes"):
        with open(f"{place}/writes", "w") as file:
            file.write(os.environ["MEGATRON_REGROUP_FILE"])
        while not os.path.exists(f"{place}/go"):
            time.sleep(0.01)
    commit(temporary, target)

folders.commit_checkpoint = commit_when_let
pretrain(script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
"""
"""Holds the save of step 8 when all but its last act, the rename, is done."""


@pytest.fixture
def job_in_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticNodes]:
    """A run on two nodes that is in the midst of its save of step 8."""
    kill.preload()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script, corpus = tmp_path / "held.py", write_corpus(tmp_path)
    script.write_text(HELD_SAVE_SCRIPT)
    train_flags = "--fp64 --train-iters 16 --save-interval 4 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
    preload = ("--preload", ",".join(machine.PRELOADED_MODULES))
    full_argv = make_flags(corpus, tmp_path / "whole", f"{train_flags} --gas 4")
    assert Job(tmp_path / "alone", [[]], *preload, script=script, arguments=full_argv).wait(100) == 0
    monkeypatch.setenv("HOLD_SAVES_IN", str(tmp_path))
    argv = make_flags(corpus, tmp_path / "run", f"{train_flags} --gas 2 --resume --load-if-exists")
    timeout_flags = ("--node-timeout", "3", "--init-timeout", "4")
    job = ElasticNodes(tmp_path / "job", "1:2", *timeout_flags, *preload, script=script, arguments=argv)
    try:
        job.wait_until((tmp_path / "writes").exists, "the save of step 8", 60)
        assert kill.save_activity(tmp_path / "run") == "being written"
        yield job
    finally:
        job.kill()


def check_run(root: Path, resume_steps: list[int]) -> None:
    """Compare the run with that of one process, and see that it began behind these steps and left nothing behind."""
    run = root / "run"
    actual, expected = (
        [
            (record["step"], record["loss"], record["grad_norm"])
            for record in read_metrics(folder / "metrics.jsonl")
            if record["kind"] == "train"
        ]
        for folder in (run, root / "whole")
    )
    assert [step for step, *_ in actual] == list(range(1, 17))
    for (step, loss, norm), (_, expected_loss, expected_norm) in zip(actual, expected, strict=True):
        assert abs(loss - expected_loss) < 1e-12 and abs(norm - expected_norm) < 1e-12, f"step {step}"
    assert [*kill.broken_checkpoints(run), *kill.leftover_files(run, 0, has_saved=True)] == []
    output = "".join(path.read_text() for path in (root / "job").glob("node*/output"))
    assert [f"resuming after step {step}\n" in output for step in resume_steps] == [True] * len(resume_steps)
    assert output.count("resuming after step") == len(resume_steps)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_host_returning_during_save_joins_after_next_save(job_in_save: ElasticNodes) -> None:
    """The host is lost ahead of that save: the job is alone in it, and neither stops in it nor behind it."""
    root = job_in_save.folder.parent
    job_in_save.kill_nodes(1)
    job_in_save.wait_until(lambda: "(restart 1 of 99)" in job_in_save.jobs[0].output, "the next start")
    (root / "writes").unlink()  # the save that was held is gone with its start; the next start comes to it again
    job_in_save.wait_until((root / "writes").exists, "the save of step 8", 60)
    job_in_save.start(1)
    job_in_save.jobs[1].wait_for_output(
        "node 0 is the leader; this node joins with the next start, after the next save"
    )
    assert not (root / "run" / CHECKPOINTS / "step-00000008").exists()
    job_in_save.wait_until(
        Path((root / "writes").read_text()).exists, "the launcher's word to its rank that a node waits"
    )
    (root / "go").touch()  # the four steps to the next save take less time than that word
    assert job_in_save.wait(60) == {0: 0, 1: 0}
    assert "stopped after step 12 of 16: a node has joined" in job_in_save.jobs[0].output
    check_run(root, [4, 12])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("lost_nodes", [(0,), (0, 1)], ids=["rank 0's", "both"])
def test_hosts_lost_during_save_leave_no_partial_files(lost_nodes: tuple[int, ...], job_in_save: ElasticNodes) -> None:
    """The checkpoint of the save before is loaded; of both hosts when they have come back, as a job of its own."""
    root = job_in_save.folder.parent
    job_in_save.kill_nodes(*lost_nodes)
    (root / "go").touch()
    if len(lost_nodes) == 2:
        for node in lost_nodes:
            job_in_save.start(node)
    assert set(job_in_save.wait(60).values()) == {0}
    check_run(root, [4])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_second_network_cut_loses_no_node(tmp_path: Path) -> None:
    """The two hosts of examples/launch/two_hosts.sh, whose cable is pulled and put back."""
    script = tmp_path / "node.sh"
    script.write_text(NETWORK_CUT_SCRIPT)
    argv = make_flags(write_corpus(tmp_path), tmp_path / "run", "--train-iters 60 --eval-iters 0 --save-interval 10")
    preload = ["--preload", ",".join(machine.PRELOADED_MODULES)]
    command = ["bash", str(TWO_HOSTS), "bash", str(script), *preload, str(ROOT / "pretrain_gpt2.py"), *argv]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    if result.returncode == 77:
        pytest.skip("this machine makes no network namespaces")
    output = "".join((tmp_path / f"out-{node}").read_text() for node in (0, 1))
    assert result.returncode == 0, result.stderr + output
    assert (tmp_path / "cut").read_text().split() == ["cut", "joined"], "the run was longer than the cut"
    assert "lost" not in output and "start 1" not in output
    steps = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 61))
