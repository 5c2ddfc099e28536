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
from tests.helpers.huggingface_models import config_of, save_model
from tests.helpers.launch_jobs import free_port
from tests.helpers.token_data import write
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

COMMON = {
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
    "gpt2": COMMON | {"SEQLEN": ("65", "--seq-length 65"), "cp_size": ("1", "--context-parallel-size 1")},
    "t5": COMMON | {"ENC_SEQLEN": ("65", "--enc-seq-length 65"), "DEC_SEQLEN": ("33", "--dec-seq-length 33")},
}
OF_BOTH = {name for effects in EFFECTS.values() for name in effects}

every_model = pytest.mark.parametrize("model", MODELS)


def script_of(model: str) -> Path:
    return ROOT / f"run_{model}.sh"


@pytest.fixture(scope="module")
def fake_python(tmp_path_factory):
    path = tmp_path_factory.mktemp("fake") / "python"
    path.write_text(FAKE_PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    return path


def run(
    fake: Path, *flags: str, model: str = "gpt2", script: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in OF_BOTH and not name.startswith("SLURM")}
    return subprocess.run(
        ["bash", str(script or script_of(model)), *flags],
        env=clean | {"PYTHON": str(fake), "DS_ACCELERATOR": "cpu"} | env,
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


@every_model
def test_the_table_of_this_test_names_every_variable_of_the_script(model):
    top = script_of(model).read_text().split("# ----")[0]
    assert set(re.findall(r"^(\w+)=\$\{\1:-", top, re.M)) == set(EFFECTS[model])


def test_the_scripts_differ_in_lengths_defaults_and_recipe_alone():
    """What both need is in tools/run.sh, once."""
    texts = [script_of(model).read_text() for model in MODELS]
    lines = [text.split("# ----")[0].splitlines() for text in texts]
    names = [[line.partition("=")[0] for line in part if re.match(r"\w+=", line)] for part in lines]
    assert [name for name in names[0] if name not in ("SEQLEN", "cp_size")] == [
        name for name in names[1] if "_SEQLEN" not in name
    ]
    assert all(len(text.split("# ----")[1].splitlines()) < 14 for text in texts)


@pytest.fixture(scope="module")
def plain(fake_python):
    return {model: run(fake_python, model=model).stdout for model in MODELS}


@every_model
def test_variables_in_the_environment_have_an_effect(fake_python, plain, model):
    changed = run(fake_python, model=model, **{name: value for name, (value, _) in EFFECTS[model].items()})
    assert f"pretrain_{model}.py" in changed.stdout, changed.stderr
    for _, effect in EFFECTS[model].values():
        assert effect in changed.stdout
        assert effect not in plain[model]


@every_model
def test_variables_edited_in_place_have_an_effect(fake_python, tmp_path, model):
    text = script_of(model).read_text()
    for name, (value, _) in EFFECTS[model].items():
        text = re.sub(rf"^{name}=\S*", f"{name}='{value}'", text, flags=re.M)  # as a user may write it
    edited = tmp_path / "run_edited.sh"
    edited.write_text(text.replace('"$(dirname "${BASH_SOURCE[0]}")/tools/run.sh"', f"{ROOT}/tools/run.sh"))
    done = run(fake_python, script=edited)
    assert all(effect in done.stdout for _, effect in EFFECTS[model].values()), done.stderr


def test_flags_of_the_user_come_last(fake_python):
    said = run(fake_python, "--train-iters", "50", "--resume", TRAIN_ITERS="7").stdout
    assert re.search(r"--train-iters 7 --train-iters 50 --resume$", said, re.M)


def parsed(fake: Path, *flags: str, model: str = "gpt2", **variables: str) -> Config:
    """Return what the flags and defaults that the script passes on become."""
    done = run(fake, *flags, "--dry-run", model=model, **variables)
    words = done.stdout.splitlines()[0].partition(f"pretrain_{model}.py")[2].split()
    return parse(words, world_size=4, env=passed_on(fake), family=model)


def passed_on(fake: Path) -> dict[str, str]:
    """Return the variables that the last script gave to its program."""
    files = {"MEGATRON_DEFAULTS": "defaults", "MEGATRON_VARIABLES": "variables"}
    return {name: Path(f"{fake}.{kind}").read_text() for name, kind in files.items()}


@every_model
def test_a_variable_that_is_not_set_is_no_flag_but_the_default_that_its_comment_names(fake_python, plain, model):
    assert re.search(rf"pretrain_{model}\.py$", plain[model], re.M)
    config = parsed(fake_python, model=model)
    assert config.given == ("dry_run",)
    args = vars(config.namespace())
    documented = dict(re.findall(r"^(\w+)=\$\{\1:-\} +# (\d+)\b(?!\.)", script_of(model).read_text(), re.M))
    fields = {name: effect.split()[0].lstrip("-").replace("-", "_") for name, (_, effect) in EFFECTS[model].items()}
    checked = {name: (str(args[fields[name]]), value) for name, value in documented.items() if fields[name] in args}
    assert len(checked) == {"gpt2": 8, "t5": 7}[model]
    assert all(got == value for got, value in checked.values()), checked
    tensor = 1 if model == "t5" else 2  # Adafactor, on the sample data
    assert (config.parallel.pipe_parallel_size, config.parallel.model_parallel_size) == (2, tensor)
    assert Path(config.run.deepspeed_config or "").name == f"ds_config_{model}.json"
    assert (config.model.hidden_bias, config.model.hidden_dropout) == (model == "gpt2", 0.0)


def test_the_decoder_of_t5_is_as_long_as_the_longest_target_unless_said_otherwise(fake_python):
    own = {"model": "t5", "DATA_PATH": "mine"}
    assert parsed(fake_python, **own, ENC_SEQLEN="128").own.dec_seq_length == 29  # noise of 21, 7 sentinels, the end
    assert parsed(fake_python, **own, ENC_SEQLEN="512").own.dec_seq_length == 114
    assert parsed(fake_python, model="t5", DEC_SEQLEN="64").own.dec_seq_length == 64
    with pytest.raises(
        ConfigError, match=r"--dec-seq-length.*29.*\(in the run script:.*--dec-seq-length is DEC_SEQLEN"
    ):
        parsed(fake_python, model="t5", ENC_SEQLEN="128", DEC_SEQLEN="28")


def test_the_length_of_gpt2_is_refused_by_t5_by_the_name_of_its_variable(fake_python):
    with pytest.raises(ConfigError, match=r"--seq-length.*--enc-seq-length.*--seq-length is SEQLEN"):
        parsed(fake_python, model="t5", SEQLEN="64")


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


@pytest.mark.parametrize("flag", ["--data-path", "--train-data-path"])
def test_a_data_path_given_as_a_flag_needs_no_sample(fake_python, flag):
    assert "made sample data" not in run(fake_python, flag, "x").stdout
    assert "sample" not in Path(f"{fake_python}.defaults").read_text()


@pytest.mark.parametrize(
    "given", [pytest.param("--lr 1 --data-path=x", marks=pytest.mark.slow), "--train-data-path x\n--valid-data-path x"]
)
def test_a_data_path_in_the_defaults_of_the_environment_needs_no_sample(fake_python, given):
    done = run(fake_python, MEGATRON_DEFAULTS=given)
    assert "made sample data" not in done.stdout and "said" in done.stdout
    assert "sample" not in Path(f"{fake_python}.defaults").read_text()
    assert "made sample data" in run(fake_python, MEGATRON_DEFAULTS="--save my/--data-path-run").stdout


@pytest.mark.parametrize(
    ("flags", "env", "is_own"),
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
def test_a_run_on_own_data_is_resumed_without_the_sample_data(fake_python, tmp_path, flags, env, is_own):
    """Neither are the flags that belong to the sample data passed on; without own data they are."""
    path = "data/mine" if is_own else str(ROOT / "data" / "sample" / "gpt2_text_document")
    save_model(tmp_path / "run", config_of("gpt2", data_path=path))
    env = {name: value.format(run=tmp_path / "run") for name, value in env.items()}
    done = run(fake_python, *flags.format(run=tmp_path / "run").split(), **env)
    assert "pretrain_gpt2.py" in done.stdout, done.stderr
    assert ("made sample data" in done.stdout) == (not is_own and "--dry-run" not in flags)
    defaults = passed_on(fake_python)["MEGATRON_DEFAULTS"]
    assert ("--packing" in defaults) == ("--data-path" in defaults) == (not is_own)


@pytest.mark.parametrize(
    "flags",
    [
        "--load {run} --finetune",
        pytest.param("--resume --save {run}/none", marks=pytest.mark.slow),
        pytest.param("--load {run} --typo", marks=pytest.mark.slow),
    ],
)
def test_a_new_run_takes_the_sample_data(fake_python, tmp_path, flags):
    save_model(tmp_path / "run", config_of("gpt2", data_path="data/mine"))
    done = run(fake_python, *flags.format(run=tmp_path / "run").split())
    assert ("made sample data" in done.stdout) == ("typo" not in flags), done.stderr


FLAGS_OF_USERS = [
    "--sequence-parallel", "--packing concat", "--fim-rate 0.5 --reset-position-ids --eod-mask-loss", "--seq-length 8",
    "--pipe-parallel-size 1 --zero-stage 3", "--model-parallel-size 2", "--zero-stage 1", "--optimizer sgd",
    "--lr 1e-5", "--tokenizer-path mine.json", "--vocab-file v.json --merge-file m.txt", "--eval-only --load runs/x",
    "--enc-seq-length 32", "--dec-seq-length 64", "--denoisers R,X", "--denoisers X", "--noise-density 0.15",
    "--mean-span-length 3", "--position-embedding-type learned --max-position-embeddings 512", "--sample-prompts mine",
]  # fmt: skip


@pytest.mark.parametrize(
    "family", ["gpt2", "t5", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "mpt", "bert"))]
)
def test_flags_of_the_sample_data_give_way_to_those_of_the_user(fake_python, tmp_path, family):
    run(fake_python, script=ROOT / FAMILIES[family].run_script)
    sample = write(tmp_path / "sample", [400] * 9).prefix  # in place of that of the checkout, which may not be made yet
    of_the_sample = passed_on(fake_python)
    made = ROOT / "data" / "sample"
    for name, defaults in of_the_sample.items():
        defaults = defaults.replace(str(made / "gpt2_text_document"), str(sample))
        of_the_sample[name] = defaults.replace(str(made / "tokenizer.json"), str(ROOT / "tests/golden/tokenizer.json"))
    assert bool(
        parse([], world_size=4, env=of_the_sample, family=family, accepts_model=True).seeing.sample_prompts
    ) == (family != "bert")
    run(fake_python, "--dry-run", script=ROOT / FAMILIES[family].run_script, DATA_PATH="mine")
    of_other_data = passed_on(fake_python)
    for flags in FLAGS_OF_USERS:
        try:
            words = [*flags.split(), "--data-path", "mine"]
            parse(words, world_size=4, env=of_other_data, family=family, accepts_model=True)
        except ConfigError:  # not of this family
            continue
        parse(flags.split(), world_size=4, env=of_the_sample, family=family, accepts_model=True)


@pytest.mark.parametrize(("model", "is_there"), [pytest.param("gpt2", True, marks=pytest.mark.slow), ("t5", False)])
def test_a_dry_run_counts_with_the_sample_that_the_run_will_make(tmp_path, model, is_there):
    """In a tree without data, or with data of another version, whose path needs quotes."""
    tree = tmp_path / "it's a tree"
    (tree / "tools").mkdir(parents=True)
    for name in ("tools/run.sh", "tools/setup.sh", "tools/set_up.py", f"run_{model}.sh"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("megatron", "tds", f"pretrain_{model}.py", f"ds_config_{model}.json", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    if is_there:
        (tree / "data" / "sample").mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "golden" / "tokenizer.json", tree / "data" / "sample")
    done = run(Path(sys.executable), "--dry-run", "--check-paths", script=tree / f"run_{model}.sh")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr + done.stdout, "the run will make the missing token files"
    assert f"vocabulary {make_sample_data.VOCAB_SIZE + 100 * (model == 't5')}" in done.stdout
    assert sorted(path.name for path in tree.rglob("sample/*")) == ["tokenizer.json"] * is_there


def test_sample_data_is_made_only_when_no_data_is_given(fake_python, plain):
    assert all("made sample data" in said for said in plain.values())
    assert "made sample data" not in run(fake_python, DATA_PATH="x").stdout


@every_model
def test_help_and_dry_run_start_no_ranks(fake_python, model):
    for flag in ("--help", "--help-all", "--dry-run"):
        said = run(fake_python, flag, model=model).stdout
        assert "megatron.launch" not in said
        assert "made sample data" not in said
        assert re.search(rf"pretrain_{model}\.py {flag}$", said, re.M)
    assert "WORLD_SIZE=4" in said


SCRIPTS = ["run_gpt2.sh", "run_t5.sh", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("examples/*/run_*.sh"))]


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.slow if name != "run_gpt2.sh" else ()) for name in SCRIPTS]
)
def test_help_shows_the_defaults_and_every_variable_of_the_script(script, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / script).read_text().split("# ----")[0]
    done = run(Path(sys.executable), "--help", script=ROOT / script, NLAYERS="7", TRAIN_ITERS="")
    assert done.returncode == 0, done.stderr
    shown, _, variables = done.stdout.partition("variables, set before")
    assert script in shown.splitlines()[0]
    assert re.search(r"--num-layers INT .*\(default: 7\)", shown), "as the variable says"
    steps, split, rate = {"examples/moe/run_moe.sh": ("300",)}.get(script, ("400",))[0], "900,50,50", "0.0?3"
    assert re.search(rf"--train-iters INT .*\(default: {steps}\)", shown)
    assert re.search(rf"--split STR .*\(default: {split}\)", shown) and re.search(rf"--lr FLOAT.*{rate}", shown)
    assert "data/sample/gpt2_text_document" in shown
    for name in re.findall(r"^(\w+)=\$\{\1:-", text, re.M):
        assert re.search(rf"^  {name}\b", variables, re.M), name
    assert re.search(r"^  NLAYERS, as --num-layers ", variables, re.M)


