"""Rotary settings of a config.json that holds the older and the newer form, against transformers' own classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface
from megatron.config import Config
from megatron.errors import CheckpointError

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
CONFIG_CLASSES: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "glm4_moe": transformers.Glm4MoeConfig,
    "mixtral": transformers.MixtralConfig,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PER_LAYER_TYPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def reference_rope_parameters(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of the class: of all layers, or of those without a window."""
    parameters = CONFIG_CLASSES[model_type].from_dict(json.loads(json.dumps(fields))).rope_parameters
    return dict(parameters.get("full_attention", parameters))


def assert_same_rope(config: Config, rope: dict[str, Any]) -> None:
    model = config.model
    assert model.rotary_base == rope["rope_theta"]
    assert {"none": "default"}.get(model.rotary_scaling, model.rotary_scaling) == rope["rope_type"]
    assert model.rotary_percent == rope.get("partial_rotary_factor", 1.0)
    if model.rotary_scaling != "none":
        assert model.rotary_scaling_factor == rope["factor"]
    if model.rotary_scaling == "yarn":
        assert model.rotary_original_positions == rope["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("qwen3", {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {**YARN, "rope_theta": 1e6}}),
        ("qwen3", {"rope_parameters": DEFAULT_ROPE, "rope_scaling": YARN}),
        ("qwen3", {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 5e5}),
        ("qwen3", {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("qwen3", {"rope_parameters": {**DEFAULT_ROPE, **YARN}, "rope_scaling": None, "rope_theta": 5e5}),
        ("llama", {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {}, "rope_theta": 5e5}),
        ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}),
        ("mixtral", {"rope_parameters": {**DEFAULT_ROPE, "rope_theta": 3e4}, "rope_scaling": YARN}),
        ("mixtral", {"rope_scaling": LINEAR}),
        ("gemma3_text", {"rope_parameters": PER_LAYER_TYPE, "rope_scaling": LINEAR}),
        ("gemma3_text", {"rope_parameters": PER_LAYER_TYPE, "rope_theta": 3e6, "rope_local_base_freq": 3e4}),
        ("gemma3_text", {"rope_scaling": LINEAR, "rope_theta": 3e6, "rope_local_base_freq": 3e4}),
        ("gemma3_text", {"rope_parameters": DEFAULT_ROPE}),
        ("glm4_moe", {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.25}, "rope_scaling": YARN}),
        (
            "glm4_moe",
            {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 1.0},
        ),
        ("glm4_moe", {"rope_parameters": DEFAULT_ROPE, "partial_rotary_factor": 1.0}),
        ("glm4_moe", {}),
    ],
)
def test_rope_settings_match_transformers(model_type: str, rope: dict[str, Any]) -> None:
    fields = {"model_type": model_type, **SIZES, **rope}
    config = config_from_huggingface(fields)
    assert_same_rope(config, reference_rope_parameters(model_type, fields))
    if model_type == "gemma3_text":
        hf_config = transformers.Gemma3TextConfig.from_dict(json.loads(json.dumps(fields)))
        assert config.model.rotary_local_base == hf_config.rope_parameters["sliding_attention"]["rope_theta"]


def test_overridden_rotary_base_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    config_from_huggingface(
        {"model_type": "qwen3", **SIZES, "rope_parameters": {**DEFAULT_ROPE, "rope_theta": 7e6}, "rope_scaling": YARN}
    )
    assert "the rotary base is 10000.0 instead of 7000000.0" in capsys.readouterr().err
    config_from_huggingface(
        {"model_type": "qwen3", **SIZES, "rope_parameters": DEFAULT_ROPE, "rope_scaling": {**YARN, "rope_theta": 1e6}}
    )
    assert capsys.readouterr().err == ""


def test_gemma3_rejects_scaling_ignored_by_transformers() -> None:
    with pytest.raises(CheckpointError, match="rope_scaling with type"):
        config_from_huggingface({"model_type": "gemma3_text", **SIZES, "rope_scaling": {"type": "linear", "factor": 8}})


@pytest.mark.parametrize("model_type", CONFIG_CLASSES)
def test_rope_scaling_added_to_export_takes_effect(model_type: str) -> None:
    config = config_from_huggingface({"model_type": model_type, **SIZES, "rope_theta": 7e5})
    exported = config_to_huggingface(config, "float32", model_type)
    assert_same_rope(config_from_huggingface(exported), reference_rope_parameters(model_type, exported))
    edited = {**exported, "rope_scaling": LINEAR}
    assert reference_rope_parameters(model_type, edited)["factor"] == 8.0
    assert_same_rope(config_from_huggingface(edited), reference_rope_parameters(model_type, edited))
    assert config_from_huggingface(edited).model.rotary_base == 7e5


def test_gemma3_scaled_windows_round_trip() -> None:
    rope = {layer_type: {**LINEAR, "rope_theta": 3e5} for layer_type in PER_LAYER_TYPE}
    config = config_from_huggingface({"model_type": "gemma3_text", **SIZES, "rope_parameters": rope})
    exported = config_to_huggingface(config, "float32", "gemma3_text")
    assert config_from_huggingface(exported).model == config.model
    assert transformers.Gemma3TextConfig.from_dict(exported).rope_parameters == rope
