"""The examples for SLURM: their options parse, a job is queued again on 75 alone, an elastic run is one for each host.

tests/launch/local_slurm.sh runs them under a real SLURM.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.launch.options import parse as parse_launch
from tests.helpers.runs import BASE_FLAGS, write_corpus

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "slurm" / "gpt2.sh"
ELASTIC = JOB.with_name("elastic.sh")

SRUN = """\
#!/usr/bin/env bash
echo "$SRUN_CPUS_PER_TASK $@" > "$PLACE/srun"
trap 'exit {on_warning}' USR1
trap 'exit {on_term}' TERM
touch "$PLACE/started"
if [ "{code}" != wait ]; then exit {code}; fi
while :; do sleep 0.02; done
"""


def test_job_options_and_flags_parse(tmp_path):
    text = JOB.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", text, re.M))
    assert options["ntasks-per-node"] == "1"
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    assert "requeue" in options and options["open-mode"] == "append"
    match = re.search(r"bash run_gpt2\.sh (.*?) \"\$@\"", text.replace("\\\n", " "), re.S)
    assert match is not None
    args = match.group(1).replace('"$run"', "runs/x").split()
    launcher_start = args.index("--max-restarts")
    base_flags = [*BASE_FLAGS, "--seq-length", "32", "--data-path", str(write_corpus(tmp_path))]
    parse([*base_flags, *args[:launcher_start], *args[launcher_start + 2 :]], world_size=1)
    assert (
        parse_launch([*args[launcher_start : launcher_start + 2], str(JOB)], {"DS_ACCELERATOR": "cpu"}).max_restarts > 0
    )


@pytest.mark.parametrize(
    ("code", "signum", "state", "exit_code", "is_requeued"),
    [
        ("wait", signal.SIGUSR1, "RUNNING", 75, True),
        ("wait", signal.SIGTERM, "CANCELLED", 75, False),
        ("75", None, "RUNNING", 75, True),
        ("4", None, "RUNNING", 4, False),
        ("0", None, "RUNNING", 0, False),
    ],
    ids=["warned", "cancelled", "left by itself", "died", "done"],
)
def test_job_is_requeued_only_on_exit_code_75(code, signum, state, exit_code, is_requeued, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "srun": SRUN.format(code=code, on_warning=75, on_term=75),
        "squeue": f"#!/usr/bin/env bash\necho {state}\n",
        "scontrol": '#!/usr/bin/env bash\necho "$@" > "$PLACE/scontrol"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "PLACE": str(tmp_path)}
    env["SLURM_CPUS_PER_TASK"] = "32"
    job = subprocess.Popen(["bash", str(JOB), "--lr", "1e-3"], env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if signum is not None:
        job.send_signal(signum)
    assert job.wait(20) == exit_code
    assert (tmp_path / "scontrol").exists() == is_requeued
    if is_requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 77\n"
    args = (tmp_path / "srun").read_text()
    assert args.startswith("32 --kill-on-bad-exit=0 bash run_gpt2.sh") and args.endswith("--lr 1e-3\n")


SBATCH = """\
#!/usr/bin/env bash
[ "$LOST" != "$NODE_RANK" ] || exit 1
echo "$@" >> "$PLACE/jobs"
echo "NNODES=$NNODES NODE_RANK=$NODE_RANK NODE_LIST=$NODE_LIST PORT=$MASTER_PORT RUN=$RUN_FOLDER" >> "$PLACE/jobs"
"""


def submit_elastic(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run elastic.sh, whose jobs are noted in ``tmp_path`` / "jobs"."""
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$3" > "$PLACE/hosts"; printf "n4\\nn5\\nn9\\n"\n')
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ELASTIC), "--lr", "1e-3"], capture_output=True, text=True, timeout=20,
        env={**os.environ, "PATH": path, "PLACE": str(tmp_path), "LOST": "", **env},
    )  # fmt: skip


def test_elastic_run_submits_one_job_per_host(tmp_path):
    result = submit_elastic(
        tmp_path, HOSTS="n[4-5],n9", MIN_NODES="2", SBATCH_FLAGS="--gpus-per-node=4 --partition=long"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "hosts").read_text() == "n[4-5],n9\n"
    lines = (tmp_path / "jobs").read_text().splitlines()
    jobs, variables = lines[::2], lines[1::2]
    folder = variables[0].rpartition("=")[2]
    assert folder.startswith("runs/gpt2-elastic-20")
    for rank, host in enumerate(("n4", "n5", "n9")):
        assert variables[rank] == f"NNODES=2:3 NODE_RANK={rank} NODE_LIST=n4,n5,n9 PORT=29500 RUN={folder}"
        head, script, flags = jobs[rank].partition(" examples/slurm/gpt2.sh ")
        assert (
            script and f"--nodes=1 --nodelist={host} " in head and head.endswith("--gpus-per-node=4 --partition=long")
        )
        launcher_flags, _, remaining = flags.partition(" --lr ")
        assert remaining == "1e-3"
        nodes = ["--nnodes", "2:3", "--node-list", "n4,n5,n9", "--node-rank", str(rank)]
        assert parse_launch([*launcher_flags.split(), *nodes, str(JOB)], {"DS_ACCELERATOR": "cpu"}).is_elastic


@pytest.mark.parametrize(
    ("env", "code", "message"),
    [
        ({"MIN_NODES": "2", "HOSTS": ""}, 1, "HOSTS: must name the hosts, as in HOSTS=node[0-7]"),
        ({"MIN_NODES": "", "HOSTS": "n4"}, 1, "MIN_NODES: must be the fewest hosts that train"),
        ({"MIN_NODES": "4", "HOSTS": "n4"}, 2, "MIN_NODES must be 1 to 3, the number of hosts, got 4"),
        ({"MIN_NODES": "two", "HOSTS": "n4"}, 2, "MIN_NODES must be 1 to 3, the number of hosts, got two"),
        (
            {"MIN_NODES": "2", "HOSTS": "n4", "LOST": "1"},
            1,
            "refused the job of host n5; `scancel --name=gpt2-elastic` ends",
        ),
    ],
    ids=["no hosts", "no fewest", "too many", "no number", "refused by sbatch"],
)
def test_invalid_elastic_settings_are_rejected(env, code, message, tmp_path):
    result = submit_elastic(tmp_path, **env)
    assert result.returncode == code and message in result.stderr
    assert (tmp_path / "jobs").exists() == ("LOST" in env)