@pytest.mark.slow
def test_help_is_shown_where_the_machine_does_not_fit_the_variables(fake_python):
    done = run(Path(sys.executable), "--help", DS_ACCELERATOR="", MEGATRON_NUM_GPUS="1", GPUS_PER_NODE="4")
    assert done.returncode == 0 and "--num-layers" in done.stdout


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
    flags = ["--nproc-per-node", "4", "--master-port", str(free_port()), str(script_of("gpt2"))]
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


def test_flags_of_the_launcher_reach_it_and_not_the_script(fake_python):
    said = run(fake_python, "--lr", "1e-3", "--max-restarts", "3", "--stop-grace=9", "--train-iters", "5").stdout
    launcher, _, script = said.partition("pretrain_gpt2.py")
    assert "--max-restarts 3 --stop-grace=9" in launcher
    assert "--lr 1e-3 --train-iters 5" in script and "--max-restarts" not in script


def test_slurms_warning_is_not_lost_on_a_launcher_that_only_begins(fake_python, tmp_path):
    """Until its handler is there nothing may end it: its default would be death without a checkpoint."""
    warned = tmp_path / "python"
    warn = 'case "$*" in *set_up.py*) echo "$0"; exit ;; *--nproc*) kill -USR1 $$ && echo lives ;; esac'
    warned.write_text(f'#!/usr/bin/env bash\n{warn}\nexec {fake_python} "$@"\n')
    warned.chmod(0o755)
    done = run(warned, DATA_PATH="x")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "lives")
