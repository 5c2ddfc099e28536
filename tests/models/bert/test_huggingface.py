"""BERT's settings and weights there and back: bit for bit, and refused where either side has no counterpart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, model_flags
from megatron.config import parse
from megatron.errors import CheckpointError
from megatron.models.bert.huggingface import FORMAT
from tests.helpers.huggingface_models import make_family_config

BASE_UNCASED = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 16, "initializer_range": 0.02,
    "intermediate_size": 40, "layer_norm_eps": 1e-12, "max_position_embeddings": 12, "model_type": "bert",
    "num_attention_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 29,
}  # fmt: skip
"""As Google's hub has it, in small."""


def make_hf_tensors(**values: Any) -> dict[str, torch.Tensor]:
    """Return the weights of their model of ``make_family_config``."""
    from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

    torch.manual_seed(3)
    fields = config_to_huggingface(make_family_config("bert", **values), "float32")
    model_class = {"BertForPreTraining": BertForPreTraining, "BertForMaskedLM": BertForMaskedLM}[
        fields["architectures"][0]
    ]
    return {name: tensor.clone() for name, tensor in model_class(BertConfig(**fields)).state_dict().items()}


def test_reads_hub_config() -> None:
    config = config_from_huggingface(BASE_UNCASED)
    model = config.model
    assert (model.num_layers, model.ff_hidden_size, model.hidden_bias, config.family_config.binary_head) == (
        2,
        40,
        True,
        False,
    )
    assert config_from_huggingface({**BASE_UNCASED, "architectures": ["BertForPreTraining"]}).family_config.binary_head
    assert config_from_huggingface({**BASE_UNCASED, "hidden_act": "gelu_new"}).model.activation == "gelu-tanh"


@pytest.mark.parametrize("binary_head", [True, False])
def test_config_round_trip_and_flags_rebuild_model(binary_head: bool) -> None:
    values = {"binary_head": binary_head, "activation": "relu", "hidden_dropout": 0.25, "ff_hidden_size": 40}
    config = make_family_config("bert", **values)
    assert config_from_huggingface(config_to_huggingface(config, "float32")).identity() == config.identity()
    reparsed = parse([*model_flags(config), "--seq-length", "12"], world_size=1, env={}, family="bert")
    assert reparsed.identity() == config.identity() and reparsed.model.layernorm_epsilon == 1e-12


def test_rejects_unsupported_settings_by_name() -> None:
    unsupported = {"position_embedding_type": "relative_key", "type_vocab_size": 3, "hidden_act": "silu"}
    with pytest.raises(CheckpointError) as excinfo:
        config_from_huggingface({**BASE_UNCASED, **unsupported, "tie_word_embeddings": False})
    for text in ("'relative_key'", "type_vocab_size 3 (supported:", "tie_word_embeddings False", "hidden_act 'silu'"):
        assert text in str(excinfo.value)
    with pytest.raises(CheckpointError) as excinfo:
        config_to_huggingface(make_family_config("bert", activation="gated-gelu", kv_hidden_size=4), "float32")
    assert "got gated-gelu" in str(excinfo.value) and "2 heads of 4 for 16" in str(excinfo.value)


@pytest.mark.parametrize("binary_head", [True, False])
def test_weight_round_trip_is_bitwise(binary_head: bool) -> None:
    config = make_family_config("bert", binary_head=binary_head)
    hf_tensors = make_hf_tensors(binary_head=binary_head)
    exported = weights.weights_to_huggingface(weights.weights_from_huggingface(hf_tensors, config), config)
    omitted = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(hf_tensors) - set(exported) == omitted and set(exported) <= set(hf_tensors)
    assert all(torch.equal(exported[name], hf_tensors[name]) for name in exported)


def test_reads_legacy_norm_names_and_extra_head() -> None:
    hf_tensors, config = make_hf_tensors(), make_family_config("bert", binary_head=False)
    legacy = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in hf_tensors.items()}
    legacy = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in legacy.items()}
    legacy["bert.embeddings.position_ids"] = torch.arange(12)[None]
    actual, expected = (
        weights.weights_from_huggingface(legacy, config),
        weights.weights_from_huggingface(hf_tensors, config),
    )
    assert actual.keys() == expected.keys() == FORMAT.recipes(config).keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert not any(name.startswith("next_sentence") for name in actual)


def test_rejects_missing_tensor_and_untied_decoder_weight() -> None:
    config, hf_tensors = make_family_config("bert"), make_hf_tensors()
    del hf_tensors["cls.seq_relationship.bias"]
    with pytest.raises(CheckpointError, match="cls.seq_relationship.bias: missing"):
        weights.weights_from_huggingface(hf_tensors, config)
    untied = make_hf_tensors()
    untied["cls.predictions.decoder.weight"] = untied["cls.predictions.decoder.weight"] + 1
    with pytest.raises(CheckpointError, match="cls.predictions.decoder.weight must equal bert.embeddings.word"):
        weights.weights_from_huggingface(untied, config)
