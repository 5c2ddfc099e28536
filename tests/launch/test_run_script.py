"""Each variable on top of run_gpt2.sh has an effect, given in the environment or edited in place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError
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
  *) printf 'said %s\\n' "$*" "threads" "WORLD_SIZE=${{WORLD_SIZE:-}}" "DS_ACCELERATOR=${{DS_ACCELERATOR:-}}"
     printf '%s' "${{MEGATRON_DEFAULTS:-}}" > "$0.defaults"; printf '%s' "${{MEGATRON_VARIABLES:-}}" > "$0.variables" ;;
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
        text = re.sub(rf"^{name}=\S*", f"{name}='{value}'", text, flags=re.M)  # as a user may write it
    edited = tmp_path / "run_edited.sh"
    edited.write_text(text.replace('"$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh"', f"{ROOT}/tools/setup.sh"))
    done = run(fake_python, script=edited)
    assert all(effect in done.stdout for _, effect in EFFECTS.values()), done.stderr


def test_flags_of_the_user_come_last(fake_python):
    said = run(fake_python, "--train-iters", "50", "--resume", TRAIN_ITERS="7").stdout
    assert re.search(r"--train-iters 7 --train-iters 50 --resume$", said, re.M)


def parsed(fake: Path, *flags: str, **variables: str) -> Config:
    """Return what the flags and defaults that the script passes on become."""
    done = run(fake, *flags, "--dry-run", **variables)
    words = done.stdout.splitlines()[0].partition("pretrain_gpt2.py")[2].split()
    files = {"MEGATRON_DEFAULTS": "defaults", "MEGATRON_VARIABLES": "variables"}
    env = {name: Path(f"{fake}.{kind}").read_text() for name, kind in files.items()}
    return parse(words, world_size=4, env=env)


def test_a_variable_that_is_not_set_is_no_flag_but_the_default_that_its_comment_names(fake_python, plain):
    assert re.search(r"pretrain_gpt2\.py$", plain, re.M)
    config = parsed(fake_python)
    assert config.given == ("dry_run",)
    args = vars(config.namespace())
    told = dict(re.findall(r"^(\w+)=\$\{\1:-\} +# (\d+)\b(?!\.)", SCRIPT.read_text(), re.M))
    fields = {name: effect.split()[0].lstrip("-").replace("-", "_") for name, (_, effect) in EFFECTS.items()}
    checked = {name: (str(args[fields[name]]), value) for name, value in told.items() if fields[name] in args}
    assert len(checked) == 7
    assert all(got == value for got, value in checked.values()), checked
    assert (config.parallel.pipe_parallel_size, config.optimizer.lr, config.model.hidden_bias) == (2, 3e-3, True)


def test_a_json_with_numbers_and_a_global_batch_replace_the_defaults_of_the_script(fake_python, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 12, "gradient_accumulation_steps": 3, "optimizer": {"params": {"lr": 0.1}}}')
    config = parsed(fake_python, config_json=str(path))
    assert (config.batch.batch_size, config.batch.gas, config.optimizer.lr) == (4, 3, 0.1)
    assert parsed(fake_python, "--global-batch-size", "64").batch.gas == 8
    with pytest.raises(ConfigError, match=r"--batch-size 5.* \(in the run script: .*--batch-size is BATCHSIZE"):
        parsed(fake_python, BATCHSIZE="5", config_json=str(path))


def test_defaults_of_the_environment_are_added_to_those_of_the_script(fake_python):
    assert parsed(fake_python, MEGATRON_DEFAULTS="--lr 0.5").optimizer.lr == 0.5


def test_a_data_path_given_as_a_flag_needs_no_sample(fake_python):
    assert "made sample data" not in run(fake_python, "--data-path", "x").stdout
    assert "sample" not in Path(f"{fake_python}.defaults").read_text()


def test_a_dry_run_before_the_sample_is_made_counts_with_its_vocabulary(tmp_path):
    """In a tree without data, whose path needs quotes."""
    tree = tmp_path / "it's a tree"
    (tree / "tools").mkdir(parents=True)
    for name in ("tools/setup.sh", "tools/set_up.py", "run_gpt2.sh"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("megatron", "tds", "pretrain_gpt2.py", "ds_config_gpt2.json", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    done = run(Path(sys.executable), "--dry-run", script=tree / "run_gpt2.sh")
    assert done.returncode == 0, done.stderr
    assert "the sample data are not made yet" in done.stderr
    assert "vocabulary 8192" in done.stdout
    assert not (tree / "data").exists()


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
