"""Settings and weights of Qwen, Mistral, Gemma, OLMo and Llama there and back; which type a model of ours is there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, flags_of
from megatron.config import Config, parse
from megatron.config.decoder import IDENTITY, window_pattern
from megatron.errors import CheckpointError
from megatron.models.common import huggingface
from megatron.models.llama import huggingface_experts
from megatron.models.llama.huggingface import FORMATS, PRESETS
from tests.helpers.expert_models import EXPERTS
from tests.helpers.huggingface_models import config_of, save_model
from tests.helpers.modern_decoders import FLAGS, MODERN, SLIDING, drawn
from tests.tools.test_convert_hf import Run, convert, same, tensors_in

__all__ = ["convert"]  # the fixture

SMALL = {
    "hidden_size": 36, "intermediate_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 6, "vocab_size": 29, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache": True,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "qwen2": {  # Qwen2.5-7B-Instruct, with the scaling that its page gives
        **SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "max_position_embeddings": 32768, "max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": False, "transformers_version": "4.43.1", "use_sliding_window": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}, "use_mrope": False,
    },
    "qwen3": {  # Qwen3-8B
        **SMALL, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    },
    "mistral": {  # Mistral-7B-v0.1
        **SMALL, "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "max_position_embeddings": 32768,
        "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "gemma2": {  # gemma-2-9b
        **SMALL, "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "model_type": "gemma2", "query_pre_attn_scalar": 224, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "gemma3_text": {  # gemma-3-1b-pt
        **SMALL, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "olmo2": {  # OLMo-2-1124-7B
        **SMALL, "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 4096, "model_type": "olmo2", "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""As the hub has them, in small."""
READ: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("kind", HUB)
def test_configs_of_the_hub_are_read_and_written_as_what_they_were(kind: str) -> None:
    config = config_from_huggingface(HUB[kind])
    assert {name: getattr(config.model, name) for name in READ[kind]} == READ[kind]
    assert (config.model.position_embedding_type, config.model.normalization) == ("rope", "RMSNorm")
    back = config_to_huggingface(config, "bfloat16")
    same_word = {key: back[key] for key in HUB[kind] if key in back and key not in ("rope_scaling", "sliding_window")}
    assert same_word == {key: HUB[kind][key] for key in same_word}
    assert {"model_type", "architectures", "rope_theta", "num_key_value_heads"} <= set(same_word)
    again = config_from_huggingface(json.loads(json.dumps(back)))
    assert again.model == config.model


@pytest.mark.parametrize(
    "kind", [*MODERN, *(pytest.param(f"random {seed}", marks=pytest.mark.slow) for seed in range(24))]
)
def test_settings_come_back_and_their_class_takes_them(kind: str) -> None:
    model = MODERN[kind] if kind in MODERN else drawn(int(kind.split()[1]))
    theirs = model.their_config()
    config = model.our_config()
    fields = json.loads(json.dumps(config_to_huggingface(config, "float32", theirs.model_type)))
    taken = type(theirs).from_dict(fields)
    assert config_from_huggingface(taken.to_dict()).model == config.model
    assert config_from_huggingface(fields).model == config.model
    apart = {
        "transformers_version",
        "architectures",
        "dtype",
        "use_cache",
        "_sliding_window_pattern",
        "rope_parameters",
    }
    apart |= {"bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "sliding_window_pattern"}
    if SLIDING not in (getattr(theirs, "layer_types", None) or [SLIDING]):
        apart |= {"sliding_window", "use_sliding_window"}  # which no layer reads
    there = {key: value for key, value in theirs.to_dict().items() if key not in apart}
    assert {key: taken.to_dict()[key] for key in there} == there
    for name in ("rope_theta", "rope_type", "factor", "attention_factor"):
        said = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        found = taken.rope_parameters.get("full_attention", taken.rope_parameters)
        assert found.get(name) == said.get(name)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("qwen3", "gemma3") else pytest.mark.slow) for kind in MODERN]
)
def test_weights_go_there_and_back_bit_for_bit_and_compute_the_same(kind: str, convert: Run, tmp_path: Path) -> None:
    import torch

    model = MODERN[kind].their_model(torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0 and "pretrain_gpt2.py --model llama --load" in output, output
    words = shlex.split(output.split("pretrain_gpt2.py ")[1])
    parsed = parse([*words, "--data-path", "none", "--seq-length", "12"], world_size=1, accepts_model=True)
    assert parsed.identity() == MODERN[kind].our_config().identity()
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert same(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "theirs"))
    theirs, ours = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("theirs", "back"))
    assert theirs["model_type"] == ours["model_type"] and theirs["architectures"] == ours["architectures"]


