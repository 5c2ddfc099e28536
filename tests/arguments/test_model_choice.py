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
from megatron.models.architectures import Architecture, decoder_families, find_architecture, list_model_types
from megatron.models.registry import FAMILIES
from tests.helpers.toy_family import register_toy_family

TYPE_SETTINGS = {
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
    "smollm3": {"no_rope_freq": "4", "rotary_base": 2e6, "untie_embeddings": False},
    "afmoe": {
        "no_rope_freq": "4", "attention_output_gate": True, "qk_norm": "head",
        "norm_placement": "both", "moe_router_score_function": "sigmoid", "window_attn_skip_freq": "4",
    },
    "gpt_oss": {
        "softmax_type": "learnable", "activation": "gated-quick-gelu", "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0, "hidden_bias": True, "rotary_truncate": False, "window_attn_skip_freq": "2",
    },
    "mimo_v2_flash": {
        "softmax_type": "learnable", "sink_layers": "window", "rotary_percent": 0.334, "rotary_local_base": 1e4,
        "attention_value_scale": 0.707, "window_attn_skip_freq": "6", "moe_router_enable_expert_bias": True,
    },
    "glm4_moe": {"rotary_percent": 0.5, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "olmo3": {"norm_placement": "after", "qk_norm": "all", "rotary_base": 5e5, "window_attn_skip_freq": "4"},
    "seed_oss": {"add_qkv_bias": True, "layernorm_epsilon": 1e-6},
    "ernie4_5": {"rotary_base": 5e5, "untie_embeddings": False},
    "hunyuan_v1_dense": {"qk_norm": "head", "qk_norm_order": "after"},
    "ministral3": {"rotary_scaling": "yarn", "attention_temperature_scale": 0.1, "attention_temperature_floor": 16384},
    "granite": {"softmax_scale": 1.0, "embedding_multiplier": 1.0},
    "phi3": {"rotary_percent": 1.0, "window_size": 0},
    "stablelm": {"normalization": "LayerNorm", "norm_bias": True, "rotary_percent": 0.25},
    "apertus": {"activation": "xielu", "qk_norm": "head", "rotary_scaling": "llama3"},
    "arcee": {"activation": "squared-relu", "layernorm_epsilon": 1e-5},
    "nemotron": {"normalization": "LayerNorm", "layernorm_1p": True, "activation": "squared-relu"},
    "cohere2": {
        "normalization": "LayerNorm", "norm_bias": False, "parallel_residual": "shared-norm", "logit_scale": 0.0625,
        "no_rope_freq": "4", "window_attn_skip_freq": "4",
    },
    "glm4": {"norm_placement": "both", "add_qkv_bias": True, "rotary_percent": 0.5},
    "deepseek_v3": {"multi_latent_attention": True, "moe_router_score_function": "sigmoid"},
    "kimi_k2": {"multi_latent_attention": True, "moe_router_score_function": "sigmoid"},
    "deepseek_v2": {"multi_latent_attention": True, "moe_router_pre_softmax": True, "latent_norm_epsilon": 1e-6},
    "glm4_moe_lite": {"multi_latent_attention": True, "layernorm_epsilon": 1e-5, "latent_norm_epsilon": 1e-6},
    "youtu": {"multi_latent_attention": True, "untie_embeddings": False},
    "minicpm3": {"multi_latent_attention": True, "embedding_multiplier": 12.0, "residual_scale": 1.4},
    "dots1": {"qk_norm": "head", "moe_router_score_function": "sigmoid", "window_size": 0},
    "olmoe": {"qk_norm": "all", "moe_router_pre_softmax": True},
    "minimax_m2": {"qk_norm": "all", "rotary_base": 5e6, "moe_router_enable_expert_bias": True},
    "ernie4_5_moe": {"rotary_base": 5e5, "moe_router_score_function": "softmax", "untie_embeddings": False},
    "falcon_h1": {"experimental_attention_variant": "parallel_mamba2", "mamba_norm": "none"},
    "granitemoehybrid": {"experimental_attention_variant": "mamba2", "position_embedding_type": "none"},
    "qwen3_next": {
        "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "4", "rotary_percent": 0.25,
        "attention_output_gate": True, "layernorm_1p": True, "moe_shared_expert_gate": True,
    },
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5"),
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "4", "qk_norm": "head"},
    ),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_moe"), {"linear_attention_freq": "4", "moe_router_pre_softmax": False}
    ),
    "olmo_hybrid": {
        "norm_placement": "after", "linear_norm_placement": "before", "linear_allow_neg_eigval": True,
        "linear_norm_epsilon": 1e-5, "linear_attention_freq": "4",
    },
    "kimi_linear": {
        "position_embedding_type": "none", "experimental_attention_variant": "kimi_delta",
        "linear_attention_freq": "4", "multi_latent_attention": True, "moe_router_score_function": "sigmoid",
    },
    "bailing_hybrid": {
        "experimental_attention_variant": "kimi_delta", "linear_attention_freq": "6", "attention_output_gate": True,
        "linear_full_rank_gates": True, "linear_decay_limit": 5.0, "rotary_base": 6e6,
    },
}  # fmt: skip
"""Model type -> some of its settings."""
COMMON_SETTINGS = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
SIZE_FLAGS = "--num-layers 6 --hidden-size 96 --num-attention-heads 6 --num-query-groups 3 --ff-hidden-size 100"
LATENT_SIZE_FLAGS = SIZE_FLAGS.replace("--num-query-groups 3 ", "")
"""Sizes of a model with multi-latent attention, which has a key head for each query head."""
EXPERT_FLAGS = "--num-experts 8 --moe-shared-expert-intermediate-size 64"
MODEL_NAMES = [*decoder_families(), *TYPE_SETTINGS]


