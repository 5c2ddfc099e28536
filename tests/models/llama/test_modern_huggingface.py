"""Settings and weights of Qwen, Mistral, Gemma, OLMo and Llama there and back; which type a model of ours is there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, model_flags
from megatron.config import Config, latent_attention, parse, recurrent
from megatron.config.decoder import IDENTITY, window_pattern
from megatron.errors import CheckpointError
from megatron.models.common import huggingface
from megatron.models.llama import huggingface_experts
from megatron.models.llama.huggingface import FORMATS, PRESETS
from tests.helpers.expert_models import MOE_CASES
from tests.helpers.extras_models import HUB_CONFIGS as EXTRA_HUB_CONFIGS
from tests.helpers.huggingface_models import make_family_config, save_model
from tests.helpers.latent_models import LATENT_CASES
from tests.helpers.modern_decoders import FLAGS, MODEL_CASES, SLIDING, random_case
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

COMMON_FIELDS = {
    "hidden_size": 36, "intermediate_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 6, "vocab_size": 29, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache": True,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {  # Qwen2.5-7B-Instruct, with the scaling that its page gives
        **COMMON_FIELDS, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "max_position_embeddings": 32768, "max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": False, "transformers_version": "4.43.1", "use_sliding_window": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}, "use_mrope": False,
    },
    "qwen3": {  # Qwen3-8B
        **COMMON_FIELDS, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 16,
        "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "mistral": {  # Mistral-7B-v0.1
        **COMMON_FIELDS, "architectures": ["MistralForCausalLM"], "hidden_act": "silu",
        "max_position_embeddings": 32768, "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "gemma2": {  # gemma-2-9b
        **COMMON_FIELDS, "architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "model_type": "gemma2", "query_pre_attn_scalar": 224, "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "gemma3_text": {  # gemma-3-1b-pt
        **COMMON_FIELDS, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "olmo2": {  # OLMo-2-1124-7B
        **COMMON_FIELDS, "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 4096, "model_type": "olmo2", "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""As the hub has them, in small."""
EXPECTED_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "add_qkv_bias": True, "hidden_bias": False, "rotary_scaling": "yarn", "rotary_scaling_factor": 4.0,
        "rotary_original_positions": 32768, "rotary_base": 1000000.0, "window_size": 0, "kv_hidden_size": 6,
        "untie_embeddings": True, "qk_norm": "none",
    },
    "qwen3": {"qk_norm": "head", "kv_hidden_size": 16, "num_query_groups": 2, "window_size": 0, "add_qkv_bias": False},
    "mistral": {"window_size": 4095, "window_attn_skip_freq": "", "activation": "gated-silu"},
    "gemma2": {
        "layernorm_1p": True, "norm_placement": "both", "scale_embeddings": True, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "softmax_scale": 224**-0.5, "window_size": 4095,
        "window_attn_skip_freq": "2", "activation": "gated-gelu", "untie_embeddings": False, "rotary_local_base": 0.0,
    },
    "gemma3_text": {
        "qk_norm": "head", "softmax_scale": 0.0, "window_size": 511, "window_attn_skip_freq": "6",
        "rotary_local_base": 10000.0, "rotary_base": 1000000.0, "final_logit_softcapping": 0.0,
    },
    "olmo2": {"norm_placement": "after", "qk_norm": "all", "kv_hidden_size": 6, "layernorm_epsilon": 1e-6},
}  # fmt: skip


@pytest.mark.parametrize("model_type", HUB_CONFIGS)
def test_hub_configs_round_trip(model_type: str) -> None:
    config = config_from_huggingface(HUB_CONFIGS[model_type])
    assert {name: getattr(config.model, name) for name in EXPECTED_FIELDS[model_type]} == EXPECTED_FIELDS[model_type]
    assert (config.model.position_embedding_type, config.model.normalization) == ("rope", "RMSNorm")
    exported = config_to_huggingface(config, "bfloat16")
    common_fields = {
        key: exported[key]
        for key in HUB_CONFIGS[model_type]
        if key in exported and key not in ("rope_scaling", "sliding_window")
    }
    assert common_fields == {key: HUB_CONFIGS[model_type][key] for key in common_fields}
    assert {"model_type", "architectures", "rope_theta", "num_key_value_heads"} <= set(common_fields)
    reimported = config_from_huggingface(json.loads(json.dumps(exported)))
    assert reimported.model == config.model


