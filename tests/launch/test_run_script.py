"""Each variable on top of run_gpt2.sh has an effect, given in the environment or edited in place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "run_gpt2.sh"

FAKE_PYTHON = """\
#!/usr/bin/env bash
case "$*" in
  *megatron.launch.machine*) exec {python} "$@" ;;
  *set_up.py*) echo "$0" ;;
  -c*) exit 0 ;;
  *make_sample_data*) echo "made sample data" ;;
  *) printf 'said %s\\n' "$*" "threads" "WORLD_SIZE=${{WORLD_SIZE:-}}" "DS_ACCELERATOR=${{DS_ACCELERATOR:-}}" ;;
esac
"""

EFFECTS = {
    "GPUS_PER_NODE": ("2", "--nproc-per-node 2"),
    "NNODES": ("2", "--nnodes 2"),
    "NODE_RANK": ("1", "--node-rank 1"),
    "MASTER_ADDR": ("host7", "--master-addr host7"),
    "MASTER_PORT": ("12345", "--master-port 12345"),
    "pp_size": ("4", "--pipe-parallel-size 4"),
    "mp_size": ("1", "--model-parallel-size 1"),
    "NLAYERS": ("7", "--num-layers 7"),
    "NHIDDEN": ("96", "--hidden-size 96"),
    "NHEADS": ("3", "--num-attention-heads 3"),
    "SEQLEN": ("65", "--seq-length 65"),
    "BATCHSIZE": ("5", "--batch-size 5"),
    "GAS": ("9", "--gas 9"),
    "TRAIN_ITERS": ("11", "--train-iters 11"),
    "DATA_PATH": ("my/data", "--data-path my/data"),
    "TOKENIZER": ("my.json", "--tokenizer-path my.json"),
    "config_json": ("my_ds.json", "--deepspeed_config my_ds.json"),
    "CHECKPOINT_PATH": ("out/run 1", "--save out/run 1"),
}


@pytest.fixture(scope="module")
def fake_python(tmp_path_factory):
    path = tmp_path_factory.mktemp("fake") / "python"
    path.write_text(FAKE_PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    return path


def run(fake: Path, *flags: str, script: Path = SCRIPT, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in EFFECTS and not name.startswith("SLURM")}
    return subprocess.run(
        ["bash", str(script), *flags], env=clean | {"PYTHON": str(fake), "DS_ACCELERATOR": "cpu"} | env,
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_the_table_of_this_test_names_every_variable_of_the_script():
    top = SCRIPT.read_text().split("# ----")[0]
    assert set(re.findall(r"^(\w+)=\$\{\1:-", top, re.M)) == set(EFFECTS)


@pytest.fixture(scope="module")
def plain(fake_python):
    return run(fake_python).stdout


@pytest.mark.parametrize("name", EFFECTS)
def test_variable_in_the_environment_has_an_effect(fake_python, plain, name):
    value, effect = EFFECTS[name]
    extra = {"MASTER_ADDR": "host7"} if name == "NNODES" else {}
    extra |= {"NNODES": "2", "MASTER_ADDR": "host7"} if name == "NODE_RANK" else {}
    changed = run(fake_python, **extra, **{name: value})
    assert effect in changed.stdout, changed.stderr
    assert effect not in plain


def test_variables_edited_in_place_have_an_effect(fake_python, tmp_path):
    text = SCRIPT.read_text()
    for name, (value, _) in EFFECTS.items():
        text = re.sub(rf"^{name}=\S*", f"{name}='{value}'", text, flags=re.M)
    edited = tmp_path / "run_edited.sh"
    edited.write_text(text.replace('"$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh"', f"{ROOT}/tools/setup.sh"))
    done = run(fake_python, script=edited)
    assert all(effect in done.stdout for _, effect in EFFECTS.values()), done.stderr


def test_flags_of_the_user_come_last(fake_python):
    said = run(fake_python, "--train-iters", "50", "--resume").stdout
    assert re.search(r"--train-iters \d+ .*--train-iters 50 --resume$", said, re.M)


def test_sample_data_is_made_only_when_no_data_is_given(fake_python, plain):
    assert "made sample data" in plain
    assert "made sample data" not in run(fake_python, DATA_PATH="x").stdout


def test_help_and_dry_run_start_no_ranks(fake_python):
    for flag in ("--help", "--dry-run"):
        said = run(fake_python, flag).stdout
        assert "megatron.launch" not in said
        assert "made sample data" not in said
        assert flag in said
    assert "WORLD_SIZE=4" in said


def test_too_few_devices_end_with_2(fake_python):
    done = run(fake_python, DS_ACCELERATOR="", MEGATRON_NUM_GPUS="1", GPUS_PER_NODE="4")
    assert done.returncode == 2
    assert "GPUS_PER_NODE=4 and 1 GPU(s)" in done.stderr


def test_two_nodes_without_an_address_end_with_2(fake_python):
    done = run(fake_python, NNODES="2")
    assert done.returncode == 2
    assert "NNODES=2 needs MASTER_ADDR" in done.stderr


def test_a_count_of_gpus_that_is_no_number_ends_with_2(fake_python):
    done = run(fake_python, DS_ACCELERATOR="", MEGATRON_NUM_GPUS="abc")
    assert done.returncode == 2
    assert "MEGATRON_NUM_GPUS='abc'" in done.stderr and "Traceback" not in done.stderr


def test_the_launcher_refuses_more_ranks_than_gpus():
    flags = ["--nproc-per-node", "4", "--master-port", str(free_port()), str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.launch", *flags], cwd=ROOT, capture_output=True, text=True, timeout=30,
        env=os.environ | {"DS_ACCELERATOR": "", "MEGATRON_NUM_GPUS": "2"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--nproc-per-node 4 and 2 GPU(s)" in done.stderr


def test_slurm_gives_the_nodes(fake_python):
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "n[4-6]"}
    said = run(fake_python, **slurm).stdout
    assert "--nnodes 3 --node-rank 2 --master-addr n4 --master-port 20077" in said


def test_an_old_python_is_refused(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/usr/bin/env bash\n[ "$1" = --version ] && echo "Python 3.8.1"\nexit 1\n')
    old.chmod(0o755)
    done = run(old)
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed, found Python 3.8.1" in done.stderr
