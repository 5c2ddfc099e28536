"""The run scripts of examples/: every variable on top has its effect, and what is left empty is what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoint.huggingface.config import format_of
from megatron.config import parse
from megatron.models.registry import FAMILIES, costs_of
from tests.test_run_script import COMMON_EFFECTS, ROOT, fake_python, run_script

__all__ = ["fake_python"]  # the fixture

CONTEXT_VARIABLES = {"cp_size": ("1", "--context-parallel-size 1")}
MODEL_VARIABLES = {
    "llama": {
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT_VARIABLES,
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NFF": ("77", "--ff-hidden-size 77"),
    },
    "qwen3": {
        "SIZE": ("1.7b", "said "),
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT_VARIABLES,
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NFF": ("77", "--ff-hidden-size 77"),
    },
    "moe": {
        "KIND": ("mixtral", "said "),
        "EP": ("1", "--expert-model-parallel-size 1"),
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT_VARIABLES,
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NFF": ("77", "--ff-hidden-size 77"),
        "NEXPERTS": ("5", "--num-experts 5"),
        "TOPK": ("3", "--moe-router-topk 3"),
        "NEXPERTFF": ("55", "--moe-ffn-hidden-size 55"),
    },
    "deepseek": {
        "SIZE": ("v2-lite", "said "),
        "EP": ("1", "--expert-model-parallel-size 1"),
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT_VARIABLES,
        "KVRANK": ("33", "--kv-lora-rank 33"),
        "NFF": ("77", "--ff-hidden-size 77"),
        "NEXPERTS": ("5", "--num-experts 5"),
        "TOPK": ("3", "--moe-router-topk 3"),
        "NEXPERTFF": ("55", "--moe-ffn-hidden-size 55"),
    },
    "qwen3_5": {
        "SIZE": ("0.8b", "said "),
        "SEQLEN": ("65", "--seq-length 65"),
        **CONTEXT_VARIABLES,
        "NGROUPS": ("6", "--num-query-groups 6"),
        "NKEYHEADS": ("5", "--linear-num-key-heads 5"),
        "NVALUEHEADS": ("15", "--linear-num-value-heads 15"),
        "NFF": ("77", "--ff-hidden-size 77"),
    },
    "bert": {"SEQLEN": ("65", "--seq-length 65"), **CONTEXT_VARIABLES},
    "mpt": {"SEQLEN": ("65", "--seq-length 65"), **CONTEXT_VARIABLES},
}
"""Model -> its own variables, with a value and the flag that this becomes."""
FAMILY_BY_MODEL = {"qwen3": "llama", "moe": "llama", "deepseek": "llama", "qwen3_5": "llama"}
"""Model -> its family, where that is another name."""
FIXED_FLAGS = {"moe": ("--model-parallel-size", "1"), "deepseek": ("--model-parallel-size", "1")}
"""Model -> the flags of variables that its script sets by itself."""
every_model = pytest.mark.parametrize("model", MODEL_VARIABLES)


def find_script(model: str) -> Path:
    return ROOT / "examples" / model / f"run_{model}.sh"


def get_family(model: str) -> str:
    return FAMILY_BY_MODEL.get(model, model)


@every_model
def test_every_script_variable_has_effect(model: str, fake_python: Path) -> None:
    effects = COMMON_EFFECTS | MODEL_VARIABLES[model]
    top = find_script(model).read_text().split("# ----")[0]
    assert set(re.findall(r"^(\w+)=\$\{\1:-", top, re.M)) == set(effects)
    output = run_script(
        fake_python, script=find_script(model), **{name: value for name, (value, _) in effects.items()}
    ).stdout
    assert [effect for _, effect in effects.values() if effect not in output] == []
    assert f"/{FAMILIES[get_family(model)].program} --pipe-parallel-size 4 " in output


@every_model
def test_unset_variables_have_documented_defaults(model: str, fake_python: Path) -> None:
    output = run_script(fake_python, "--dry-run", script=find_script(model)).stdout
    flags = [*FIXED_FLAGS.get(model, ()), "--dry-run"]
    assert output.splitlines()[0].endswith(f"{FAMILIES[get_family(model)].program} {' '.join(flags)}")
    files = {"MEGATRON_DEFAULTS": "defaults", "MEGATRON_VARIABLES": "variables"}
    env = {name: Path(f"{fake_python}.{suffix}").read_text() for name, suffix in files.items()}
    config = parse(flags, world_size=4, env=env, family=get_family(model), accepts_model=True)
    assert len(config.explicit_fields) == len(flags[::2])
    args = vars(config.namespace())
    documented = dict(
        re.findall(r"^(\w+)=\$\{\1:-\} +# (?:by SIZE; )?(?:tiny )?(\d+)\b(?!\.)", find_script(model).read_text(), re.M)
    )
    fields = {
        name: effect.split()[0].lstrip("-").replace("-", "_")
        for name, (_, effect) in (COMMON_EFFECTS | MODEL_VARIABLES[model]).items()
    }
    checked = {name: (str(args[fields[name]]), value) for name, value in documented.items() if fields[name] in args}
    assert len(checked) == 6 + len(set(MODEL_VARIABLES[model]) - {"SIZE", "KIND", "EP"}) + (model in FIXED_FLAGS)
    assert all(actual == value for actual, value in checked.values()), checked
    assert config.parallel.pipe_parallel_size == 2
    assert config.parallel.model_parallel_size == (1 if model in FIXED_FLAGS else 2)
    assert config.run.deepspeed_config == str(find_script(model).parent / f"ds_config_{model}.json")
    assert (config.model.hidden_bias, config.model.hidden_dropout) == (model == "bert", 0.0)


PUBLISHED_NUM_PARAMETERS = {"0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360}
"""Size -> parameters of Qwen3's folder of that size, whose table has 151,936 rows."""