@pytest.mark.parametrize(
    "model_name", [*MODEL_CASES, *(pytest.param(f"random {seed}", marks=pytest.mark.slow) for seed in range(24))]
)
def test_config_round_trips_through_transformers(model_name: str) -> None:
    model = MODEL_CASES[model_name] if model_name in MODEL_CASES else random_case(int(model_name.split()[1]))
    hf_config = model.huggingface_config()
    config = model.our_config()
    fields = json.loads(json.dumps(config_to_huggingface(config, "float32", hf_config.model_type)))
    restored = type(hf_config).from_dict(fields)
    assert config_from_huggingface(restored.to_dict()).model == config.model
    assert config_from_huggingface(fields).model == config.model
    ignored = {
        "transformers_version",
        "architectures",
        "dtype",
        "use_cache",
        "_sliding_window_pattern",
        "rope_parameters",
    }
    ignored |= {"bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "sliding_window_pattern"}
    if SLIDING not in (getattr(hf_config, "layer_types", None) or [SLIDING]):
        ignored |= {"sliding_window", "use_sliding_window"}  # which no layer reads
    hf_fields = {key: value for key, value in hf_config.to_dict().items() if key not in ignored}
    assert {key: restored.to_dict()[key] for key in hf_fields} == hf_fields
    for name in ("rope_theta", "rope_type", "factor", "attention_factor"):
        expected_rope = hf_config.rope_parameters.get("full_attention", hf_config.rope_parameters)
        restored_rope = restored.rope_parameters.get("full_attention", restored.rope_parameters)
        assert restored_rope.get(name) == expected_rope.get(name)


@pytest.mark.parametrize(
    "model_name",
    [
        pytest.param(model_type, marks=() if model_type in ("qwen3", "gemma3") else pytest.mark.slow)
        for model_type in MODEL_CASES
    ],
)
def test_weight_round_trip_is_bitwise_and_verifies_logits(
    model_name: str, convert: ConvertCommand, tmp_path: Path
) -> None:
    import torch

    model = MODEL_CASES[model_name].huggingface_model(torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0 and "pretrain_gpt2.py --model llama --load" in output, output
    flags = shlex.split(output.split("pretrain_gpt2.py ")[1])
    parsed = parse([*flags, "--data-path", "none", "--seq-length", "12"], world_size=1, accepts_model=True)
    assert parsed.identity() == MODEL_CASES[model_name].our_config().identity()
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert are_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs"))
    original_config, exported_config = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back")
    )
    assert (
        original_config["model_type"] == exported_config["model_type"]
        and original_config["architectures"] == exported_config["architectures"]
    )


def test_sharded_model_round_trip_is_bitwise(convert: ConvertCommand, tmp_path: Path) -> None:
    config = parse(
        f"{FLAGS} {MODEL_CASES['gemma3'].flags} --data-path none --seq-length 12".split(), world_size=1, family="llama"
    )
    path = save_model(tmp_path / "run", config, num_ranks=2)
    assert convert("export", "--load", path, "--output", tmp_path / "theirs", "--verify")[0] == 0
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "again")[0] == 0
    assert convert("export", "--load", tmp_path / "again", "--output", tmp_path / "back")[0] == 0
    assert are_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs"))


# Which type a model of ours is.

BASE_FIELDS = {"position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "gated-silu"}
TYPE_CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "llama"),
    ({"hidden_bias": True}, "llama"),
    ({"window_size": 3}, "mistral"),
    ({"add_qkv_bias": True}, "qwen2"),
    ({"window_size": 3, "window_attn_skip_freq": "[0,1]"}, "smollm3"),
    ({"add_qkv_bias": True, "window_size": 3, "window_attn_skip_freq": "[0,1]"}, "qwen2"),
    ({"qk_norm": "head", "kv_hidden_size": 10}, "qwen3"),
    ({"qk_norm": "all", "norm_placement": "after"}, "olmo2"),
]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("overrides", "model_type"), TYPE_CASES)
def test_model_type_follows_from_settings_in_any_family(
    family: str, overrides: dict[str, Any], model_type: str
) -> None:
    config = make_family_config(family, **{**BASE_FIELDS, **overrides})
    if model_type:
        assert config_to_huggingface(config, "float32")["model_type"] == model_type
    else:
        with pytest.raises(CheckpointError, match="mistral supports windows in all layers only"):
            config_to_huggingface(config, "float32")


