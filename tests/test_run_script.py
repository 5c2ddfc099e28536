"""Each variable on top of run_gpt2.sh and run_t5.sh has an effect, given in the environment or edited in place."""

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
from megatron.models.registry import FAMILIES
from tests.helpers.huggingface_models import make_family_config, save_model
from tests.helpers.launch_jobs import find_free_port
from tests.helpers.token_data import write_documents
from tools import make_sample_data

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("gpt2", "t5")

FAKE_PYTHON = """\
#!/usr/bin/env bash
case "$*" in
  *megatron.launch.machine* | *megatron.checkpoint.run_data*) exec {python} "$@" ;;
  *set_up.py*) echo "$0" ;;
  -c*) exit 0 ;;
  *make_sample_data*) echo "made sample data" ;;
  *) printf 'said %s\\n' "$*" "threads" "WORLD_SIZE=${{WORLD_SIZE:-}}" "DS_ACCELERATOR=${{DS_ACCELERATOR:-}}"
     printf '%s' "${{MEGATRON_DEFAULTS:-}}" > "$0.defaults"; printf '%s' "${{MEGATRON_VARIABLES:-}}" > "$0.variables" ;;
esac
"""

COMMON_EFFECTS = {
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
    "BATCHSIZE": ("5", "--batch-size 5"),
    "GAS": ("9", "--gas 9"),
    "TRAIN_ITERS": ("11", "--train-iters 11"),
    "DATA_PATH": ("my/data", "--data-path my/data"),
    "TOKENIZER": ("my.json", "--tokenizer-path my.json"),
    "config_json": ("my_ds.json", "--deepspeed_config my_ds.json"),
    "CHECKPOINT_PATH": ("out/run 1", "--save out/run 1"),
}
EFFECTS = {
    "gpt2": COMMON_EFFECTS | {"SEQLEN": ("65", "--seq-length 65"), "cp_size": ("1", "--context-parallel-size 1")},
    "t5": COMMON_EFFECTS | {"ENC_SEQLEN": ("65", "--enc-seq-length 65"), "DEC_SEQLEN": ("33", "--dec-seq-length 33")},
}
ALL_VARIABLES = {name for effects in EFFECTS.values() for name in effects}

every_model = pytest.mark.parametrize("model", MODELS)


def find_script(model: str) -> Path:
    return ROOT / f"run_{model}.sh"