def test_a_model_of_two_ranks_goes_there_and_back_to_the_bit(convert: Run, tmp_path: Path) -> None:
    config = parse(
        f"{FLAGS} {MODERN['gemma3'].flags} --data-path none --seq-length 12".split(), world_size=1, family="llama"
    )
    path = save_model(tmp_path / "run", config, ranks=2)
    assert convert("export", "--load", path, "--output", tmp_path / "theirs", "--verify")[0] == 0
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "again")[0] == 0
    assert convert("export", "--load", tmp_path / "again", "--output", tmp_path / "back")[0] == 0
    assert same(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "theirs"))


# Which type a model of ours is.

ROPE = {"position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "gated-silu"}
TYPES: list[tuple[dict[str, Any], str]] = [
    ({}, "llama"),
    ({"hidden_bias": True}, "llama"),
    ({"window_size": 3}, "mistral"),
    ({"add_qkv_bias": True}, "qwen2"),
    ({"window_size": 3, "window_attn_skip_freq": "[0,1]"}, ""),
    ({"add_qkv_bias": True, "window_size": 3, "window_attn_skip_freq": "[0,1]"}, "qwen2"),
    ({"qk_norm": "head", "kv_hidden_size": 10}, "qwen3"),
    ({"qk_norm": "all", "norm_placement": "after"}, "olmo2"),
]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("changed", "kind"), TYPES)
def test_the_type_follows_from_the_settings_in_whatever_program(
    family: str, changed: dict[str, Any], kind: str
) -> None:
    config = config_of(family, **{**ROPE, **changed})
    if kind:
        assert config_to_huggingface(config, "float32")["model_type"] == kind
    else:
        with pytest.raises(CheckpointError, match="mistral supports windows in all layers only"):
            config_to_huggingface(config, "float32")


def test_a_type_may_be_named_where_several_hold_the_model(convert: Run, tmp_path: Path) -> None:
    config = config_of("llama")
    assert config_to_huggingface(config, "float32", "mistral")["sliding_window"] is None
    save_model(tmp_path / "run", config)
    words = ("export", "--load", tmp_path / "run", "--output", tmp_path / "out", "--model-type")
    code, output = convert(*words, "qwen3")
    assert code == 3 and "nearest is qwen3: --qk-norm must be head, got none" in output
    code, output = convert(*words, "opt")
    assert code == 3 and "--model-type 'opt' is not available" in output
    assert convert(*words, "mistral")[0] == 0
    assert convert("import", "--input", tmp_path / "out", "--output", tmp_path / "again")[0] == 0
    assert convert("export", "--load", tmp_path / "again", "--output", tmp_path / "back")[0] == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "mistral"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rotary_percent": 0.5}, "--rotary-percent must be 1.0, got 0.5"),
        ({"qk_norm": "head", "norm_placement": "both"}, "--"),
        ({"activation": "squared-relu"}, "gated-silu or gated-gelu, got squared-relu"),
        ({"clip_qkv": 6.0}, "--clip-qkv must be 0.0, got 6.0"),
        ({"embed_layernorm": True}, "--embed-layernorm must be False, got True"),
        ({"final_logit_softcapping": 30.0}, "--final-logit-softcapping must be 0.0, got 30.0"),
    ],
)
def test_what_no_type_can_hold_is_refused_naming_the_settings(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match="this model has no Hugging Face format; the closest is") as raised:
        config_to_huggingface(config_of("llama", **changed), "float32")
    assert named in str(raised.value)


def test_no_setting_of_a_decoder_is_passed_over_by_a_format() -> None:
    """Each is one that formats compare, or one of the numbers that go with another."""
    with_others = {
        "num_query_groups", "rotary_base", "rotary_scaling_factor", "rotary_low_frequency_factor",
        "rotary_high_frequency_factor", "rotary_original_positions", "rotary_beta_fast", "rotary_beta_slow",
        "rotary_attention_factor", "alibi_bias_max", "window_attn_skip_freq", "mup_base_head_dim",
    }  # fmt: skip
    with_others |= {*huggingface_experts._PLAIN, *huggingface_experts._SIZES}
    assert set(IDENTITY) == with_others | (set(huggingface._PLAIN) - {"apply_residual_connection_post_layernorm"})


