"""What a config.json says is held to the ranges of our own flags, and comes back as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron.checkpoint.huggingface import folder, weights
from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, family_by_type
from megatron.errors import CheckpointError
from megatron.training.checkpoint_source import require_checkpoint
from tests.helpers.huggingface_models import make_family_config
from tests.models.llama.test_huggingface import LLAMA_1, LLAMA_32
from tests.models.mpt.test_huggingface import with_attention

BERT = config_to_huggingface(make_family_config("bert", hidden_bias=True), "float32")
GPT2 = config_to_huggingface(make_family_config("gpt2", hidden_bias=True), "float32")


def with_rope_scaling(**changes: Any) -> dict[str, Any]:
    return {**LLAMA_32, "rope_scaling": {**LLAMA_32["rope_scaling"], **changes}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("hf_config", "messages"),
    [
        (
            with_rope_scaling(low_freq_factor=4.0),
            ["--rotary-high-frequency-factor must exceed --rotary-low-frequency-factor"],
        ),
        (with_rope_scaling(factor="2"), ["--rotary-scaling-factor must be a finite number of at least 1, got '2'"]),
        ({**LLAMA_32, "head_dim": 7}, ["the size of one head, must be even for rotary positions"]),
        ({**LLAMA_32, "num_key_value_heads": 3}, ["a multiple of --num-query-groups, got 4 and 3"]),
        (
            {**LLAMA_1, "rms_norm_eps": 0, "vocab_size": "29", "attention_dropout": 1.5},
            ["--layernorm-epsilon must be", "--vocab-size must be", "--attention-dropout must be"],
        ),
        (with_attention(alibi_bias_max=8.5), ["--alibi-bias-max must be a positive integer, got 8.5"]),
        (with_attention(clip_qkv=-1), ["--clip-qkv must be a finite number of at least 0, got -1.0"]),
        ({**BERT, "num_hidden_layers": True}, ["--num-layers must be an integer of at least 0, got True"]),
        ({**LLAMA_1, "rope_scaling": "yarn"}, ["rope_scaling must be an object or null, got 'yarn'"]),
        (
            {**LLAMA_1, "hidden_size": "16", "num_hidden_layers": 2.5},
            [
                "hidden_size must be a positive integer, got '16'",
                "num_hidden_layers must be a positive integer, got 2.5",
            ],
        ),
        ({"model_type": "llama", "num_attention_heads": 2}, ["hidden_size, num_hidden_layers, ", "vocab_size missing"]),
        ({**GPT2, "n_head": 3}, ["--hidden-size must be a multiple of --num-attention-heads, got 16 and 3"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_invalid_settings_are_all_reported_at_once(hf_config: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(CheckpointError, match="config.json does not describe a ") as error:
        config_from_huggingface(hf_config)
    assert all(text in str(error.value) for text in messages), error.value


def test_integral_float_is_accepted_as_integer() -> None:
    bias_max = config_from_huggingface(with_attention(alibi_bias_max=16.0)).model.alibi_bias_max
    assert bias_max == 16 and isinstance(bias_max, int)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mpt", "bert"])
def test_init_method_std_round_trips(family: str) -> None:
    extra = {"activation": "gated-silu"} if family == "llama" else {}
    config = make_family_config(family, init_method_std=0.007, **extra)
    assert config_from_huggingface(config_to_huggingface(config, "float32")).model.init_method_std == 0.007


SIZES = {
    "hidden_size": 256, "num_attention_heads": 32, "num_hidden_layers": 12, "intermediate_size": 96, "vocab_size": 61,
}  # fmt: skip
HEADS, NO_MTP = {"num_key_value_heads": SIZES["num_attention_heads"]}, {"num_nextn_predict_layers": 0}
STD = {"initializer_range": 0.03}
FIELDS_BY_TYPE: dict[str, dict[str, Any]] = {
    "deepseek_v2": HEADS | {"num_experts_per_tok": 6}, "deepseek_v3": HEADS | NO_MTP, "glm4_moe": NO_MTP,
    "glm4_moe_lite": HEADS | NO_MTP, "youtu": HEADS | STD, "minicpm3": HEADS | STD,
    "qwen3_5": {"text_config": SIZES}, "qwen3_5_moe": {"text_config": SIZES},
    "dots1": {"norm_topk_prob": True, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "mamba2": {"num_heads": 8},
}  # fmt: skip
"""Fields of types whose class has no default, a derived one, or one that does not fit the sizes or is unsupported."""


@pytest.mark.parametrize("model_type", [name for name in family_by_type() if name in transformers.CONFIG_MAPPING])
def test_minimal_config_uses_class_defaults(model_type: str) -> None:
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    fields = {config_class.attribute_map.get(name, name): size for name, size in SIZES.items()}
    if hasattr(config_class, "d_ff"):
        fields |= {"d_ff": fields.pop("intermediate_size"), "d_kv": 8}
    fields |= FIELDS_BY_TYPE.get(model_type, {})
    config = config_from_huggingface({"model_type": model_type, **fields})
    full_config = config_from_huggingface(config_class(**fields).to_dict())
    assert (config.model, config.family_config) == (full_config.model, full_config.family_config)


def test_unsupported_model_type_error_lists_supported_types(tmp_path: Path) -> None:
    folder.write_json(tmp_path / folder.CONFIG, {"model_type": "opt"})
    require_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="model_type must be one of .*gpt2.*, got 'opt'"):
        weights.open_pretrained(tmp_path, None)  # type: ignore[arg-type]
    folder.write_json(tmp_path / folder.CONFIG, {"family": "gpt2"})  # as a run of ours writes it
    assert not weights.is_huggingface_folder(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        require_checkpoint(tmp_path)


def test_shared_modules_do_not_branch_on_family() -> None:
    package_dir = Path(weights.__file__).parent
    shared_modules = ["config", "convert", "folder", "weights"]
    branch_pattern = re.compile(r"family [=!]= \"|family in \(")
    branching_modules = [
        name
        for name in shared_modules
        if branch_pattern.search((package_dir / f"{name}.py").read_text(encoding="utf-8"))
    ]
    assert branching_modules == []