@pytest.fixture(scope="module")
def fake_python(tmp_path_factory):
    path = tmp_path_factory.mktemp("fake") / "python"
    path.write_text(FAKE_PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    return path


def run_script(
    python: Path, *flags: str, model: str = "gpt2", script: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if name not in ALL_VARIABLES and not name.startswith("SLURM")
    }
    return subprocess.run(
        ["bash", str(script or find_script(model)), *flags],
        env=clean | {"PYTHON": str(python), "DS_ACCELERATOR": "cpu"} | env,
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


@every_model
def test_effects_table_names_every_script_variable(model):
    top = find_script(model).read_text().split("# ----")[0]
    assert set(re.findall(r"^(\w+)=\$\{\1:-", top, re.M)) == set(EFFECTS[model])


def test_run_scripts_differ_only_in_lengths_and_recipe():
    """What both need is in tools/run.sh, once."""
    texts = [find_script(model).read_text() for model in MODELS]
    lines = [text.split("# ----")[0].splitlines() for text in texts]
    names = [[line.partition("=")[0] for line in script_lines if re.match(r"\w+=", line)] for script_lines in lines]
    assert [name for name in names[0] if name not in ("SEQLEN", "cp_size")] == [
        name for name in names[1] if "_SEQLEN" not in name
    ]
    assert all(len(text.split("# ----")[1].splitlines()) < 14 for text in texts)


@pytest.fixture(scope="module")
def default_outputs(fake_python):
    return {model: run_script(fake_python, model=model).stdout for model in MODELS}


@every_model
def test_environment_variables_have_effect(fake_python, default_outputs, model):
    changed = run_script(fake_python, model=model, **{name: value for name, (value, _) in EFFECTS[model].items()})
    assert f"pretrain_{model}.py" in changed.stdout, changed.stderr
    for _, effect in EFFECTS[model].values():
        assert effect in changed.stdout
        assert effect not in default_outputs[model]


@every_model
def test_edited_variables_have_effect(fake_python, tmp_path, model):
    text = find_script(model).read_text()
    for name, (value, _) in EFFECTS[model].items():
        text = re.sub(rf"^{name}=\S*", f"{name}='{value}'", text, flags=re.M)  # as a user may write it
    edited = tmp_path / "run_edited.sh"
    edited.write_text(text.replace('"$(dirname "${BASH_SOURCE[0]}")/tools/run.sh"', f"{ROOT}/tools/run.sh"))
    result = run_script(fake_python, script=edited)
    assert all(effect in result.stdout for _, effect in EFFECTS[model].values()), result.stderr


def test_user_flags_are_last(fake_python):
    output = run_script(fake_python, "--train-iters", "50", "--resume", TRAIN_ITERS="7").stdout
    assert re.search(r"--train-iters 7 --train-iters 50 --resume$", output, re.M)


def parse_config(python: Path, *flags: str, model: str = "gpt2", **variables: str) -> Config:
    """Return what the flags and defaults that the script passes on become."""
    result = run_script(python, *flags, "--dry-run", model=model, **variables)
    args = result.stdout.splitlines()[0].partition(f"pretrain_{model}.py")[2].split()
    return parse(args, world_size=4, env=read_passed_variables(python), family=model)


def read_passed_variables(python: Path) -> dict[str, str]:
    """Return the variables that the last script gave to its program."""
    files = {"MEGATRON_DEFAULTS": "defaults", "MEGATRON_VARIABLES": "variables"}
    return {name: Path(f"{python}.{suffix}").read_text() for name, suffix in files.items()}


@every_model
def test_unset_variables_have_documented_defaults(fake_python, default_outputs, model):
    assert re.search(rf"pretrain_{model}\.py$", default_outputs[model], re.M)
    config = parse_config(fake_python, model=model)
    assert config.explicit_fields == ("dry_run",)
    args = vars(config.namespace())
    documented = dict(re.findall(r"^(\w+)=\$\{\1:-\} +# (\d+)\b(?!\.)", find_script(model).read_text(), re.M))
    fields = {name: effect.split()[0].lstrip("-").replace("-", "_") for name, (_, effect) in EFFECTS[model].items()}
    checked = {name: (str(args[fields[name]]), value) for name, value in documented.items() if fields[name] in args}
    assert len(checked) == {"gpt2": 8, "t5": 7}[model]
    assert all(actual == value for actual, value in checked.values()), checked
    tensor = 1 if model == "t5" else 2  # Adafactor, on the sample data
    assert (config.parallel.pipe_parallel_size, config.parallel.model_parallel_size) == (2, tensor)
    assert Path(config.run.deepspeed_config or "").name == f"ds_config_{model}.json"
    assert (config.model.hidden_bias, config.model.hidden_dropout) == (model == "gpt2", 0.0)


def test_t5_decoder_length_defaults_to_longest_target(fake_python):
    variables = {"model": "t5", "DATA_PATH": "mine"}
    assert (
        parse_config(fake_python, **variables, ENC_SEQLEN="128").family_config.dec_seq_length == 29
    )  # noise of 21, 7 sentinels, the end
    assert parse_config(fake_python, **variables, ENC_SEQLEN="512").family_config.dec_seq_length == 114
    assert parse_config(fake_python, model="t5", DEC_SEQLEN="64").family_config.dec_seq_length == 64
    with pytest.raises(
        ConfigError, match=r"--dec-seq-length.*29.*\(in the run script:.*--dec-seq-length is DEC_SEQLEN"
    ):
        parse_config(fake_python, model="t5", ENC_SEQLEN="128", DEC_SEQLEN="28")


def test_t5_rejects_seqlen_by_variable_name(fake_python):
    with pytest.raises(ConfigError, match=r"--seq-length.*--enc-seq-length.*--seq-length is SEQLEN"):
        parse_config(fake_python, model="t5", SEQLEN="64")


def test_deepspeed_json_and_global_batch_override_defaults(fake_python, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 12, "gradient_accumulation_steps": 3, "optimizer": {"params": {"lr": 0.1}}}')
    config = parse_config(fake_python, config_json=str(path))
    assert (config.batch.batch_size, config.batch.gas, config.optimizer.lr) == (4, 3, 0.1)
    assert parse_config(fake_python, "--global-batch-size", "64").batch.gas == 8
    with pytest.raises(ConfigError, match=r"--batch-size 5.* \(in the run script: .*--batch-size is BATCHSIZE"):
        parse_config(fake_python, BATCHSIZE="5", config_json=str(path))


def test_environment_defaults_extend_script_defaults(fake_python):
    assert parse_config(fake_python, MEGATRON_DEFAULTS="--lr 0.5").optimizer.lr == 0.5


@pytest.mark.parametrize("flag", ["--data-path", "--train-data-path"])
def test_data_path_flag_skips_sample_data(fake_python, flag):
    assert "made sample data" not in run_script(fake_python, flag, "x").stdout
    assert "sample" not in Path(f"{fake_python}.defaults").read_text()


@pytest.mark.parametrize(
    "flags_text",
    [pytest.param("--lr 1 --data-path=x", marks=pytest.mark.slow), "--train-data-path x\n--valid-data-path x"],
)
def test_data_path_in_environment_defaults_skips_sample_data(fake_python, flags_text):
    result = run_script(fake_python, MEGATRON_DEFAULTS=flags_text)
    assert "made sample data" not in result.stdout and "said" in result.stdout
    assert "sample" not in Path(f"{fake_python}.defaults").read_text()
    assert "made sample data" in run_script(fake_python, MEGATRON_DEFAULTS="--save my/--data-path-run").stdout


@pytest.mark.parametrize(
    ("flags", "env", "is_user_data"),
    [
        ("--resume --save {run}", {}, True),
        ("--dry-run --load {run}", {}, False),
        pytest.param("", {"MEGATRON_DEFAULTS": "--load {run}"}, True, marks=pytest.mark.slow),
        pytest.param("--resume --save {run}", {}, False, marks=pytest.mark.slow),
        pytest.param("--load {run}", {}, True, marks=pytest.mark.slow),
        pytest.param("--load={run} --eval-only", {}, True, marks=pytest.mark.slow),
        pytest.param("--load={run} --eval-only", {}, False, marks=pytest.mark.slow),
        pytest.param("--dry-run --load {run}", {}, True, marks=pytest.mark.slow),
        pytest.param("--resume", {"CHECKPOINT_PATH": "{run}"}, True, marks=pytest.mark.slow),
        pytest.param("--resume", {"CHECKPOINT_PATH": "{run}"}, False, marks=pytest.mark.slow),
    ],
)
def test_resume_on_user_data_skips_sample_data(fake_python, tmp_path, flags, env, is_user_data):
    """Neither are the flags that belong to the sample data passed on; without own data they are."""
    path = "data/mine" if is_user_data else str(ROOT / "data" / "sample" / "gpt2_text_document")
    save_model(tmp_path / "run", make_family_config("gpt2", data_path=path))
    env = {name: value.format(run=tmp_path / "run") for name, value in env.items()}
    result = run_script(fake_python, *flags.format(run=tmp_path / "run").split(), **env)
    assert "pretrain_gpt2.py" in result.stdout, result.stderr
    assert ("made sample data" in result.stdout) == (not is_user_data and "--dry-run" not in flags)
    defaults = read_passed_variables(fake_python)["MEGATRON_DEFAULTS"]
    assert ("--packing" in defaults) == ("--data-path" in defaults) == (not is_user_data)


@pytest.mark.parametrize(
    "flags",
    [
        "--load {run} --finetune",
        pytest.param("--resume --save {run}/none", marks=pytest.mark.slow),
        pytest.param("--load {run} --typo", marks=pytest.mark.slow),
    ],
)
def test_new_run_uses_sample_data(fake_python, tmp_path, flags):
    save_model(tmp_path / "run", make_family_config("gpt2", data_path="data/mine"))
    result = run_script(fake_python, *flags.format(run=tmp_path / "run").split())
    assert ("made sample data" in result.stdout) == ("typo" not in flags), result.stderr


USER_FLAGS = [
    "--sequence-parallel", "--packing concat", "--fim-rate 0.5 --reset-position-ids --eod-mask-loss", "--seq-length 8",
    "--pipe-parallel-size 1 --zero-stage 3", "--model-parallel-size 2", "--zero-stage 1", "--optimizer sgd",
    "--lr 1e-5", "--tokenizer-path mine.json", "--vocab-file v.json --merge-file m.txt", "--eval-only --load runs/x",
    "--enc-seq-length 32", "--dec-seq-length 64", "--denoisers R,X", "--denoisers X", "--noise-density 0.15",
    "--mean-span-length 3", "--position-embedding-type learned --max-position-embeddings 512", "--sample-prompts mine",
]  # fmt: skip


@pytest.mark.parametrize(
    "family", ["gpt2", "t5", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "mpt", "bert"))]
)
def test_user_flags_override_sample_data_flags(fake_python, tmp_path, family):
    run_script(fake_python, script=ROOT / FAMILIES[family].run_script)
    sample = write_documents(
        tmp_path / "sample", [400] * 9
    ).prefix  # in place of that of the checkout, which may not be made yet
    sample_env = read_passed_variables(fake_python)
    sample_dir = ROOT / "data" / "sample"
    for name, defaults in sample_env.items():
        defaults = defaults.replace(str(sample_dir / "gpt2_text_document"), str(sample))
        sample_env[name] = defaults.replace(
            str(sample_dir / "tokenizer.json"), str(ROOT / "tests/golden/tokenizer.json")
        )
    assert bool(parse([], world_size=4, env=sample_env, family=family, accepts_model=True).logging.sample_prompts) == (
        family != "bert"
    )
    run_script(fake_python, "--dry-run", script=ROOT / FAMILIES[family].run_script, DATA_PATH="mine")
    user_data_env = read_passed_variables(fake_python)
    for flags in USER_FLAGS:
        try:
            args = [*flags.split(), "--data-path", "mine"]
            parse(args, world_size=4, env=user_data_env, family=family, accepts_model=True)
        except ConfigError:  # not of this family
            continue
        parse(flags.split(), world_size=4, env=sample_env, family=family, accepts_model=True)