def test_each_type_is_held_by_its_own_format_alone() -> None:
    experts = {kind: config_to_huggingface(EXPERTS[kind].our_config(), "float32") for kind in EXPERTS}
    kinds = {**HUB, **experts, "llama": {**HUB["mistral"], "model_type": "llama", "sliding_window": None}}
    for preset in PRESETS:
        config = config_from_huggingface(kinds[preset.model_type])
        fitting = [one.model_types[0] for one in FORMATS if not list(one.problems(config))]
        assert fitting == (["llama", "mistral"] if preset.model_type == "llama" else [preset.model_type])


# What of theirs is refused.

QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4, "rope_scaling": None}


@pytest.mark.parametrize(
    ("kind", "changed", "named"),
    [
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type 'mrope' (supported: "),
        ("qwen2", {"use_mrope": True}, "use_mrope True (supported: False)"),
        ("qwen2", {**QWEN2_WINDOW, "sliding_window": 1}, "sliding_window 1 with a window in 2 layers"),
        ("qwen2", {**QWEN2_WINDOW, "layer_types": ["chunked_attention"] * 6}, "layer_types with chunked_attention"),
        ("qwen2", {**QWEN2_WINDOW, "layer_types": [SLIDING]}, "layer_types with 1 entries for num_hidden_layers 6"),
        ("qwen2", {"layer_types": [SLIDING] * 6}, "sliding_window None with a window in 6 layers"),
        ("qwen3", {"attention_bias": True}, "attention_bias True (supported: False)"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate False (supported: "),
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
def test_what_our_decoders_have_not_is_refused_by_name(kind: str, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        config_from_huggingface({**HUB[kind], **changed})
    assert f"our decoders do not support these settings of {kind}: {named}" in str(raised.value)


def config_with(kind: str, **changed: Any) -> Config:
    return config_from_huggingface({**HUB[kind], **changed})


def test_windows_by_layer_are_what_their_classes_make_of_a_config() -> None:
    from transformers import Gemma2Config, Gemma3TextConfig, Qwen2Config

    for theirs in (
        Qwen2Config(**{**HUB["qwen2"], **QWEN2_WINDOW}),
        Gemma2Config(**HUB["gemma2"]),
        Gemma3TextConfig(**{**HUB["gemma3_text"], "sliding_window_pattern": 4, "num_hidden_layers": 11}),
    ):
        said = {**theirs.to_dict()}
        config = config_from_huggingface(said)
        del said["layer_types"]
        again = config_from_huggingface(
            {**said, "sliding_window_pattern": 4} if "gemma3" in theirs.model_type else said
        )
        assert again.model == config.model
        pattern = window_pattern(config.model.window_attn_skip_freq, config.model.num_layers)
        assert pattern == tuple(kind == SLIDING for kind in theirs.layer_types)
        assert config.model.window_size == theirs.sliding_window - 1


def test_factors_of_yarn_that_follow_from_others_are_worked_out() -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    assert config_with("qwen3", rope_scaling=scaling).model.rotary_original_positions == 40960
    plain = config_with("qwen3", rope_scaling={**scaling, "mscale": 0.7}).model
    assert plain.rotary_attention_factor == 0.0
    both = config_with("qwen3", rope_scaling={**scaling, "mscale": 1.0, "mscale_all_dim": 0.5}).model
    assert both.rotary_attention_factor == pytest.approx(1.1386294361 / 1.0693147181, rel=1e-9)


def test_an_old_gemma_3_and_one_of_transformers_5_say_the_same() -> None:
    new = dict(HUB["gemma3_text"])
    for name in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        del new[name]
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    old = {**HUB["gemma3_text"], "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert config_from_huggingface(new).model == config_from_huggingface(old).model
    assert config_from_huggingface(new).model.rotary_scaling_factor == 8.0


def test_the_flags_of_each_build_it() -> None:
    for theirs in HUB.values():
        config = config_from_huggingface(theirs)
        parsed = parse([*flags_of(config), "--data-path", "none", "--seq-length", "4096"], world_size=1, family="llama")
        assert parsed.identity() == config.identity()
