"""The run scripts of examples/: every variable on top has its effect, and what is left empty is what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoint.huggingface.config import format_of
from megatron.config import parse
from megatron.models.registry import FAMILIES, costs_of
from tests.test_run_script import COMMON, ROOT, fake_python, run

__all__ = ["fake_python"]  # the fixture

CONTEXT = {"cp_size": ("1", "--context-parallel-size 1")}
OWN = {
    "llama": {
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT,
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NFF": ("77", "--ff-hidden-size 77"),
    },
    "qwen3": {
        "SIZE": ("1.7b", "said "),
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT,
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NFF": ("77", "--ff-hidden-size 77"),
    },
    "moe": {
        "KIND": ("mixtral", "said "),
        "EP": ("1", "--expert-model-parallel-size 1"),
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT,
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NFF": ("77", "--ff-hidden-size 77"),
        "NEXPERTS": ("5", "--num-experts 5"),
        "TOPK": ("3", "--moe-router-topk 3"),
        "NEXPERTFF": ("55", "--moe-ffn-hidden-size 55"),
    },
    "bert": {"SEQLEN": ("65", "--seq-length 65"), **CONTEXT},
    "mpt": {"SEQLEN": ("65", "--seq-length 65"), **CONTEXT},
}
"""Model -> its own variables, with a value and the flag that this becomes."""
TRAINED_AS = {"qwen3": "llama", "moe": "llama"}
"""Model -> its family, where that is another name."""
SET_IN_PLACE = {"moe": ("--model-parallel-size", "1")}
"""Model -> the flags of variables that its script sets by itself."""
every_model = pytest.mark.parametrize("model", OWN)


def script_of(model: str) -> Path:
    return ROOT / "examples" / model / f"run_{model}.sh"


def family_of(model: str) -> str:
    return TRAINED_AS.get(model, model)


@every_model
def test_every_variable_of_the_script_has_its_effect(model: str, fake_python: Path) -> None:
    effects = COMMON | OWN[model]
    top = script_of(model).read_text().split("# ----")[0]
    assert set(re.findall(r"^(\w+)=\$\{\1:-", top, re.M)) == set(effects)
    said = run(fake_python, script=script_of(model), **{name: value for name, (value, _) in effects.items()}).stdout
    assert [effect for _, effect in effects.values() if effect not in said] == []
    assert f"/{FAMILIES[family_of(model)].program} --pipe-parallel-size 4 " in said


@every_model
def test_what_is_not_set_is_what_its_comment_names(model: str, fake_python: Path) -> None:
    said = run(fake_python, "--dry-run", script=script_of(model)).stdout
    flags = [*SET_IN_PLACE.get(model, ()), "--dry-run"]
    assert said.splitlines()[0].endswith(f"{FAMILIES[family_of(model)].program} {' '.join(flags)}")
    files = {"MEGATRON_DEFAULTS": "defaults", "MEGATRON_VARIABLES": "variables"}
    env = {name: Path(f"{fake_python}.{kind}").read_text() for name, kind in files.items()}
    config = parse(flags, world_size=4, env=env, family=family_of(model), accepts_model=True)
    assert len(config.given) == len(flags[::2])
    args = vars(config.namespace())
    documented = dict(
        re.findall(r"^(\w+)=\$\{\1:-\} +# (?:by SIZE; )?(?:tiny )?(\d+)\b(?!\.)", script_of(model).read_text(), re.M)
    )
    fields = {
        name: effect.split()[0].lstrip("-").replace("-", "_") for name, (_, effect) in (COMMON | OWN[model]).items()
    }
    checked = {name: (str(args[fields[name]]), value) for name, value in documented.items() if fields[name] in args}
    assert len(checked) == 6 + len(set(OWN[model]) - {"SIZE", "KIND", "EP"}) + (model in SET_IN_PLACE)
    assert all(got == value for got, value in checked.values()), checked
    assert config.parallel.pipe_parallel_size == 2
    assert config.parallel.model_parallel_size == (1 if model in SET_IN_PLACE else 2)
    assert config.run.deepspeed_config == str(script_of(model).parent / f"ds_config_{model}.json")
    assert (config.model.hidden_bias, config.model.hidden_dropout) == (model == "bert", 0.0)


PUBLISHED = {"0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360}
"""Size -> parameters of Qwen3's folder of that size, whose table has 151,936 rows."""


@pytest.mark.parametrize("size", PUBLISHED)
def test_each_size_of_qwen3_has_the_parameters_of_the_published_one(size: str, fake_python: Path) -> None:
    run(fake_python, "--dry-run", script=script_of("qwen3"), SIZE=size)
    env = {"MEGATRON_DEFAULTS": Path(f"{fake_python}.defaults").read_text()}
    config = parse(["--dry-run", "--vocab-size", "151936"], world_size=16, env=env, accepts_model=True)
    assert costs_of(config).num_parameters == PUBLISHED[size]
    assert config.precision.dtype == "bf16"


def test_an_unknown_size_of_qwen3_is_refused(fake_python: Path) -> None:
    done = run(fake_python, "--dry-run", script=script_of("qwen3"), SIZE="7b")
    assert done.returncode == 2
    assert done.stderr == "SIZE must be tiny, 0.6b, 1.7b, 4b or 8b, got '7b'. Leave it empty for tiny\n"


KINDS = {"": "glm4_moe", "glm4": "glm4_moe", "qwen3": "qwen3_moe", "mixtral": "mixtral"}
"""Of the script with experts -> Hugging Face's model_type."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_experts_has_a_folder_of_its_type_and_a_balance(kind: str, fake_python: Path) -> None:
    run(fake_python, "--dry-run", script=script_of("moe"), KIND=kind)
    env = {"MEGATRON_DEFAULTS": Path(f"{fake_python}.defaults").read_text()}
    config = parse(["--dry-run", "--model-parallel-size", "1"], world_size=4, env=env, accepts_model=True)
    assert format_of(config).model_types == (KINDS[kind],)
    assert config.model.has_aux_loss != config.model.moe_router_enable_expert_bias
    assert config.parallel.expert_model_parallel_size == 2


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"GPUS_PER_NODE": "2"}, 1),
        ({"GPUS_PER_NODE": "8"}, 2),
        ({"pp_size": "1", "cp_size": "2"}, 2),
        ({"mp_size": "2"}, 1),
    ],
)
def test_experts_are_shared_out_where_there_are_ranks_for_them(
    sizes: dict[str, str], ranks: int, fake_python: Path
) -> None:
    run(fake_python, "--dry-run", script=script_of("moe"), **sizes)
    assert f"--expert-model-parallel-size {ranks}" in Path(f"{fake_python}.defaults").read_text()


def test_an_unknown_kind_of_experts_is_refused(fake_python: Path) -> None:
    done = run(fake_python, "--dry-run", script=script_of("moe"), KIND="gshard")
    assert done.returncode == 2
    assert done.stderr == "KIND must be glm4, qwen3 or mixtral, got 'gshard'. Leave it empty for glm4\n"