@pytest.mark.parametrize(
    ("model", "has_tokenizer"), [pytest.param("gpt2", True, marks=pytest.mark.slow), ("t5", False)]
)
def test_dry_run_plans_with_missing_sample_data(tmp_path, model, has_tokenizer):
    """In a tree without data, or with data of another version, whose path needs quotes."""
    tree = tmp_path / "it's a tree"
    (tree / "tools").mkdir(parents=True)
    for name in ("tools/run.sh", "tools/setup.sh", "tools/set_up.py", f"run_{model}.sh"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("megatron", "tds", f"pretrain_{model}.py", f"ds_config_{model}.json", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    if has_tokenizer:
        (tree / "data" / "sample").mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "golden" / "tokenizer.json", tree / "data" / "sample")
    result = run_script(Path(sys.executable), "--dry-run", "--check-paths", script=tree / f"run_{model}.sh")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr + result.stdout, "the run will make the missing token files"
    plan = " ".join(result.stdout.replace("│", " ").split())  # long paths wrap the lines of the table
    assert f"vocabulary {make_sample_data.VOCAB_SIZE + 100 * (model == 't5')}" in plan
    assert sorted(path.name for path in tree.rglob("sample/*")) == ["tokenizer.json"] * has_tokenizer


def test_sample_data_is_created_only_without_data_path(fake_python, default_outputs):
    assert all("made sample data" in output for output in default_outputs.values())
    assert "made sample data" not in run_script(fake_python, DATA_PATH="x").stdout


@every_model
def test_help_and_dry_run_start_no_ranks(fake_python, model):
    for flag in ("--help", "--help-all", "--dry-run"):
        output = run_script(fake_python, flag, model=model).stdout
        assert "megatron.launch" not in output
        assert "made sample data" not in output
        assert re.search(rf"pretrain_{model}\.py {flag}$", output, re.M)
    assert "WORLD_SIZE=4" in output


SCRIPTS = ["run_gpt2.sh", "run_t5.sh", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("examples/*/run_*.sh"))]


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.slow if name != "run_gpt2.sh" else ()) for name in SCRIPTS]
)
def test_help_shows_defaults_and_every_script_variable(script, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / script).read_text().split("# ----")[0]
    result = run_script(Path(sys.executable), "--help", script=ROOT / script, NLAYERS="7", TRAIN_ITERS="")
    assert result.returncode == 0, result.stderr
    flags_help, _, variables = result.stdout.partition("variables, set before")
    assert script in flags_help.splitlines()[0]
    assert re.search(r"--num-layers INT .*\(default: 7\)", flags_help), "as the variable says"
    steps, split, rate = {"examples/moe/run_moe.sh": ("300",)}.get(script, ("400",))[0], "900,50,50", "0.0?3"
    assert re.search(rf"--train-iters INT .*\(default: {steps}\)", flags_help)
    assert re.search(rf"--split STR .*\(default: {split}\)", flags_help) and re.search(
        rf"--lr FLOAT.*{rate}", flags_help
    )
    assert "data/sample/gpt2_text_document" in flags_help
    for name in re.findall(r"^(\w+)=\$\{\1:-", text, re.M):
        assert re.search(rf"^  {name}\b", variables, re.M), name
    assert re.search(r"^  NLAYERS, as --num-layers ", variables, re.M)


