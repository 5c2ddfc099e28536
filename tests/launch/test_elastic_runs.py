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
from tests.helpers.elastic_jobs import Nodes
from tests.helpers.launch_jobs import Job
from tests.helpers.runs import ROOT, flags, write_corpus

TWO_HOSTS = ROOT / "examples" / "launch" / "two_hosts.sh"
CUT = """\
if [ "$NODE_RANK" = 0 ]; then
  ( until [ "$(grep -c '"step"' run/metrics.jsonl 2> /dev/null || echo 0)" -ge 8 ]; do sleep 0.05; done
    ip link set cable0 down; echo cut >> cut; sleep 5; ip link set cable0 up; echo joined >> cut ) &
fi
exec "$PYTHON" -m megatron.launch --nnodes 1:2 --node-list 10.77.0.1,10.77.0.2 --node-rank "$NODE_RANK" \\
  --nproc-per-node 1 --max-restarts 3 "$@" > "out-$NODE_RANK" 2>&1
"""
SAVES_WHEN_LET = """\
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
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """A run on two nodes that is in the midst of its save of step 8."""
    kill.preload()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script, corpus = tmp_path / "held.py", write_corpus(tmp_path)
    script.write_text(SAVES_WHEN_LET)
    fixed = "--fp64 --train-iters 16 --save-interval 4 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
    preload = ("--preload", ",".join(machine.PRELOADED))
    whole = flags(corpus, tmp_path / "whole", f"{fixed} --gas 4")
    assert Job(tmp_path / "alone", [[]], *preload, script=script, arguments=whole).wait(100) == 0
    monkeypatch.setenv("HOLD_SAVES_IN", str(tmp_path))
    argv = flags(corpus, tmp_path / "run", f"{fixed} --gas 2 --resume --load-if-exists")
    waits = ("--node-timeout", "3", "--init-timeout", "4")
    job = Nodes(tmp_path / "job", "1:2", *waits, *preload, script=script, arguments=argv)
    try:
        job.until((tmp_path / "writes").exists, "the save of step 8", 60)
        assert kill.saving_now(tmp_path / "run") == "being written"
        yield job
    finally:
        job.kill()


def check(place: Path, begins: list[int]) -> None:
    """Compare the run with that of one process, and see that it began behind these steps and left nothing behind."""
    run = place / "run"
    found, wanted = (
        [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
        for folder in (run, place / "whole")
    )
    assert [step for step, *_ in found] == list(range(1, 17))
    for (step, loss, norm), (_, whole_loss, whole_norm) in zip(found, wanted, strict=True):
        assert abs(loss - whole_loss) < 1e-12 and abs(norm - whole_norm) < 1e-12, f"step {step}"
    assert [*kill.broken(run), *kill.left_over(run, 0, has_saved=True)] == []
    said = "".join(path.read_text() for path in (place / "job").glob("node*/output"))
    assert [f"resuming after step {step}\n" in said for step in begins] == [True] * len(begins)
    assert said.count("resuming after step") == len(begins)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_host_that_comes_back_in_the_midst_of_a_save_is_taken_in_with_the_next_one(held: Nodes) -> None:
    """The host is lost ahead of that save: the job is alone in it, and neither stops in it nor behind it."""
    place = held.place.parent
    held.lose(1)
    held.until(lambda: "(restart 1 of 99)" in held.jobs[0].output, "the next start")
    (place / "writes").unlink()  # the save that was held is gone with its start; the next start comes to it again
    held.until((place / "writes").exists, "the save of step 8", 60)
    held.start(1)
    held.jobs[1].until("node 0 is the leader; this node joins with the next start, after the next save")
    assert not (place / "run" / CHECKPOINTS / "step-00000008").exists()
    held.until(Path((place / "writes").read_text()).exists, "the launcher's word to its rank that a node waits")
    (place / "go").touch()  # the four steps to the next save take less time than that word
    assert held.wait(60) == {0: 0, 1: 0}
    assert "stopped after step 12 of 16: a node has joined" in held.jobs[0].output
    check(place, [4, 12])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("lost", [(0,), (0, 1)], ids=["rank 0's", "both"])
def test_hosts_that_are_lost_in_the_midst_of_a_save_leave_nothing_half_written(
    lost: tuple[int, ...], held: Nodes
) -> None:
    """The checkpoint of the save before is loaded; of both hosts when they have come back, as a job of its own."""
    place = held.place.parent
    held.lose(*lost)
    (place / "go").touch()
    if len(lost) == 2:
        for node in lost:
            held.start(node)
    assert set(held.wait(60).values()) == {0}
    check(place, [4])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_network_that_is_cut_for_five_seconds_loses_no_node(tmp_path: Path) -> None:
    """The two hosts of examples/launch/two_hosts.sh, whose cable is pulled and put back."""
    script = tmp_path / "node.sh"
    script.write_text(CUT)
    argv = flags(write_corpus(tmp_path), tmp_path / "run", "--train-iters 60 --eval-iters 0 --save-interval 10")
    preload = ["--preload", ",".join(machine.PRELOADED)]
    command = ["bash", str(TWO_HOSTS), "bash", str(script), *preload, str(ROOT / "pretrain_gpt2.py"), *argv]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    if done.returncode == 77:
        pytest.skip("this machine makes no network namespaces")
    said = "".join((tmp_path / f"out-{node}").read_text() for node in (0, 1))
    assert done.returncode == 0, done.stderr + said
    assert (tmp_path / "cut").read_text().split() == ["cut", "joined"], "the run was longer than the cut"
    assert "lost" not in said and "start 1" not in said
    steps = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 61))