def parse_line(words: str, program: str = "gpt2", recipe: str = "", **kwargs: Any) -> Config:
    env = {VARIABLE: recipe} if recipe else {}
    return parse(words.split(), world_size=1, env=env, family=program, accepts_model=True, **kwargs)


def error_message(words: str, program: str = "gpt2", **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(words, program, **kwargs)
    return str(exc_info.value)


def all_settings(config: Config) -> dict[tuple[str, str], Any]:
    """Return (section, field) -> value of all sections, without the name of the model."""
    sections = {name: values for name, values in config.to_dict().items() if isinstance(values, dict)}
    by_field = {(name, field): value for name, values in sections.items() for field, value in values.items()}
    del by_field["model", "architecture"]
    return by_field


def require_architecture(name: str) -> Architecture:
    result = find_architecture(name)
    assert result is not None
    return result


def size_flags(name: str) -> str:
    """Return flags with sizes for ``--model name``."""
    architecture = require_architecture(name)
    flags = LATENT_SIZE_FLAGS if architecture.settings["multi_latent_attention"] else SIZE_FLAGS
    if architecture.settings["experimental_attention_variant"] in ("mamba2", "parallel_mamba2"):
        flags += " --mamba-num-heads 8"
    if architecture.settings["experimental_attention_variant"] == "kimi_delta":  # a value head for each key head
        flags += " --linear-num-value-heads 16"
    has_window_groups = "window_num_query_groups" in architecture.required_fields
    return f"{flags} --kv-channels 12 --window-size 128 --window-num-query-groups 6" if has_window_groups else flags


def architecture_values(config: Config) -> dict[str, Any]:
    return {name: getattr(config.model, name) for name in ARCHITECTURE}


def test_model_names_are_decoder_families_and_hf_types() -> None:
    assert decoder_families() == [name for name, family in FAMILIES.items() if family.model_type == "decoder"]
    assert {*list_model_types()} == {*TYPE_SETTINGS}
    (option,) = [option for option in options_of(ModelConfig) if option.flag == "--model"]
    assert all(name in option.help for name in MODEL_NAMES)


@pytest.mark.parametrize("family", decoder_families())
def test_family_name_equals_family_program(family: str) -> None:
    config = parse_line(f"--model {family} {SIZE_FLAGS}")
    assert config.family == family
    assert all_settings(config) == all_settings(parse_line(SIZE_FLAGS, family))


@pytest.mark.parametrize("name", TYPE_SETTINGS)
def test_model_type_sets_architecture(name: str) -> None:
    experts = EXPERT_FLAGS if require_architecture(name).required_fields else ""
    config = parse_line(f"--model {name} {size_flags(name)} {experts}")
    assert config.family == "llama" and config.model.architecture == name
    expected = {**COMMON_SETTINGS, **TYPE_SETTINGS[name]}
    assert {field: getattr(config.model, field) for field in expected} == expected


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_model_name_preserves_sizes_and_dropout(name: str) -> None:
    """Sizes are those of the flags; dropout is that of the family."""
    experts = EXPERT_FLAGS if require_architecture(name).required_fields else ""
    other_fields = {field for field in vars(ModelConfig()) if field not in (*ARCHITECTURE, "architecture")}
    config, baseline = (
        parse_line(f"--model {name} {size_flags(name)} {experts}"),
        parse_line(f"{size_flags(name)} {experts}", require_architecture(name).family),
    )
    if config.model.multi_latent_attention:
        other_fields -= {"kv_hidden_size", "v_head_dim"}
    other_fields -= {"mamba_num_heads", "linear_num_value_heads"}  # have no effect in the baseline
    assert {field: getattr(config.model, field) for field in other_fields} == {
        field: getattr(baseline.model, field) for field in other_fields
    }
    assert config.model.num_layers == 6 and config.model.ff_hidden_size == 100


def test_architectures_set_all_fields() -> None:
    assert {*ARCHITECTURE} <= {*vars(ModelConfig())}
    assert all({*require_architecture(name).settings} == {*ARCHITECTURE} for name in MODEL_NAMES)
    assert all(
        require_architecture(name).fixed.items() <= require_architecture(name).settings.items() for name in MODEL_NAMES
    )


def test_flags_override_model_architecture() -> None:
    config = parse_line("--model gemma2 --norm-placement before --activation relu --tie-embeddings-and-output-weights")
    assert (config.model.norm_placement, config.model.activation) == ("before", "relu")
    assert config.model.layernorm_1p and config.family == "llama"


def test_model_name_preserves_other_megatron_defaults() -> None:
    config = parse_line("--model llama", defaults=GPT)
    assert architecture_values(config) == architecture_values(parse_line("", "llama"))
    assert (config.optimizer.warmup, config.model.make_vocab_size_divisible_by) == (0.0, 128)
    assert (config.model.attention_dropout, config.precision.dtype) == (0.1, "fp32")
    assert all_settings(parse_line("--model gpt2", defaults=GPT)) == all_settings(parse_line("", defaults=GPT))


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
def test_model_overrides_architecture_of_weaker_sources(words: str, recipe: str, changed: Mapping[str, Any]) -> None:
    config, baseline = parse_line(words, recipe=recipe), parse_line("", "llama")
    differing = {
        name: value
        for name, value in vars(config.model).items()
        if value != getattr(baseline.model, name) and name != "architecture"
    }
    assert (config.family, differing) == ("llama", changed)


def test_recipe_of_same_model_is_retained() -> None:
    """``bash run_qwen3.sh --model qwen3`` is ``bash run_qwen3.sh``."""
    recipe = "--model qwen3 --rotary-base 1000000 --tie-embeddings-and-output-weights"
    assert all_settings(parse_line("--model qwen3", recipe=recipe)) == all_settings(parse_line("", recipe=recipe))
    config = parse_line("", recipe=recipe)
    expected = parse_line(
        "--qk-layernorm --rotary-base 1000000 --norm-epsilon 1e-6 --tie-embeddings-and-output-weights", "llama"
    )
    assert all_settings(config) == all_settings(expected)


@pytest.mark.parametrize(
    ("name", "nearest"), [("lama", "llama"), ("Qwen3", "qwen3"), ("gpt-2", "gpt2"), ("mixtrall", "mixtral"), ("x", "")]
)
def test_unknown_model_error_lists_known_and_nearest(name: str, nearest: str) -> None:
    message = error_message(f"--model {name} --lr -1 --load nowhere")
    assert all(known_name in message for known_name in MODEL_NAMES) and f"got {name!r}" in message
    assert (f"did you mean {nearest}?" in message) == bool(nearest)
    assert "--lr must be" in message, "all problems are reported at once"


def test_non_decoder_model_error_names_program() -> None:
    assert "--model must name a decoder, got t5. T5 is trained by pretrain_t5.py" in error_message("--model t5")
    with pytest.raises(ConfigError, match="--model is not supported: it selects the decoder that pretrain_gpt2.py"):
        parse(["--model", "llama"], world_size=1, env={}, family="t5")


def test_moe_model_without_num_experts_raises() -> None:
    assert "--model mixtral needs --num-experts" in error_message("--model mixtral")
    assert "--model qwen2_moe needs --moe-shared-expert-intermediate-size" in error_message("--model qwen2_moe")
    assert parse_line("--model mixtral --num-experts 4").model.num_experts == 4


def test_custom_program_rejects_model_flag() -> None:
    for words, recipe in (("--model llama", ""), ("", "--model llama")):
        with pytest.raises(ConfigError, match="--model selects the decoder that pretrain_gpt2.py trains"):
            parse(words.split(), world_size=1, env={VARIABLE: recipe})


def test_custom_program_may_define_model_flag() -> None:
    def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model")
        return parser

    config = parse(["--model", "mine"], world_size=1, env={}, extra_args_provider=add_flags)
    assert (config.extra["model"], config.family) == ("mine", "gpt2")


def test_config_file_sets_model(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: qwen3\nnum-layers: 6\nrotary-base: 5e5\n")
    config = parse_line(f"--config {path}", recipe="--hidden-bias")
    assert (config.family, config.model.qk_norm, config.model.num_layers) == ("llama", "head", 6)
    assert (config.model.rotary_base, config.model.hidden_bias) == (5e5, False)
    overridden = parse_line(f"--config {path} --model olmo2")
    assert (overridden.model.qk_norm, overridden.model.rotary_base, overridden.model.num_layers) == ("all", 1e4, 6)
    path.write_text("model:\n  model: mpt\n  num_layers: 6\n")
    assert parse_line(f"--config {path}").family == "mpt"


@pytest.mark.parametrize("words", ["", "--model llama"])
def test_run_config_sets_family(words: str, tmp_path: Path) -> None:
    saved = parse_line("--model llama --qk-norm head --num-layers 6")
    (tmp_path / "config.json").write_text(json.dumps(saved.to_dict()))
    repeated = parse_line(f"--config {tmp_path / 'config.json'} {words}", defaults=GPT)
    assert repeated.family == "llama" and repeated.model.qk_norm == "head"
    assert architecture_values(repeated) == architecture_values(saved) and repeated.model.num_layers == 6


def test_model_flag_replaces_architecture_of_repeated_run(tmp_path: Path) -> None:
    saved = parse_line("--model llama --rotary-base 5e5 --num-layers 6 --lr 0.5")
    (tmp_path / "config.json").write_text(json.dumps(saved.to_dict()))
    repeated = parse_line(f"--config {tmp_path / 'config.json'} --model qwen3")
    assert architecture_values(repeated) == architecture_values(parse_line("--model qwen3"))
    assert (repeated.model.num_layers, repeated.optimizer.lr) == (6, 0.5)


@pytest.mark.parametrize(
    ("family", "command"), [("mpt", "use pretrain_gpt2.py --model mpt"), ("t5", "use pretrain_t5.py")]
)
def test_run_config_of_other_family_raises(family: str, command: str, tmp_path: Path) -> None:
    saved = parse([], world_size=1, env={}, family=family)
    (tmp_path / "config.json").write_text(json.dumps(saved.to_dict()))
    assert command in error_message(f"--model llama --config {tmp_path / 'config.json'}")


def test_help_shows_model_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for words, is_shown in (("--model llama --help-all", True), ("--help-all", False)):
        with pytest.raises(SystemExit) as exc_info:
            parse_line(words)
        assert exc_info.value.code == 0
        text = "".join(capsys.readouterr().out.split())  # lines may break after a hyphen
        assert ("default:gated-silu" in text) == is_shown
    assert "--model STR" in help_text() and "--model STR" not in help_text(accepts_model=False)


def test_registered_family_is_selected_by_model_flag(tmp_path: Path) -> None:
    with register_toy_family(tmp_path):
        config = parse_line("--model toy --toy-size 5", recipe="--hidden-bias --num-layers 6")
        assert (config.family, config.family_config.toy_size, config.model.activation) == ("toy", 5, "relu")
        assert (config.model.num_layers, config.model.hidden_bias) == (6, False)
        assert "toy" in error_message("--model unknown")
        assert FAMILIES["toy"].command == "pretrain_gpt2.py --model toy"
        assert FAMILIES["toy"].run_command == "run_gpt2.sh --model toy"
