"""LLaMA's settings and weights there and back: bit for bit, and refused where either side has no counterpart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, model_flags
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import parse
from megatron.errors import CheckpointError
from megatron.models.llama.huggingface import FORMAT
from tests.helpers.huggingface_models import make_family_config, save_model
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

LLAMA_32 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu", "hidden_size": 16,
    "initializer_range": 0.02, "intermediate_size": 24, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 29,
}  # fmt: skip
"""As the hub has it, in small."""
LLAMA_1 = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 24, "vocab_size": 29,
    "num_attention_heads": 4, "num_hidden_layers": 2, "max_sequence_length": 2048,
}  # fmt: skip
"""The first one's, which says much less."""


def test_reads_hub_configs() -> None:
    config = config_from_huggingface(LLAMA_32)
    llama = config.model
    assert (llama.num_query_groups, llama.rotary_base, llama.rotary_scaling) == (2, 500000.0, "llama3")
    assert (llama.rotary_scaling_factor, llama.rotary_original_positions) == (32.0, 8192)
    assert (config.model.kv_hidden_size, config.model.max_position_embeddings) == (8, 131072)
    assert not config.model.untie_embeddings and not config.model.hidden_bias
    llama_1 = config_from_huggingface(LLAMA_1)
    assert (llama_1.model.num_query_groups, llama_1.model.rotary_base, llama_1.model.rotary_scaling) == (
        4,
        10000.0,
        "none",
    )
    assert (llama_1.model.layernorm_epsilon, llama_1.model.untie_embeddings, llama_1.model.kv_hidden_size) == (
        1e-6,
        True,
        4,
    )
    linear_rope = {**LLAMA_1, "rope_scaling": {"type": "linear", "factor": 4}}
    assert (
        config_from_huggingface(linear_rope).model.rotary_scaling_factor,
        config_from_huggingface(linear_rope).model,
    ) == (
        4,
        config_from_huggingface({**LLAMA_1, "rope_parameters": {"rope_type": "linear", "factor": 4}}).model,
    )


@pytest.mark.parametrize(
    ("overrides", "expected_message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_type 'dynamic' (supported: default, linear, llama3, yarn, longrope)",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_type 'llama3' without low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta": 1}}, "beta of rope_type 'linear'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"attention_bias": True}, "attention_bias True with mlp_bias False"),
        ({"mlp_bias": True}, "attention_bias False with mlp_bias True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects_unsupported_settings_by_name(overrides: dict[str, Any], expected_message: str) -> None:
    with pytest.raises(CheckpointError) as excinfo:
        config_from_huggingface({**LLAMA_32, **overrides})
    assert f"our decoders do not support these settings of llama: {expected_message}" in str(excinfo.value)


def test_export_rejects_unsupported_settings_together() -> None:
    with pytest.raises(CheckpointError) as excinfo:
        config = make_family_config("llama", activation="relu", num_attention_heads=3, kv_hidden_size=4)
        config_to_huggingface(config, "float32", "llama")
    assert all(text in str(excinfo.value) for text in ("got relu", "got 16 and 3"))


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
def test_config_round_trips_through_transformers(scaling: str) -> None:
    from transformers import LlamaConfig

    values = {"attention_dropout": 0.25, "hidden_dropout": 0.125, "hidden_bias": True, "layernorm_epsilon": 1e-6}
    rotary = {"rotary_base": 500.0, "rotary_scaling": scaling, "num_query_groups": 1, "kv_hidden_size": 6}
    config = make_family_config("llama", **values, **rotary, activation="gated-gelu", untie_embeddings=False)
    fields = config_to_huggingface(config, "float32")
    hf_config = LlamaConfig.from_dict(json.loads(json.dumps(fields)))
    assert (hf_config.head_dim, hf_config.num_key_value_heads, hf_config.tie_word_embeddings) == (6, 1, True)
    assert hf_config.rope_parameters["rope_theta"] == 500.0
    assert hf_config.rope_parameters["rope_type"] == {"none": "default"}.get(scaling, scaling)
    restored = config_from_huggingface(hf_config.to_dict())
    assert restored.identity() == config.identity() and restored.model == config.model


@pytest.mark.parametrize("hub_config", [LLAMA_32, LLAMA_1], ids=["tied", "untied"])
def test_flags_rebuild_hub_model(hub_config: dict[str, Any]) -> None:
    config = config_from_huggingface(hub_config)
    flags = model_flags(config)
    assert ("--tie-embeddings-and-output-weights" in flags) == (hub_config is LLAMA_32)
    parsed = parse([*flags, "--data-path", "x", "--dry-run"], world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model


def save_reference(folder: Path, **overrides: Any) -> dict[str, torch.Tensor]:
    """Save a random model of theirs; return its state dict."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 20}
    fields |= {"num_hidden_layers": 2, "vocab_size": 29, "max_position_embeddings": 12}
    model = LlamaForCausalLM(LlamaConfig(**fields, **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.state_dict()


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}],
    ids=["untied", "tied, biases"],
)
def test_folder_round_trip_is_bitwise_and_verifies_logits(
    overrides: dict[str, Any], convert: ConvertCommand, tmp_path: Path
) -> None:
    state = save_reference(tmp_path / "theirs", **overrides)
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0 and "pretrain_gpt2.py --model llama --load" in output, output
    export_flags = ["--max-shard-bytes", 20_000, "--verify"]
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", *export_flags)
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    exported = read_tensors(tmp_path / "back")
    assert are_equal(exported, {key: state[key] for key in exported})
    assert set(state) - set(exported) == ({"lm_head.weight"} if overrides else set())


def test_sharded_model_round_trip_drops_padding(convert: ConvertCommand, tmp_path: Path) -> None:
    config = make_family_config("llama", num_attention_heads=4, num_query_groups=2, ff_hidden_size=20)
    path = save_model(tmp_path / "run", config, num_ranks=2)  # 29 tokens: a row of padding
    code, output = convert("export", "--load", path, "--output", tmp_path / "theirs", "--verify")
    assert code == 0, output
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[0] == 0
    assert are_equal(read_weights(open_folder(tmp_path / "back")), read_weights(open_folder(path)))


def test_export_rejects_unknown_tensor() -> None:
    with pytest.raises(CheckpointError, match="layers.0.input_norm.bias"):
        FORMAT.from_ours({"layers.0.input_norm.bias": torch.zeros(16)}, make_family_config("llama"))
