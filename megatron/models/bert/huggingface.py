"""Conversion of BERT weights and settings to and from Hugging Face.

| ours | Hugging Face |
|---|---|
| embedding.word, .position, .token_type, .norm | bert.embeddings.word_embeddings, position_embeddings, ... |
| layers.i.attention.query_key_value, by head | bert.encoder.layer.i.attention.self.query, key, value |
| layers.i.post_attention_norm, post_mlp_norm | bert.encoder.layer.i.attention.output.LayerNorm, output.LayerNorm |
| transform, head.bias | cls.predictions.transform, cls.predictions.bias (decoder.bias is a copy of it) |
| next_sentence.pooler, .classifier | bert.pooler.dense, cls.seq_relationship |

A model with two heads is a ``BertForPreTraining``; with ``--bert-no-binary-head`` it is a ``BertForMaskedLM``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import HFFormat, WeightMapping, by_recipes

if TYPE_CHECKING:
    import torch

_WORD, _HF_WORD = "embedding.word.weight", "bert.embeddings.word_embeddings.weight"
_HF_HEAD, _HF_BIAS = "cls.predictions.decoder.weight", "cls.predictions.bias"
_TABLE_NAMES = {"position": "position_embeddings", "token_type": "token_type_embeddings"}
_TOP_NAMES = {
    "embedding.norm": "bert.embeddings.LayerNorm",
    "transform.dense": "cls.predictions.transform.dense",
    "transform.norm": "cls.predictions.transform.LayerNorm",
}
_SECOND_HEAD = {"next_sentence.pooler": "bert.pooler.dense", "next_sentence.classifier": "cls.seq_relationship"}
_LAYER_NAMES = {
    "attention.dense": "attention.output.dense",
    "post_attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "post_mlp_norm": "output.LayerNorm",
}


_IGNORED_NAMES = re.compile(r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\.bias")
"""A buffer of old files, and a copy of ``cls.predictions.bias``."""
_CURRENT_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_TWO_HEAD_CLASS, _WORD_HEAD_CLASS = "BertForPreTraining", "BertForMaskedLM"
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
_HF_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu": "relu"}
_FIXED_SETTINGS = {
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
}


def recipes(config: Config) -> dict[str, WeightMapping]:
    """Return weight mappings by our logical names."""
    model = config.model
    return dict(
        _iter_mappings(model.num_layers, model.num_attention_heads, has_second_head=config.family_config.binary_head)
    )


def _iter_mappings(num_layers: int, num_heads: int, *, has_second_head: bool) -> Iterator[tuple[str, WeightMapping]]:
    yield _WORD, WeightMapping((_HF_WORD,))
    for our_name, hf_name in _TABLE_NAMES.items():
        yield f"embedding.{our_name}.weight", WeightMapping((f"bert.embeddings.{hf_name}.weight",))
    yield "head.bias", WeightMapping((_HF_BIAS,))
    for suffix in ("weight", "bias"):
        for our_name, hf_name in (_TOP_NAMES | (_SECOND_HEAD if has_second_head else {})).items():
            yield f"{our_name}.{suffix}", WeightMapping((f"{hf_name}.{suffix}",))
        for layer_idx in range(num_layers):
            our_layer, hf_layer = f"layers.{layer_idx}", f"bert.encoder.layer.{layer_idx}"
            query_key_value = tuple(
                f"{hf_layer}.attention.self.{projection}.{suffix}" for projection in ("query", "key", "value")
            )
            yield (
                f"{our_layer}.attention.query_key_value.{suffix}",
                WeightMapping(query_key_value, num_blocks=num_heads),
            )
            for our_name, hf_name in _LAYER_NAMES.items():
                yield f"{our_layer}.{our_name}.{suffix}", WeightMapping((f"{hf_layer}.{hf_name}.{suffix}",))


def rename_tensor(name: str, config: Config) -> str | None:
    """Return a tensor's current name; None for tensors in a second head that ``config`` does not have."""
    for old, new in _CURRENT_NAMES.items():
        name = name.replace(old, new)
    is_second_head = name.startswith(tuple(_SECOND_HEAD.values()))
    return None if is_second_head and not config.family_config.binary_head else name


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each setting in ``config`` that the format cannot express."""
    model = config.model
    if model.activation not in _HF_ACTIVATIONS:
        yield f"--activation must be one of {', '.join(_HF_ACTIVATIONS)}, got {model.activation}"
    if model.attention_size != model.hidden_size:
        yield (
            "--num-attention-heads times --kv-hidden-size must equal --hidden-size, got "
            f"{model.num_attention_heads} heads of {model.kv_hidden_size} for {model.hidden_size}"
        )


def fields(config: Config) -> dict[str, Any]:
    """Convert ``config`` to the contents of config.json."""
    model = config.model
    return {
        "architectures": [hf_class(config)],
        "model_type": "bert",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ff_hidden_size,
        "hidden_act": _HF_ACTIVATIONS[model.activation],
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "layer_norm_eps": model.layernorm_epsilon,
        **_FIXED_SETTINGS,
    }


def values(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json's contents to our settings, by field name (without sections).

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    unsupported = [
        f"{key} {hf_config[key]!r} (supported: {value!r})"
        for key, value in _FIXED_SETTINGS.items()
        if hf_config.get(key, value) != value
    ]
    activation = hf_config.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        unsupported.append(f"hidden_act {activation!r} (supported: {', '.join(_ACTIVATIONS)})")
    if unsupported:
        raise CheckpointError(f"our BERT does not support these settings: {'; '.join(unsupported)}")
    return {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "num_attention_heads": hf_config["num_attention_heads"],
        "ff_hidden_size": hf_config["intermediate_size"],
        "vocab_size": hf_config["vocab_size"],
        "max_position_embeddings": hf_config.get("max_position_embeddings", 512),
        "activation": _ACTIVATIONS[activation],
        "layernorm_epsilon": hf_config.get("layer_norm_eps", 1e-12),
        "hidden_dropout": hf_config.get("hidden_dropout_prob", 0.1),
        "attention_dropout": hf_config.get("attention_probs_dropout_prob", 0.1),
        "init_method_std": hf_config.get("initializer_range", 0.02),
        "binary_head": _TWO_HEAD_CLASS in (hf_config.get("architectures") or [_TWO_HEAD_CLASS]),
    }


def hf_class(config: Config) -> str:
    """Return the name of the Hugging Face class with the heads in ``config``."""
    return _TWO_HEAD_CLASS if config.family_config.binary_head else _WORD_HEAD_CLASS


def model_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the logits for all heads, concatenated per sample: [b, s v + 2] or [b, s v].

    All tokens are in the first segment.
    """
    import torch  # takes half a second; a dry run that reads only settings does not need it

    logits = model(tokens, torch.zeros_like(tokens))
    word_logits, *scores = (logits,) if isinstance(logits, torch.Tensor) else logits
    return torch.cat([word_logits.transpose(0, 1).flatten(1), *scores], dim=1)


def hf_logits(out: Any) -> torch.Tensor:
    """Extract the logits for all heads from the Hugging Face model's output, as ``model_logits`` does."""
    import torch  # takes half a second; a dry run that reads only settings does not need it

    if hasattr(out, "logits"):
        word_logits: torch.Tensor = out.logits.flatten(1)
        return word_logits
    return torch.cat([out.prediction_logits.flatten(1), out.seq_relationship_logits], dim=1)


FORMAT = HFFormat(
    model_types=("bert",),
    problems=problems,
    fields=fields,
    values=values,
    **by_recipes(recipes),
    word=_HF_WORD,
    head=_HF_HEAD,
    ignored_names=_IGNORED_NAMES,
    rename_tensor=rename_tensor,
    auto_class=hf_class,
    model_logits=model_logits,
    hf_logits=hf_logits,
)
FORMATS = (FORMAT,)