@pytest.mark.slow
def test_help_works_with_too_few_gpus(fake_python):
    result = run_script(Path(sys.executable), "--help", DS_ACCELERATOR="", MEGATRON_NUM_GPUS="1", GPUS_PER_NODE="4")
    assert result.returncode == 0 and "--num-layers" in result.stdout


def test_too_few_gpus_exit_with_code_2(fake_python):
    result = run_script(fake_python, DS_ACCELERATOR="", MEGATRON_NUM_GPUS="1", GPUS_PER_NODE="4")
    assert result.returncode == 2
    assert "GPUS_PER_NODE=4 and 1 GPU(s)" in result.stderr


def test_two_nodes_without_master_addr_exit_with_code_2(fake_python):
    result = run_script(fake_python, NNODES="2")
    assert result.returncode == 2
    assert "NNODES=2 needs MASTER_ADDR" in result.stderr


def test_invalid_gpu_count_exits_with_code_2(fake_python):
    result = run_script(fake_python, DS_ACCELERATOR="", MEGATRON_NUM_GPUS="abc")
    assert result.returncode == 2
    assert "MEGATRON_NUM_GPUS='abc'" in result.stderr and "Traceback" not in result.stderr


def test_launcher_rejects_more_ranks_than_gpus():
    flags = ["--nproc-per-node", "4", "--master-port", str(find_free_port()), str(find_script("gpt2"))]
    result = subprocess.run(
        [sys.executable, "-m", "megatron.launch", *flags], cwd=ROOT, capture_output=True, text=True, timeout=30,
        env=os.environ | {"DS_ACCELERATOR": "", "MEGATRON_NUM_GPUS": "2"},
    )  # fmt: skip
    assert result.returncode == 2
    assert "--nproc-per-node 4 and 2 GPU(s)" in result.stderr