def test_model_type_can_be_named_if_several_match(convert: ConvertCommand, tmp_path: Path) -> None:
    config = make_family_config("llama")
    assert config_to_huggingface(config, "float32", "mistral")["sliding_window"] is None
    save_model(tmp_path / "run", config)
    export_args = ("export", "--load", tmp_path / "run", "--output", tmp_path / "out", "--model-type")
    code, output = convert(*export_args, "qwen3")
    assert code == 3 and "closest is qwen3: --qk-norm must be head, got none" in output
    code, output = convert(*export_args, "opt")
    assert code == 3 and "--model-type 'opt' is not available" in output
    assert convert(*export_args, "mistral")[0] == 0
    assert convert("import", "--input", tmp_path / "out", "--output", tmp_path / "again")[0] == 0
    assert convert("export", "--load", tmp_path / "again", "--output", tmp_path / "back")[0] == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "mistral"


@pytest.mark.parametrize(
    ("overrides", "expected_message"),
    [
        ({"rotary_percent": 0.5, "scale_embeddings": True}, "phi3: --scale-embeddings must be False, got True"),
        ({"qk_norm": "head", "norm_placement": "both"}, "--"),
        ({"activation": "relu"}, "gated-silu or gated-gelu, got relu"),
        ({"clip_qkv": 6.0}, "--clip-qkv must be 0.0, got 6.0"),
        ({"embed_layernorm": True}, "--embed-layernorm must be False, got True"),
        ({"final_logit_softcapping": 30.0}, "--final-logit-softcapping must be 0.0, got 30.0"),
    ],
)
def test_export_rejects_settings_no_type_supports(overrides: dict[str, Any], expected_message: str) -> None:
    with pytest.raises(CheckpointError, match="this model has no Hugging Face format; the closest is") as excinfo:
        config_to_huggingface(make_family_config("llama", **overrides), "float32")
    assert expected_message in str(excinfo.value)


def test_formats_cover_every_decoder_setting() -> None:
    """Each is one that formats compare, or one of the numbers that go with another."""
    dependent_fields = {
        "num_query_groups", "rotary_base", "rotary_scaling_factor", "rotary_low_frequency_factor",
        "rotary_high_frequency_factor", "rotary_original_positions", "rotary_beta_fast", "rotary_beta_slow",
        "rotary_attention_factor", "rotary_short_factors", "rotary_long_factors", "attention_temperature_floor",
        "alibi_bias_max", "window_attn_skip_freq", "mup_base_head_dim", "moe_router_group_score_topk", "mtp_num_layers",
    }  # fmt: skip
    dependent_fields |= {*latent_attention.LATENT_ONLY} - {"multi_latent_attention"}
    dependent_fields |= {"linear_attention_freq", *recurrent.LINEAR, *recurrent.MAMBA}
    dependent_fields |= {*huggingface_experts._MIXTRAL_SETTINGS, *huggingface_experts._SIZES}
    dependent_fields |= {"moe_use_residual"}  # rejected before formats are compared
    assert set(IDENTITY) == dependent_fields | (
        set(huggingface._GPT2_SETTINGS) - {"apply_residual_connection_post_layernorm"}
    )


def test_hub_config_matches_only_its_format() -> None:
    experts = {
        model_type: config_to_huggingface(MOE_CASES[model_type].our_config(), "float32") for model_type in MOE_CASES
    }
    latents = {
        model_type: config_to_huggingface(case.our_config(), "float32", model_type)
        for model_type, case in LATENT_CASES.items()
    }
    also_matching = {
        "llama": ["mistral", "smollm3"],
        "mistral": ["smollm3"],
        "deepseek_v3": ["glm4_moe_lite"],
        "youtu": ["minicpm3"],
    }
    configs = {
        **HUB_CONFIGS,
        **EXTRA_HUB_CONFIGS,
        **experts,
        **latents,
        "llama": {**HUB_CONFIGS["mistral"], "model_type": "llama", "sliding_window": None},
    }
    for preset in PRESETS:
        config = config_from_huggingface(configs[preset.model_type])
        matching_types = [hf_format.model_types[0] for hf_format in FORMATS if not list(hf_format.problems(config))]
        expected_types = [preset.model_type, *also_matching.get(preset.model_type, [])]
        if preset.model_type == "glm4_moe_lite":
            expected_types = ["deepseek_v3", "glm4_moe_lite"]
        assert matching_types == expected_types, preset.model_type


