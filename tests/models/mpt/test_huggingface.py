"""MPT's settings and weights there and back: bit for bit, and refused where either side has no counterpart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, model_flags
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.models.mpt.huggingface import FORMAT
from tests.helpers.huggingface_models import make_family_config, save_model
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

STORYWRITER = {
    "architectures": ["MPTForCausalLM"], "model_type": "mpt", "d_model": 16, "n_heads": 2, "n_layers": 2,
    "vocab_size": 29, "max_seq_len": 64, "expansion_ratio": 4, "no_bias": True, "learned_pos_emb": True,
    "logit_scale": None, "embedding_fraction": 1.0, "emb_pdrop": 0, "resid_pdrop": 0,
    "norm_type": "low_precision_layernorm", "init_config": {"name": "kaiming_normal_"}, "use_cache": False,
    "attn_config": {
        "alibi": True, "alibi_bias_max": 16, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": 6,
        "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "prefix_lm": False, "qk_ln": False,
        "softmax_scale": None,
    },
}  # fmt: skip
"""As MosaicML's hub has it, in small."""


def with_attention(**changes: Any) -> dict[str, Any]:
    return {**STORYWRITER, "attn_config": {**STORYWRITER["attn_config"], **changes}}  # type: ignore[dict-item]


def test_reads_hub_config() -> None:
    config = config_from_huggingface(STORYWRITER)
    assert (config.model.alibi_bias_max, config.model.clip_qkv) == (16, 6.0)
    model = config.model
    assert (model.ff_hidden_size, model.max_position_embeddings, model.untie_embeddings) == (64, 64, False)
    assert config_from_huggingface(with_attention(softmax_scale=8**-0.5)) == config
    assert config_from_huggingface({**STORYWRITER, "attn_config": None}).model.alibi_bias_max == 8
    equivalent = {
        "norm_type": "layernorm",
        "ffn_config": {"ffn_type": "mptmlp", "fc_type": "torch", "ffn_act_fn": None},
    }
    assert config_from_huggingface({**with_attention(rope=False, sliding_window_size=-1), **equivalent}) == config


@pytest.mark.parametrize(
    ("overrides", "expected_message"),
    [
        (with_attention(alibi=False), "attn_config.alibi False"),
        (with_attention(prefix_lm=True), "attn_config.prefix_lm True"),
        (with_attention(qk_ln=True), "attn_config.qk_ln True"),
        (with_attention(attn_type="multiquery_attention"), "attn_config.attn_type 'multiquery_attention'"),
        (with_attention(attn_uses_sequence_id=True), "attn_config.attn_uses_sequence_id True"),
        (with_attention(softmax_scale=0.1), "attn_config.softmax_scale 0.1 (supported: 0.353553"),
        (with_attention(rope=True), "attn_config.rope True"),
        (with_attention(sliding_window_size=512), "attn_config.sliding_window_size 512"),
        ({**STORYWRITER, "norm_type": "rmsnorm"}, "norm_type 'rmsnorm'"),
        ({**STORYWRITER, "ffn_config": {"ffn_type": "mptglu"}}, "ffn_config {'ffn_type': 'mptglu'}"),
        (
            {**STORYWRITER, "ffn_config": {"ffn_act_fn": {"name": "relu"}}},
            "ffn_config {'ffn_act_fn': {'name': 'relu'}}",
        ),
        ({**STORYWRITER, "no_bias": False}, "no_bias False"),
        ({**STORYWRITER, "logit_scale": "inv_sqrt_d_model"}, "logit_scale 'inv_sqrt_d_model'"),
        ({**STORYWRITER, "expansion_ratio": 8}, "expansion_ratio 8"),
        ({**STORYWRITER, "embedding_fraction": 0.1}, "embedding_fraction 0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects_unsupported_settings_by_name(overrides: dict[str, Any], expected_message: str) -> None:
    with pytest.raises(CheckpointError) as excinfo:
        config_from_huggingface(overrides)
    assert f"our MPT does not support these settings: {expected_message}" in str(excinfo.value)


def test_export_rejects_unsupported_settings_together() -> None:
    with pytest.raises(CheckpointError) as excinfo:
        config_to_huggingface(
            make_family_config("mpt", activation="relu", kv_hidden_size=4, ff_hidden_size=20), "float32"
        )
    assert all(text in str(excinfo.value) for text in ("gelu, got relu", "2 heads of 4 for 16", "got 20 for 16"))


def test_config_round_trips_through_transformers() -> None:
    from transformers import MptConfig

    values = {"clip_qkv": 3.0, "alibi_bias_max": 4, "attention_dropout": 0.25, "hidden_dropout": 0.125}
    config = make_family_config("mpt", **values, layernorm_epsilon=1e-6, untie_embeddings=True)
    fields = config_to_huggingface(config, "float32")
    hf_config = MptConfig.from_dict(json.loads(json.dumps(fields)))
    assert (hf_config.attn_config.alibi_bias_max, hf_config.attn_config.clip_qkv, hf_config.max_seq_len) == (4, 3.0, 12)
    restored = config_from_huggingface(hf_config.to_dict())
    assert restored.identity() == config.identity() and restored.model == config.model


def test_flags_rebuild_hub_model() -> None:
    config = config_from_huggingface({**STORYWRITER, "layer_norm_epsilon": 1e-6})
    parsed = parse([*model_flags(config), "--data-path", "x", "--dry-run"], world_size=1, family="mpt")
    assert parsed.identity() == config.identity() and parsed.model.layernorm_epsilon == 1e-6
    assert parsed.model.max_position_embeddings == 64


def save_reference(folder: Path, **overrides: Any) -> dict[str, torch.Tensor]:
    """Save a random model of theirs; return its state dict."""
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    attention = {"alibi_bias_max": 16, "clip_qkv": 6.0}
    fields = {"d_model": 36, "n_heads": 6, "n_layers": 2, "vocab_size": 29, "max_seq_len": 12}
    model = MptForCausalLM(MptConfig(**fields, attn_config=attention, **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.state_dict()


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_folder_round_trip_is_bitwise_and_verifies_logits(
    overrides: dict[str, Any], convert: ConvertCommand, tmp_path: Path
) -> None:
    state = save_reference(tmp_path / "theirs", **overrides)
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0 and "pretrain_gpt2.py --model mpt --load" in output, output
    export_flags = ["--max-shard-bytes", 20_000, "--verify"]
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", *export_flags)
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    exported = read_tensors(tmp_path / "back")
    assert are_equal(exported, {key: state[key] for key in exported})
    assert set(state) - set(exported) == (set() if overrides else {"lm_head.weight"})


def test_sharded_model_round_trip_drops_padding(convert: ConvertCommand, tmp_path: Path) -> None:
    path = save_model(
        tmp_path / "run", make_family_config("mpt", alibi_bias_max=6), num_ranks=2
    )  # 29 tokens: a row of padding
    code, output = convert("export", "--load", path, "--output", tmp_path / "theirs", "--verify")
    assert code == 0, output
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[0] == 0
    assert are_equal(read_weights(open_folder(tmp_path / "back")), read_weights(open_folder(path)))


def test_export_rejects_unknown_tensor() -> None:
    config: Config = make_family_config("mpt")
    with pytest.raises(CheckpointError, match="layers.0.input_norm.bias"):
        FORMAT.from_ours({"layers.0.input_norm.bias": torch.zeros(16)}, config)
