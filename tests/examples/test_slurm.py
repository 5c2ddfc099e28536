"""The example for SLURM: its options parse, and it requeues the job on 75 and on nothing else."""

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
from tests.helpers.runs import SIZES, write_corpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sh"))

SRUN = """\
#!/usr/bin/env bash
echo "$@" > "$PLACE/srun"
trap 'exit {on_warning}' USR1
trap 'exit {on_term}' TERM
touch "$PLACE/started"
if [ "{code}" != wait ]; then exit {code}; fi
while :; do sleep 0.02; done
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_examples_are_bash_and_their_flags_exist(script, tmp_path):
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", text, re.M))
    assert options["ntasks-per-node"] == "1"
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    assert "requeue" in options and options["open-mode"] == "append"
    used = re.search(r"bash run_gpt2\.sh (.*?) \"\$@\"", text.replace("\\\n", " "), re.S)
    assert used is not None
    words = used.group(1).replace('"$run"', "runs/x").split()
    cut = words.index("--max-restarts")
    others = [*SIZES, "--seq-length", "32", "--data-path", str(write_corpus(tmp_path))]
    parse([*others, *words[:cut], *words[cut + 2 :]], world_size=1)
    assert parse_launch([*words[cut : cut + 2], str(script)], {"DS_ACCELERATOR": "cpu"}).max_restarts > 0


@pytest.mark.parametrize(
    ("code", "number", "state", "ends", "is_requeued"),
    [
        ("wait", signal.SIGUSR1, "RUNNING", 75, True),
        ("wait", signal.SIGTERM, "CANCELLED", 75, False),
        ("75", None, "RUNNING", 75, True),
        ("4", None, "RUNNING", 4, False),
        ("0", None, "RUNNING", 0, False),
    ],
    ids=["warned", "cancelled", "left by itself", "died", "done"],
)
def test_the_job_is_requeued_on_75_alone(code, number, state, ends, is_requeued, tmp_path):
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
    job = subprocess.Popen(["bash", str(SCRIPTS[0]), "--lr", "1e-3"], env=env, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while not (tmp_path / "started").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    if number is not None:
        job.send_signal(number)
    assert job.wait(20) == ends
    assert (tmp_path / "scontrol").exists() == is_requeued
    if is_requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 77\n"
    assert (tmp_path / "srun").read_text().endswith("--lr 1e-3\n")