# What of theirs is refused.

QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4, "rope_scaling": None}


@pytest.mark.parametrize(
    ("model_type", "overrides", "expected_message"),
    [
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type 'mrope' (supported: "),
        ("qwen2", {"use_mrope": True}, "use_mrope True (supported: False)"),
        ("qwen2", {**QWEN2_WINDOW, "sliding_window": 1}, "sliding_window 1 with a window in 2 layers"),
        ("qwen2", {**QWEN2_WINDOW, "layer_types": ["chunked_attention"] * 6}, "layer_types with chunked_attention"),
        ("qwen2", {**QWEN2_WINDOW, "layer_types": [SLIDING]}, "layer_types with 1 entries for num_hidden_layers 6"),
        ("qwen2", {"layer_types": [SLIDING] * 6}, "sliding_window None with a window in 6 layers"),
        ("qwen3", {"attention_bias": True}, "attention_bias True (supported: False)"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 (supported: 1.0)"),
        ("mistral", {"layer_types": [SLIDING, *["full_attention"] * 5]}, "layer_types with full_attention and"),
        ("olmo2", {"sliding_window": 8}, "sliding_window 8 with a window in 0 layers (supported: none)"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                }
            },
            "rope_type 'linear' of layers with a window",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_import_rejects_unsupported_settings_by_name(
    model_type: str, overrides: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(CheckpointError) as excinfo:
        config_from_huggingface({**HUB_CONFIGS[model_type], **overrides})
    assert f"our decoders do not support these settings of {model_type}: {expected_message}" in str(excinfo.value)


def read_hub_config(model_type: str, **overrides: Any) -> Config:
    return config_from_huggingface({**HUB_CONFIGS[model_type], **overrides})


def test_window_pattern_matches_hugging_face_layer_types() -> None:
    from transformers import Gemma2Config, Gemma3TextConfig, Qwen2Config

    for hf_config in (
        Qwen2Config(**{**HUB_CONFIGS["qwen2"], **QWEN2_WINDOW}),
        Gemma2Config(**HUB_CONFIGS["gemma2"]),
        Gemma3TextConfig(**{**HUB_CONFIGS["gemma3_text"], "sliding_window_pattern": 4, "num_hidden_layers": 11}),
    ):
        fields = {**hf_config.to_dict()}
        config = config_from_huggingface(fields)
        del fields["layer_types"]
        inferred = config_from_huggingface(
            {**fields, "sliding_window_pattern": 4} if "gemma3" in hf_config.model_type else fields
        )
        assert inferred.model == config.model
        pattern = window_pattern(config.model.window_attn_skip_freq, config.model.num_layers)
        assert pattern == tuple(layer_type == SLIDING for layer_type in hf_config.layer_types)
        assert config.model.window_size == hf_config.sliding_window - 1


def test_derived_yarn_factors_are_computed() -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    assert read_hub_config("qwen3", rope_scaling=scaling).model.rotary_original_positions == 40960
    plain = read_hub_config("qwen3", rope_scaling={**scaling, "mscale": 0.7}).model
    assert plain.rotary_attention_factor == 0.0
    with_both = read_hub_config("qwen3", rope_scaling={**scaling, "mscale": 1.0, "mscale_all_dim": 0.5}).model
    assert with_both.rotary_attention_factor == pytest.approx(1.1386294361 / 1.0693147181, rel=1e-9)


def test_old_and_new_gemma_3_configs_are_equal() -> None:
    new = dict(HUB_CONFIGS["gemma3_text"])
    for name in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        del new[name]
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    old = {**HUB_CONFIGS["gemma3_text"], "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert config_from_huggingface(new).model == config_from_huggingface(old).model
    assert config_from_huggingface(new).model.rotary_scaling_factor == 8.0


def test_flags_rebuild_hub_models() -> None:
    for hub_config in HUB_CONFIGS.values():
        config = config_from_huggingface(hub_config)
        parsed = parse(
            [*model_flags(config), "--data-path", "none", "--seq-length", "4096"], world_size=1, family="llama"
        )
        assert parsed.identity() == config.identity()