@pytest.mark.parametrize("size", PUBLISHED_NUM_PARAMETERS)
def test_qwen3_sizes_have_published_parameter_counts(size: str, fake_python: Path) -> None:
    run_script(fake_python, "--dry-run", script=find_script("qwen3"), SIZE=size)
    env = {"MEGATRON_DEFAULTS": Path(f"{fake_python}.defaults").read_text()}
    config = parse(["--dry-run", "--vocab-size", "151936"], world_size=16, env=env, accepts_model=True)
    assert costs_of(config).num_parameters == PUBLISHED_NUM_PARAMETERS[size]
    assert config.precision.dtype == "bf16"


def test_unknown_qwen3_size_is_rejected(fake_python: Path) -> None:
    result = run_script(fake_python, "--dry-run", script=find_script("qwen3"), SIZE="7b")
    assert result.returncode == 2
    assert result.stderr == "SIZE must be tiny, 0.6b, 1.7b, 4b or 8b, got '7b'. Leave it empty for tiny\n"


def test_deepseek_v2_lite_has_published_parameter_count(fake_python: Path) -> None:
    run_script(fake_python, "--dry-run", script=find_script("deepseek"), SIZE="v2-lite")
    env = {"MEGATRON_DEFAULTS": Path(f"{fake_python}.defaults").read_text()}
    flags = ["--dry-run", "--vocab-size", "102400", "--model-parallel-size", "1"]
    config = parse(flags, world_size=4, env=env, accepts_model=True)
    assert costs_of(config).num_parameters == 15_706_484_224
    assert format_of(config).model_types == ("deepseek_v2",)


def test_unknown_deepseek_size_is_rejected(fake_python: Path) -> None:
    result = run_script(fake_python, "--dry-run", script=find_script("deepseek"), SIZE="v4")
    assert result.returncode == 2
    assert result.stderr == "SIZE must be tiny or v2-lite, got 'v4'. Leave it empty for tiny\n"


@pytest.mark.parametrize(("size", "num_parameters"), [("0.8b", 752_393_024), ("9b", 8_953_803_264)])
def test_qwen3_5_sizes_are_text_models(size: str, num_parameters: int, fake_python: Path) -> None:
    run_script(fake_python, "--dry-run", script=find_script("qwen3_5"), SIZE=size)
    env = {"MEGATRON_DEFAULTS": Path(f"{fake_python}.defaults").read_text()}
    config = parse(["--dry-run", "--vocab-size", "248320"], world_size=16, env=env, accepts_model=True)
    assert costs_of(config).num_parameters == num_parameters
    assert format_of(config).model_types[0] == "qwen3_5_text"
    assert config.precision.dtype == "bf16"


def test_unknown_qwen3_5_size_is_rejected(fake_python: Path) -> None:
    result = run_script(fake_python, "--dry-run", script=find_script("qwen3_5"), SIZE="7b")
    assert result.returncode == 2
    assert result.stderr == "SIZE must be tiny, 0.8b or 9b, got '7b'. Leave it empty for tiny\n"


MODEL_TYPE_BY_KIND = {"": "glm4_moe", "glm4": "glm4_moe", "qwen3": "qwen3_moe", "mixtral": "mixtral"}
"""Of the script with experts -> Hugging Face's model_type."""


@pytest.mark.parametrize("variant", MODEL_TYPE_BY_KIND)
def test_moe_variants_have_model_type_and_load_balancing(variant: str, fake_python: Path) -> None:
    run_script(fake_python, "--dry-run", script=find_script("moe"), KIND=variant)
    env = {"MEGATRON_DEFAULTS": Path(f"{fake_python}.defaults").read_text()}
    config = parse(["--dry-run", "--model-parallel-size", "1"], world_size=4, env=env, accepts_model=True)
    assert format_of(config).model_types == (MODEL_TYPE_BY_KIND[variant],)
    assert config.model.has_aux_loss != config.model.moe_router_enable_expert_bias
    assert config.parallel.expert_model_parallel_size == 2


@pytest.mark.parametrize(
    ("variables", "num_ranks"),
    [
        ({"GPUS_PER_NODE": "2"}, 1),
        ({"GPUS_PER_NODE": "8"}, 2),
        ({"pp_size": "1", "cp_size": "2"}, 2),
        ({"mp_size": "2"}, 1),
    ],
)
def test_expert_parallel_size_follows_ranks(variables: dict[str, str], num_ranks: int, fake_python: Path) -> None:
    run_script(fake_python, "--dry-run", script=find_script("moe"), **variables)
    assert f"--expert-model-parallel-size {num_ranks}" in Path(f"{fake_python}.defaults").read_text()


def test_unknown_moe_variant_is_rejected(fake_python: Path) -> None:
    result = run_script(fake_python, "--dry-run", script=find_script("moe"), KIND="gshard")
    assert result.returncode == 2
    assert result.stderr == "KIND must be glm4, qwen3 or mixtral, got 'gshard'. Leave it empty for glm4\n"