def test_nodes_are_read_from_slurm(fake_python):
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "n[4-6]"}
    output = run_script(fake_python, **slurm).stdout
    assert "--nnodes 3 --node-rank 2 --master-addr n4 --master-port 20077" in output


def test_script_rejects_old_python(tmp_path):
    old_python = tmp_path / "python"
    old_python.write_text('#!/usr/bin/env bash\n[ "$1" = --version ] && echo "Python 3.8.1"\nexit 1\n')
    old_python.chmod(0o755)
    result = run_script(old_python)
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed, found Python 3.8.1" in result.stderr


def test_tour_replaces_training(fake_python):
    tour = run_script(fake_python, "--tour", "kill", "--limit-s", "9")
    assert (tour.returncode, tour.stdout.split("\n")[0]) == (0, "said -m examples.tour.tour kill --limit-s 9")
    other_model = run_script(fake_python, "--tour", model="t5")
    assert other_model.returncode == 2 and "bash run_gpt2.sh --tour" in other_model.stderr


def test_launcher_flags_are_not_passed_to_script(fake_python):
    output = run_script(
        fake_python, "--lr", "1e-3", "--max-restarts", "3", "--stop-grace=9", "--train-iters", "5"
    ).stdout
    launcher, _, script = output.partition("pretrain_gpt2.py")
    assert "--max-restarts 3 --stop-grace=9" in launcher
    assert "--lr 1e-3 --train-iters 5" in script and "--max-restarts" not in script


def test_launcher_start_survives_slurm_warning(fake_python, tmp_path):
    """Until its handler is there nothing may end it: its default would be death without a checkpoint."""
    python = tmp_path / "python"
    case_line = 'case "$*" in *set_up.py*) echo "$0"; exit ;; *--nproc*) kill -USR1 $$ && echo lives ;; esac'
    python.write_text(f'#!/usr/bin/env bash\n{case_line}\nexec {fake_python} "$@"\n')
    python.chmod(0o755)
    result = run_script(python, DATA_PATH="x")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "lives")
