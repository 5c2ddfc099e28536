"""BERT's settings and weights there and back: bit for bit, and refused where either side has no counterpart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, flags_of
from megatron.config import parse
from megatron.errors import CheckpointError
from megatron.models.bert.huggingface import FORMAT
from tests.helpers.huggingface_models import config_of

BASE_UNCASED = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 16, "initializer_range": 0.02,
    "intermediate_size": 40, "layer_norm_eps": 1e-12, "max_position_embeddings": 12, "model_type": "bert",
    "num_attention_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 29,
}  # fmt: skip
"""As Google's hub has it, in small."""


def theirs_of(**values: Any) -> dict[str, torch.Tensor]:
    """Return the weights of their model of ``config_of``."""
    from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

    torch.manual_seed(3)
    fields = config_to_huggingface(config_of("bert", **values), "float32")
    kind = {"BertForPreTraining": BertForPreTraining, "BertForMaskedLM": BertForMaskedLM}[fields["architectures"][0]]
    return {name: tensor.clone() for name, tensor in kind(BertConfig(**fields)).state_dict().items()}


def test_a_config_of_the_hub_is_read() -> None:
    config = config_from_huggingface(BASE_UNCASED)
    model = config.model
    assert (model.num_layers, model.ff_hidden_size, model.hidden_bias, config.own.binary_head) == (2, 40, True, False)
    assert config_from_huggingface({**BASE_UNCASED, "architectures": ["BertForPreTraining"]}).own.binary_head
    assert config_from_huggingface({**BASE_UNCASED, "hidden_act": "gelu_new"}).model.activation == "gelu-tanh"


@pytest.mark.parametrize("binary_head", [True, False])
def test_settings_come_back_and_flags_build_the_model(binary_head: bool) -> None:
    values = {"binary_head": binary_head, "activation": "relu", "hidden_dropout": 0.25, "ff_hidden_size": 40}
    config = config_of("bert", **values)
    assert config_from_huggingface(config_to_huggingface(config, "float32")).identity() == config.identity()
    again = parse([*flags_of(config), "--seq-length", "12"], world_size=1, env={}, family="bert")
    assert again.identity() == config.identity() and again.model.layernorm_epsilon == 1e-12


def test_what_our_bert_has_not_is_refused_by_name() -> None:
    wrong = {"position_embedding_type": "relative_key", "type_vocab_size": 3, "hidden_act": "silu"}
    with pytest.raises(CheckpointError) as raised:
        config_from_huggingface({**BASE_UNCASED, **wrong, "tie_word_embeddings": False})
    for text in ("'relative_key'", "type_vocab_size 3 (supported:", "tie_word_embeddings False", "hidden_act 'silu'"):
        assert text in str(raised.value)
    with pytest.raises(CheckpointError) as raised:
        config_to_huggingface(config_of("bert", activation="gated-gelu", kv_hidden_size=4), "float32")
    assert "got gated-gelu" in str(raised.value) and "2 heads of 4 for 16" in str(raised.value)


@pytest.mark.parametrize("binary_head", [True, False])
def test_weights_come_back_bit_for_bit(binary_head: bool) -> None:
    config = config_of("bert", binary_head=binary_head)
    theirs = theirs_of(binary_head=binary_head)
    back = weights.weights_to_huggingface(weights.weights_from_huggingface(theirs, config), config)
    left_out = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(theirs) - set(back) == left_out and set(back) <= set(theirs)
    assert all(torch.equal(back[name], theirs[name]) for name in back)


def test_files_of_google_with_old_names_and_a_head_too_many_are_read() -> None:
    both, config = theirs_of(), config_of("bert", binary_head=False)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in both.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in old.items()}
    old["bert.embeddings.position_ids"] = torch.arange(12)[None]
    found, expected = weights.weights_from_huggingface(old, config), weights.weights_from_huggingface(both, config)
    assert found.keys() == expected.keys() == FORMAT.recipes(config).keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not any(name.startswith("next_sentence") for name in found)


def test_a_missing_tensor_and_a_head_of_its_own_are_told() -> None:
    config, theirs = config_of("bert"), theirs_of()
    del theirs["cls.seq_relationship.bias"]
    with pytest.raises(CheckpointError, match="cls.seq_relationship.bias: missing"):
        weights.weights_from_huggingface(theirs, config)
    other = theirs_of()
    other["cls.predictions.decoder.weight"] = other["cls.predictions.decoder.weight"] + 1
    with pytest.raises(CheckpointError, match="cls.predictions.decoder.weight must equal bert.embeddings.word"):
        weights.weights_from_huggingface(other, config)
