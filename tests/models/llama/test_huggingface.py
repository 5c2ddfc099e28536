"""LLaMA's settings and weights there and back: bit for bit, and refused where either side has no counterpart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, flags_of
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import parse
from megatron.errors import CheckpointError
from megatron.models.llama.huggingface import FORMAT
from tests.helpers.huggingface_models import config_of, save_model
from tests.tools.test_convert_hf import Run, convert, same, tensors_in

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


def test_configs_of_the_hub_are_read() -> None:
    config = config_from_huggingface(LLAMA_32)
    llama = config.model
    assert (llama.num_query_groups, llama.rotary_base, llama.rotary_scaling) == (2, 500000.0, "llama3")
    assert (llama.rotary_scaling_factor, llama.rotary_original_positions) == (32.0, 8192)
    assert (config.model.kv_hidden_size, config.model.max_position_embeddings) == (8, 131072)
    assert not config.model.untie_embeddings and not config.model.hidden_bias
    first = config_from_huggingface(LLAMA_1)
    assert (first.model.num_query_groups, first.model.rotary_base, first.model.rotary_scaling) == (4, 10000.0, "none")
    assert (first.model.layernorm_epsilon, first.model.untie_embeddings, first.model.kv_hidden_size) == (1e-6, True, 4)
    older = {**LLAMA_1, "rope_scaling": {"type": "linear", "factor": 4}}
    assert (config_from_huggingface(older).model.rotary_scaling_factor, config_from_huggingface(older).model) == (
        4,
        config_from_huggingface({**LLAMA_1, "rope_parameters": {"rope_type": "linear", "factor": 4}}).model,
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_type 'dynamic' (supported: default, linear, llama3, yarn)",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_type 'llama3' without low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta": 1}}, "beta of rope_type 'linear'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"attention_bias": True}, "attention_bias True with mlp_bias False"),
        ({"mlp_bias": True}, "attention_bias False with mlp_bias True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_our_llama_has_not_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        config_from_huggingface({**LLAMA_32, **changed})
    assert f"our decoders do not support these settings of llama: {named}" in str(raised.value)


def test_all_that_has_no_form_there_is_told_at_once() -> None:
    with pytest.raises(CheckpointError) as raised:
        config = config_of("llama", activation="relu", num_attention_heads=3, kv_hidden_size=4)
        config_to_huggingface(config, "float32", "llama")
    assert all(text in str(raised.value) for text in ("got relu", "got 16 and 3"))


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
def test_settings_come_back_and_their_program_takes_them(scaling: str) -> None:
    from transformers import LlamaConfig

    values = {"attention_dropout": 0.25, "hidden_dropout": 0.125, "hidden_bias": True, "layernorm_epsilon": 1e-6}
    rotary = {"rotary_base": 500.0, "rotary_scaling": scaling, "num_query_groups": 1, "kv_hidden_size": 6}
    config = config_of("llama", **values, **rotary, activation="gated-gelu", untie_embeddings=False)
    fields = config_to_huggingface(config, "float32")
    theirs = LlamaConfig.from_dict(json.loads(json.dumps(fields)))
    assert (theirs.head_dim, theirs.num_key_value_heads, theirs.tie_word_embeddings) == (6, 1, True)
    assert theirs.rope_parameters["rope_theta"] == 500.0
    assert theirs.rope_parameters["rope_type"] == {"none": "default"}.get(scaling, scaling)
    back = config_from_huggingface(theirs.to_dict())
    assert back.identity() == config.identity() and back.model == config.model


@pytest.mark.parametrize("theirs", [LLAMA_32, LLAMA_1], ids=["tied", "untied"])
def test_the_flags_of_a_model_build_it(theirs: dict[str, Any]) -> None:
    config = config_from_huggingface(theirs)
    words = flags_of(config)
    assert ("--tie-embeddings-and-output-weights" in words) == (theirs is LLAMA_32)
    parsed = parse([*words, "--data-path", "x", "--dry-run"], world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model


def reference(folder: Path, **own: Any) -> dict[str, torch.Tensor]:
    """Save a random model of theirs; return its state dict."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 20}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 29, "max_position_embeddings": 12}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **own))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.state_dict()


@pytest.mark.parametrize(
    "own", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}], ids=["untied", "tied, biases"]
)
def test_theirs_to_ours_and_back_is_bitwise_and_computes_the_same(
    own: dict[str, Any], convert: Run, tmp_path: Path
) -> None:
    state = reference(tmp_path / "theirs", **own)
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0 and "pretrain_gpt2.py --model llama --load" in output, output
    words = ["--max-shard-bytes", 20_000, "--verify"]
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", *words)
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    back = tensors_in(tmp_path / "back")
    assert same(back, {key: state[key] for key in back})
    assert set(state) - set(back) == ({"lm_head.weight"} if own else set())


def test_a_model_of_two_ranks_goes_there_and_back_to_the_bit_without_its_padding(convert: Run, tmp_path: Path) -> None:
    config = config_of("llama", num_attention_heads=4, num_query_groups=2, ff_hidden_size=20)
    path = save_model(tmp_path / "run", config, ranks=2)  # 29 tokens: a row of padding
    code, output = convert("export", "--load", path, "--output", tmp_path / "theirs", "--verify")
    assert code == 0, output
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[0] == 0
    assert same(read_weights(open_folder(tmp_path / "back")), read_weights(open_folder(path)))


def test_a_tensor_that_no_llama_has_is_named() -> None:
    with pytest.raises(CheckpointError, match="layers.0.input_norm.bias"):
        FORMAT.from_ours({"layers.0.input_norm.bias": torch.zeros(16)}, config_of("llama"))
