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

_WORD, _THEIR_WORD = "embedding.word.weight", "bert.embeddings.word_embeddings.weight"
_THEIR_HEAD, _THEIR_BIAS = "cls.predictions.decoder.weight", "cls.predictions.bias"
_TABLES = {"position": "position_embeddings", "token_type": "token_type_embeddings"}
_TOP = {
    "embedding.norm": "bert.embeddings.LayerNorm",
    "transform.dense": "cls.predictions.transform.dense",
    "transform.norm": "cls.predictions.transform.LayerNorm",
}
_SECOND_HEAD = {"next_sentence.pooler": "bert.pooler.dense", "next_sentence.classifier": "cls.seq_relationship"}
_LAYER = {
    "attention.dense": "attention.output.dense",
    "post_attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "post_mlp_norm": "output.LayerNorm",
}


_UNREAD = re.compile(r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\.bias")
"""A buffer of old files, and a copy of ``cls.predictions.bias``."""
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_BOTH, _WORDS = "BertForPreTraining", "BertForMaskedLM"
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
_THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu": "relu"}
_FIXED = {
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
}


def recipes(config: Config) -> dict[str, WeightMapping]:
    """Return the mapping of each of our weights, by logical name."""
    model = config.model
    return dict(_recipes(model.num_layers, model.num_attention_heads, has_both=config.own.binary_head))


def _recipes(num_layers: int, heads: int, *, has_both: bool) -> Iterator[tuple[str, WeightMapping]]:
    yield _WORD, WeightMapping((_THEIR_WORD,))
    for our_name, their_name in _TABLES.items():
        yield f"embedding.{our_name}.weight", WeightMapping((f"bert.embeddings.{their_name}.weight",))
    yield "head.bias", WeightMapping((_THEIR_BIAS,))
    for suffix in ("weight", "bias"):
        for our_name, their_name in (_TOP | (_SECOND_HEAD if has_both else {})).items():
            yield f"{our_name}.{suffix}", WeightMapping((f"{their_name}.{suffix}",))
        for layer in range(num_layers):
            our_layer, their_layer = f"layers.{layer}", f"bert.encoder.layer.{layer}"
            query_key_value = tuple(
                f"{their_layer}.attention.self.{projection}.{suffix}" for projection in ("query", "key", "value")
            )
            yield f"{our_layer}.attention.query_key_value.{suffix}", WeightMapping(query_key_value, blocks=heads)
            for our_name, their_name in _LAYER.items():
                yield f"{our_layer}.{our_name}.{suffix}", WeightMapping((f"{their_layer}.{their_name}.{suffix}",))


def named(name: str, config: Config) -> str | None:
    """Return the current name of a tensor; None for tensors of a second head that ``config`` does not have."""
    for old, new in _OLD.items():
        name = name.replace(old, new)
    is_second = name.startswith(tuple(_SECOND_HEAD.values()))
    return None if is_second and not config.own.binary_head else name


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each setting of ``config`` that the format cannot express."""
    model = config.model
    if model.activation not in _THEIR_ACTIVATIONS:
        yield f"--activation must be one of {', '.join(_THEIR_ACTIVATIONS)}, got {model.activation}"
    if model.attention_size != model.hidden_size:
        yield (
            "--num-attention-heads times --kv-hidden-size must equal --hidden-size, got "
            f"{model.num_attention_heads} heads of {model.kv_hidden_size} for {model.hidden_size}"
        )


def fields(config: Config) -> dict[str, Any]:
    """Return the contents of config.json for ``config``."""
    model = config.model
    return {
        "architectures": [their_class(config)],
        "model_type": "bert",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ff_hidden_size,
        "hidden_act": _THEIR_ACTIVATIONS[model.activation],
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "layer_norm_eps": model.layernorm_epsilon,
        **_FIXED,
    }


def values(theirs: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a config.json to our settings, by field name (without sections).

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    unsupported = [
        f"{key} {theirs[key]!r} (supported: {value!r})"
        for key, value in _FIXED.items()
        if theirs.get(key, value) != value
    ]
    activation = theirs.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        unsupported.append(f"hidden_act {activation!r} (supported: {', '.join(_ACTIVATIONS)})")
    if unsupported:
        raise CheckpointError(f"our BERT does not support these settings: {'; '.join(unsupported)}")
    return {
        "num_layers": theirs["num_hidden_layers"],
        "hidden_size": theirs["hidden_size"],
        "num_attention_heads": theirs["num_attention_heads"],
        "ff_hidden_size": theirs["intermediate_size"],
        "vocab_size": theirs["vocab_size"],
        "max_position_embeddings": theirs.get("max_position_embeddings", 512),
        "activation": _ACTIVATIONS[activation],
        "layernorm_epsilon": theirs.get("layer_norm_eps", 1e-12),
        "hidden_dropout": theirs.get("hidden_dropout_prob", 0.1),
        "attention_dropout": theirs.get("attention_probs_dropout_prob", 0.1),
        "init_method_std": theirs.get("initializer_range", 0.02),
        "binary_head": _BOTH in (theirs.get("architectures") or [_BOTH]),
    }


def their_class(config: Config) -> str:
    """Return the name of the Hugging Face class with the heads of ``config``."""
    return _BOTH if config.own.binary_head else _WORDS


def our_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of all heads, concatenated per sample: [b, s v + 2] or [b, s v].

    All tokens are in the first segment.
    """
    import torch  # takes half a second; a dry run that reads only settings does not need it

    logits = model(tokens, torch.zeros_like(tokens))
    words, *scores = (logits,) if isinstance(logits, torch.Tensor) else logits
    return torch.cat([words.transpose(0, 1).flatten(1), *scores], dim=1)


def their_logits(out: Any) -> torch.Tensor:
    """Return the logits of all heads from the output of the Hugging Face model, as ``our_logits`` does."""
    import torch  # takes half a second; a dry run that reads only settings does not need it

    if hasattr(out, "logits"):
        words: torch.Tensor = out.logits.flatten(1)
        return words
    return torch.cat([out.prediction_logits.flatten(1), out.seq_relationship_logits], dim=1)


FORMAT = HFFormat(
    model_types=("bert",),
    problems=problems,
    fields=fields,
    values=values,
    **by_recipes(recipes),
    word=_THEIR_WORD,
    head=_THEIR_HEAD,
    unread=_UNREAD,
    named=named,
    auto=their_class,
    our_logits=our_logits,
    their_logits=their_logits,
)
FORMATS = (FORMAT,)
