"""``--model``: names, the architecture that each sets, the order of the sources, errors, files of --config, help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.arguments.help import help_text
from megatron.arguments.other_programs import GPT
from megatron.arguments.script_defaults import VARIABLE
from megatron.config import Config
from megatron.config.decoder import ARCHITECTURE
from megatron.config.model import ModelConfig
from megatron.config.option import options_of
from megatron.errors import ConfigError
from megatron.models.architectures import Architecture, architecture, families, model_types
from megatron.models.registry import FAMILIES
from tests.helpers.toy_family import toy_family

TYPES = {
    "mistral": {"window_size": 4095},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "gemma2": {
        "norm_placement": "both", "layernorm_1p": True, "scale_embeddings": True, "activation": "gated-gelu",
        "untie_embeddings": False, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "window_attn_skip_freq": "2",
    },
    "gemma3_text": {"norm_placement": "both", "qk_norm": "head", "rotary_base": 1e6, "rotary_local_base": 1e4},
    "olmo2": {"norm_placement": "after", "qk_norm": "all", "layernorm_epsilon": 1e-5},
    "mixtral": {"qk_norm": "none", "moe_router_score_function": "softmax"},
    "qwen3_moe": {"qk_norm": "head", "moe_router_pre_softmax": True},
    "qwen2_moe": {"add_qkv_bias": True, "moe_shared_expert_gate": True},
    "glm4_moe": {"rotary_percent": 0.5, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}  # fmt: skip
"""Model type -> some of its settings."""
OF_ALL = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
SIZES = "--num-layers 6 --hidden-size 96 --num-attention-heads 6 --num-query-groups 3 --ff-hidden-size 100"
EXPERTS = "--num-experts 8 --moe-shared-expert-intermediate-size 64"
NAMES = [*families(), *TYPES]


def read(words: str, program: str = "gpt2", recipe: str = "", **how: Any) -> Config:
    env = {VARIABLE: recipe} if recipe else {}
    return parse(words.split(), world_size=1, env=env, family=program, accepts_model=True, **how)


def error_of(words: str, program: str = "gpt2", **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(words, program, **how)
    return str(caught.value)


def settings(config: Config) -> dict[tuple[str, str], Any]:
    """Return (section, field) -> value of all sections, without the name of the model."""
    sections = {name: values for name, values in config.to_dict().items() if isinstance(values, dict)}
    found = {(name, field): value for name, values in sections.items() for field, value in values.items()}
    del found["model", "architecture"]
    return found


def named(name: str) -> Architecture:
    found = architecture(name)
    assert found is not None
    return found


def parts(config: Config) -> dict[str, Any]:
    return {name: getattr(config.model, name) for name in ARCHITECTURE}


def test_the_names_are_the_families_of_decoders_and_hugging_faces_types() -> None:
    assert families() == [name for name, family in FAMILIES.items() if family.kind == "decoder"]
    assert {*model_types()} == {*TYPES}
    (option,) = [option for option in options_of(ModelConfig) if option.flag == "--model"]
    assert all(name in option.help for name in NAMES)


@pytest.mark.parametrize("family", families())
def test_a_family_has_the_settings_of_its_own_program(family: str) -> None:
    config = read(f"--model {family} {SIZES}")
    assert config.family == family
    assert settings(config) == settings(read(SIZES, family))


@pytest.mark.parametrize("name", TYPES)
def test_a_model_type_sets_the_architecture_of_its_class(name: str) -> None:
    experts = EXPERTS if named(name).needs else ""
    config = read(f"--model {name} {SIZES} {experts}")
    assert config.family == "llama" and config.model.architecture == name
    expected = {**OF_ALL, **TYPES[name]}
    assert {field: getattr(config.model, field) for field in expected} == expected


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_dropout_stay(name: str) -> None:
    """Sizes are those of the flags; dropout is that of the family."""
    experts = EXPERTS if named(name).needs else ""
    kept = {field for field in vars(ModelConfig()) if field not in (*ARCHITECTURE, "architecture")}
    found, plain = read(f"--model {name} {SIZES} {experts}"), read(f"{SIZES} {experts}", named(name).family)
    assert {field: getattr(found.model, field) for field in kept} == {
        field: getattr(plain.model, field) for field in kept
    }
    assert found.model.num_layers == 6 and found.model.ff_hidden_size == 100


def test_every_architecture_has_all_its_parts() -> None:
    assert {*ARCHITECTURE} <= {*vars(ModelConfig())}
    assert all({*named(name).settings} == {*ARCHITECTURE} for name in NAMES)
    assert all(named(name).fixed.items() <= named(name).settings.items() for name in NAMES)


def test_a_flag_counts_more_than_the_model() -> None:
    config = read("--model gemma2 --norm-placement before --activation relu --tie-embeddings-and-output-weights")
    assert (config.model.norm_placement, config.model.activation) == ("before", "relu")
    assert config.model.layernorm_1p and config.family == "llama"


def test_megatrons_defaults_stay_but_for_the_architecture() -> None:
    config = read("--model llama", defaults=GPT)
    assert parts(config) == parts(read("", "llama"))
    assert (config.optimizer.warmup, config.model.make_vocab_size_divisible_by) == (0.0, 128)
    assert (config.model.attention_dropout, config.precision.dtype) == (0.1, "fp32")
    assert settings(read("--model gpt2", defaults=GPT)) == settings(read("", defaults=GPT))


@pytest.mark.parametrize(
    ("words", "recipe", "changed"),
    [
        ("--model llama", "--hidden-bias --activation relu --num-layers 6", {"num_layers": 6}),
        ("", "--model llama --hidden-bias", {"hidden_bias": True}),
        ("--hidden-bias", "--model llama", {"hidden_bias": True}),
        ("--model llama", "--model qwen3 --rotary-base 1e6 --num-layers 6", {"num_layers": 6}),
        ("--model llama", "--model llama --rotary-base 1e6", {"rotary_base": 1e6}),
    ],
)
def test_a_model_replaces_the_architecture_of_weaker_sources_only(
    words: str, recipe: str, changed: Mapping[str, Any]
) -> None:
    config, plain = read(words, recipe=recipe), read("", "llama")
    differing = {
        name: value
        for name, value in vars(config.model).items()
        if value != getattr(plain.model, name) and name != "architecture"
    }
    assert (config.family, differing) == ("llama", changed)


def test_the_recipe_of_the_named_model_stays() -> None:
    """``bash run_qwen3.sh --model qwen3`` is ``bash run_qwen3.sh``."""
    recipe = "--model qwen3 --rotary-base 1000000 --tie-embeddings-and-output-weights"
    assert settings(read("--model qwen3", recipe=recipe)) == settings(read("", recipe=recipe))
    config = read("", recipe=recipe)
    plain = read(
        "--qk-layernorm --rotary-base 1000000 --norm-epsilon 1e-6 --tie-embeddings-and-output-weights", "llama"
    )
    assert settings(config) == settings(plain)


@pytest.mark.parametrize(
    ("name", "nearest"), [("lama", "llama"), ("Qwen3", "qwen3"), ("gpt-2", "gpt2"), ("mixtrall", "mixtral"), ("x", "")]
)
def test_an_unknown_model_is_answered_with_the_known_ones_and_the_nearest(name: str, nearest: str) -> None:
    message = error_of(f"--model {name} --lr -1 --load nowhere")
    assert all(known in message for known in NAMES) and f"got {name!r}" in message
    assert (f"did you mean {nearest}?" in message) == bool(nearest)
    assert "--lr must be" in message, "all problems are reported at once"


def test_another_program_trains_what_is_no_decoder() -> None:
    assert "--model must name a decoder, got t5. T5 is trained by pretrain_t5.py" in error_of("--model t5")
    with pytest.raises(ConfigError, match="--model is not supported: it selects the decoder that pretrain_gpt2.py"):
        parse(["--model", "llama"], world_size=1, env={}, family="t5")


def test_a_model_with_experts_needs_their_number() -> None:
    assert "--model mixtral needs --num-experts" in error_of("--model mixtral")
    assert "--model qwen2_moe needs --moe-shared-expert-intermediate-size" in error_of("--model qwen2_moe")
    assert read("--model mixtral --num-experts 4").model.num_experts == 4


def test_a_program_of_the_users_own_takes_no_model() -> None:
    for words, recipe in (("--model llama", ""), ("", "--model llama")):
        with pytest.raises(ConfigError, match="--model selects the decoder that pretrain_gpt2.py trains"):
            parse(words.split(), world_size=1, env={VARIABLE: recipe})


def test_a_program_of_the_users_own_may_have_the_flag_for_itself() -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model")
        return parser

    config = parse(["--model", "mine"], world_size=1, env={}, extra_args_provider=add)
    assert (config.extra["model"], config.family) == ("mine", "gpt2")


def test_a_file_of_flags_names_the_model(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: qwen3\nnum-layers: 6\nrotary-base: 5e5\n")
    config = read(f"--config {file}", recipe="--hidden-bias")
    assert (config.family, config.model.qk_norm, config.model.num_layers) == ("llama", "head", 6)
    assert (config.model.rotary_base, config.model.hidden_bias) == (5e5, False)
    other = read(f"--config {file} --model olmo2")
    assert (other.model.qk_norm, other.model.rotary_base, other.model.num_layers) == ("all", 1e4, 6)
    file.write_text("model:\n  model: mpt\n  num_layers: 6\n")
    assert read(f"--config {file}").family == "mpt"


@pytest.mark.parametrize("words", ["", "--model llama"])
def test_the_configuration_of_a_run_brings_its_family(words: str, tmp_path: Path) -> None:
    run = read("--model llama --qk-norm head --num-layers 6")
    (tmp_path / "config.json").write_text(json.dumps(run.to_dict()))
    again = read(f"--config {tmp_path / 'config.json'} {words}", defaults=GPT)
    assert again.family == "llama" and again.model.qk_norm == "head"
    assert parts(again) == parts(run) and again.model.num_layers == 6


def test_another_model_replaces_the_architecture_of_a_repeated_run(tmp_path: Path) -> None:
    run = read("--model llama --rotary-base 5e5 --num-layers 6 --lr 0.5")
    (tmp_path / "config.json").write_text(json.dumps(run.to_dict()))
    again = read(f"--config {tmp_path / 'config.json'} --model qwen3")
    assert parts(again) == parts(read("--model qwen3"))
    assert (again.model.num_layers, again.optimizer.lr) == (6, 0.5)


@pytest.mark.parametrize(
    ("family", "command"), [("mpt", "use pretrain_gpt2.py --model mpt"), ("t5", "use pretrain_t5.py")]
)
def test_the_configuration_of_a_run_of_another_family_is_rejected(family: str, command: str, tmp_path: Path) -> None:
    run = parse([], world_size=1, env={}, family=family)
    (tmp_path / "config.json").write_text(json.dumps(run.to_dict()))
    assert command in error_of(f"--model llama --config {tmp_path / 'config.json'}")


def test_help_is_that_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in (("--model llama --help-all", True), ("--help-all", False)):
        with pytest.raises(SystemExit) as stop:
            read(words)
        assert stop.value.code == 0
        assert ("default: gated-silu" in " ".join(capsys.readouterr().out.split())) == shown
    assert "--model STR" in help_text() and "--model STR" not in help_text(accepts_model=False)


def test_a_registered_family_is_named_like_the_others(tmp_path: Path) -> None:
    with toy_family(tmp_path):
        config = read("--model toy --toy-size 5", recipe="--hidden-bias --num-layers 6")
        assert (config.family, config.own.toy_size, config.model.activation) == ("toy", 5, "relu")
        assert (config.model.num_layers, config.model.hidden_bias) == (6, False)
        assert "toy" in error_of("--model unknown")
        assert FAMILIES["toy"].command == "pretrain_gpt2.py --model toy"
        assert FAMILIES["toy"].run_command == "run_gpt2.sh --model toy"
