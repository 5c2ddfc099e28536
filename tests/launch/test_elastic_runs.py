"""Runs whose hosts are killed, or whose network is cut: losses and samples are those of the undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kill, kill_elastic
from megatron.launch import machine
from megatron.training.callbacks.metrics_writer import read_metrics
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_lost_hosts_cost_nothing_but_time(tmp_path: Path) -> None:
    kill.preload()
    runs, summary = kill_elastic.kill_all(10, seed=3, steps=24, folder=tmp_path)
    assert summary["hosts_lost"] >= 10
    assert [problem for run in runs for problem in run.problems] == []


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
