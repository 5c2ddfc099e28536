"""Bit-exact conversion of T5, T5 v1.1 and mT5 weights to and from Hugging Face's ``T5ForConditionalGeneration``.

| ours | Hugging Face | change |
|---|---|---|
| embedding.word.weight [v, h] | shared.weight, {side}.embed_tokens.weight, lm_head.weight if tied | one for all |
| head.weight [v, h] (only when untied) | lm_head.weight | |
| {side}.bias.weight [buckets, a] | {side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight | |
| {side}.layers.{i}.input_norm | {side}.block.{i}.layer.0.layer_norm | |
| {side}.layers.{i}.attention.query_key_value | ...layer.0.SelfAttention.q, .k, .v | q, k, v per head |
| {side}.layers.{i}.attention.dense | ...layer.0.SelfAttention.o | |
| decoder.layers.{i}.cross_norm | ...layer.1.layer_norm | |
| decoder.layers.{i}.cross_attention.query | ...layer.1.EncDecAttention.q | |
| decoder.layers.{i}.cross_attention.key_value | ...layer.1.EncDecAttention.k, .v | k, v per head |
| decoder.layers.{i}.cross_attention.dense | ...layer.1.EncDecAttention.o | |
| {side}.layers.{i}.post_attention_norm | ...layer.{1 or 2}.layer_norm | |
| {side}.layers.{i}.mlp.up | ...layer.{1 or 2}.DenseReluDense.wi, or .wi_0 and .wi_1 | gate, value per row |
| {side}.layers.{i}.mlp.down | ...layer.{1 or 2}.DenseReluDense.wo | |
| {side}.final_norm | {side}.final_layer_norm | |

The variant with learned positions has no counterpart. ``model_fields`` determines whether the head is tied: since
transformers 5, ``tie_word_embeddings`` is true for every T5, and only ``scale_decoder_outputs`` shows an untied head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common import huggingface
from megatron.models.common.huggingface import HFFormat, Tensors, WeightMapping

if TYPE_CHECKING:
    import torch

_WORD, _HEAD, _HF_WORD, _HF_HEAD = "embedding.word", "head", "shared", "lm_head"
_WORD_COPIES = ("encoder.embed_tokens", "decoder.embed_tokens")
_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"
_BIAS = f"block.0.{_SELF}.relative_attention_bias"
_IGNORED_BIAS = (
    f"decoder.block.0.{_CROSS}.relative_attention_bias"  # in old files; the Hugging Face model does not read it either
)
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gated-gelu": "gated-gelu",
    "gated-gelu_new": "gated-gelu",
    "gated-silu": "gated-silu",
}
_DEFAULT_PROJECTIONS = {"t5": "relu", "mt5": "gated-gelu"}
"""Defaults of the Hugging Face classes by model type."""
_HF_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu-tanh": "gelu_new",
    "gated-gelu": "gated-gelu",
    "gated-silu": "gated-silu",
}
NameMapping = tuple[str, tuple[str, ...]]
"""(our name, Hugging Face names of the tensors whose row blocks are interleaved in our weight)."""


def to_ours(hf_state: dict[str, torch.Tensor], num_heads: int, *, is_untied: bool) -> dict[str, torch.Tensor]:
    """Convert ``T5ForConditionalGeneration.state_dict()`` to our logical names and weights; no memory is shared.

    Args:
        is_untied: the head has separate weights, as returned by ``model_fields``.

    Raises:
        CheckpointError: names are not in Hugging Face's T5 (the message lists all of them), or a copy of the word table
            differs from it.
    """
    hf_weights = {name.removesuffix(".weight"): tensor.detach() for name, tensor in hf_state.items()}
    _drop_copies(hf_weights, (*_WORD_COPIES, *(() if is_untied else (_HF_HEAD,))))
    hf_weights.pop(_IGNORED_BIAS, None)
    weights = {}
    for name, hf_names in _name_mappings(hf_weights):
        if all(hf_name in hf_weights for hf_name in hf_names):
            tensors = {hf_name: hf_weights.pop(hf_name) for hf_name in hf_names}
            mapping = _weight_mapping(name, hf_names, tensors[hf_names[0]].shape[0], num_heads)
            weights[f"{name}.weight"] = huggingface.weight_from_hf(mapping, tensors)
    if hf_weights:
        raise CheckpointError(f"T5ForConditionalGeneration has no weights with these names: {', '.join(hf_weights)}")
    return weights


def from_ours(weights: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """Convert our weights to the state dict of ``T5ForConditionalGeneration``; copies of the word table share memory.

    Raises:
        CheckpointError: a name is not in our T5; the message lists all of them.
    """
    remaining = {name.removesuffix(".weight"): tensor.detach() for name, tensor in weights.items()}
    hf_weights: dict[str, torch.Tensor] = {}
    for name, hf_names in _our_name_mappings(remaining):
        if name in remaining:
            tensor = remaining.pop(name)
            hf_weights.update(
                huggingface.weight_to_hf(
                    _weight_mapping(name, hf_names, tensor.shape[0] // len(hf_names), num_heads), tensor
                )
            )
    if remaining:
        raise CheckpointError(f"our T5 with relative positions has no weights with these names: {', '.join(remaining)}")
    if _HF_WORD in hf_weights:
        copies = (*_WORD_COPIES, *(() if _HF_HEAD in hf_weights else (_HF_HEAD,)))
        hf_weights.update(dict.fromkeys(copies, hf_weights[_HF_WORD]))
    return {f"{name}.weight": tensor for name, tensor in hf_weights.items()}


def model_fields(hf_config: Any) -> dict[str, Any]:
    """Convert a Hugging Face ``T5Config`` or ``MT5Config`` (or its dict) to our settings, by field name.

    Raises:
        CheckpointError: the feed-forward activation is not supported.
    """
    settings = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
    projection = settings.get("feed_forward_proj") or _DEFAULT_PROJECTIONS[settings.get("model_type", "t5")]
    if projection not in _ACTIVATIONS:
        raise CheckpointError(
            f"our T5 does not support feed_forward_proj {projection!r} (supported: {', '.join(_ACTIVATIONS)})"
        )
    return {
        "num_layers": settings["num_layers"],
        "enc_layers": settings["num_layers"],
        "dec_layers": settings.get("num_decoder_layers") or settings["num_layers"],
        "hidden_size": settings["d_model"],
        "num_attention_heads": settings["num_heads"],
        "kv_hidden_size": settings["d_kv"],
        "ff_hidden_size": settings["d_ff"],
        "activation": _ACTIVATIONS[projection],
        "hidden_bias": False,
        "layernorm_epsilon": settings.get("layer_norm_epsilon", 1e-6),
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": settings.get("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": settings.get("relative_attention_max_distance", 128),
        "max_position_embeddings": 0,
        "vocab_size": settings["vocab_size"],
        "untie_embeddings": not _has_scaled_head(settings),
    }


def _has_scaled_head(settings: dict[str, Any]) -> bool:
    """Return True if the head's input is ``x h ** -0.5``, as with tied heads; mT5 never scales it."""
    if settings.get("model_type", "t5") != "t5":
        return False
    return settings.get("scale_decoder_outputs", settings.get("tie_word_embeddings", True))


def _drop_copies(hf_weights: dict[str, torch.Tensor], copies: tuple[str, ...]) -> None:
    for name in copies:
        if name not in hf_weights:
            continue
        copy = hf_weights.pop(name)
        if not copy.equal(hf_weights.setdefault(_HF_WORD, copy)):
            raise CheckpointError(
                f"{name}.weight must equal {_HF_WORD}.weight, of which it is a copy, but its values differ. "
                "Convert a model with separate head weights as untied."
            )


def _name_mappings(hf_weights: dict[str, torch.Tensor]) -> list[NameMapping]:
    """Map all layer weights in ``hf_weights``, which has Hugging Face names."""
    is_gated = any(name.endswith(".wi_0") for name in hf_weights)
    return _all_name_mappings(_layers(hf_weights, "block"), is_gated)


def _our_name_mappings(weights: dict[str, torch.Tensor]) -> list[NameMapping]:
    """Map all layer weights in ``weights``, which has our names."""
    is_gated = any(
        tensor.shape[0] == 2 * weights[name.replace("mlp.up", "mlp.down")].shape[1]
        for name, tensor in weights.items()
        if name.endswith(".mlp.up") and name.replace("mlp.up", "mlp.down") in weights
    )
    return _all_name_mappings(_layers(weights, "layers"), is_gated)


def _layers(names: Iterable[str], list_name: str) -> set[tuple[str, int]]:
    """Find (side, index) for all layers in ``names``, which have the form ``side.list_name.index``."""
    matches = (re.match(rf"(encoder|decoder)\.{list_name}\.(\d+)\.", name) for name in names)
    return {(match[1], int(match[2])) for match in matches if match}


def _all_name_mappings(layers: set[tuple[str, int]], is_gated: bool) -> list[NameMapping]:
    merges: list[NameMapping] = [(_WORD, (_HF_WORD,)), (_HEAD, (_HF_HEAD,))]
    for side in ("encoder", "decoder"):
        merges.append((f"{side}.bias", (f"{side}.{_BIAS}",)))
        for layer_idx in sorted(layer_idx for layer_side, layer_idx in layers if layer_side == side):
            merges.extend(_layer_name_mappings(side, layer_idx, is_gated))
        merges.append((f"{side}.final_norm", (f"{side}.final_layer_norm",)))
    return merges


def _layer_name_mappings(side: str, layer_idx: int, is_gated: bool) -> list[NameMapping]:
    ff_layer = "layer.1" if side == "encoder" else "layer.2"
    up_names = ("wi_0", "wi_1") if is_gated else ("wi",)
    merges: dict[str, tuple[str, ...]] = {
        "input_norm": ("layer.0.layer_norm",),
        "attention.query_key_value": (f"{_SELF}.q", f"{_SELF}.k", f"{_SELF}.v"),
        "attention.dense": (f"{_SELF}.o",),
        "post_attention_norm": (f"{ff_layer}.layer_norm",),
        "mlp.up": tuple(f"{ff_layer}.DenseReluDense.{name}" for name in up_names),
        "mlp.down": (f"{ff_layer}.DenseReluDense.wo",),
    }
    if side == "decoder":
        merges["cross_norm"] = ("layer.1.layer_norm",)
        merges["cross_attention.query"] = (f"{_CROSS}.q",)
        merges["cross_attention.key_value"] = (f"{_CROSS}.k", f"{_CROSS}.v")
        merges["cross_attention.dense"] = (f"{_CROSS}.o",)
    our_layer, hf_layer = f"{side}.layers.{layer_idx}", f"{side}.block.{layer_idx}"
    return [
        (f"{our_layer}.{name}", tuple(f"{hf_layer}.{hf_name}" for hf_name in hf_names))
        for name, hf_names in merges.items()
    ]


def _weight_mapping(name: str, hf_names: tuple[str, ...], rows: int, num_heads: int) -> WeightMapping:
    """Build the mapping for our weight ``name``.

    Args:
        hf_names: Hugging Face tensor names. Gate and value are interleaved row by row, other parts head by head.
        rows: rows per part.
    """
    return WeightMapping(
        hf_names, num_blocks=rows if name.endswith(".mlp.up") else num_heads if len(hf_names) > 1 else 1
    )


def _problems(config: Config) -> Iterator[str]:
    if not config.model.has_relative_positions:
        yield "--position-embedding-type must be relative, got learned positions (CPM's variant)"
    if config.model.hidden_bias:
        yield "--hidden-bias is not supported"
    if config.model.activation not in _HF_ACTIVATIONS:
        yield f"--activation must be one of {', '.join(_HF_ACTIVATIONS)}, got {config.model.activation}"


def _fields(config: Config) -> dict[str, Any]:
    """Convert ``config`` to the contents of config.json.

    In Hugging Face, a tied head scales its input by ``h ** -0.5``, but an untied head does not. T5 v1.1 and mT5 have
    untied heads.
    """
    model, sides = config.model, config.family_config
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": model.vocab_size,
        "d_model": model.hidden_size,
        "d_kv": model.kv_hidden_size,
        "d_ff": model.ff_hidden_size,
        "num_layers": sides.enc_layers,
        "num_decoder_layers": sides.dec_layers,
        "num_heads": model.num_attention_heads,
        "feed_forward_proj": _HF_ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.layernorm_epsilon,
        "dropout_rate": model.hidden_dropout,
        "relative_attention_num_buckets": sides.relative_attention_num_buckets,
        "relative_attention_max_distance": sides.relative_attention_max_distance,
        "tie_word_embeddings": not model.untie_embeddings,
        "scale_decoder_outputs": not model.untie_embeddings,
    }


def _values(hf_config: dict[str, Any]) -> dict[str, Any]:
    rate = hf_config.get("dropout_rate", 0.1)
    return {**model_fields(hf_config), "hidden_dropout": rate, "attention_dropout": rate}


def _recipes(config: Config) -> dict[str, WeightMapping]:
    """Return all weight mappings."""
    model, sides = (
        config.model,
        {"encoder": config.family_config.enc_layers, "decoder": config.family_config.dec_layers},
    )
    layers = {(side, layer_idx) for side, num_layers in sides.items() for layer_idx in range(num_layers)}
    mappings = {}
    for name, hf_names in _all_name_mappings(layers, model.activation.startswith("gated-")):
        if name != _HEAD or model.untie_embeddings:
            tensor_names = tuple(f"{hf_name}.weight" for hf_name in hf_names)
            mappings[f"{name}.weight"] = _weight_mapping(
                name, tensor_names, model.ff_hidden_size, model.num_attention_heads
            )
    return mappings


def _all_to_ours(hf_weights: Tensors, config: Config) -> Tensors:
    return to_ours(hf_weights, config.model.num_attention_heads, is_untied=config.model.untie_embeddings)


def _all_from_ours(weights: Tensors, config: Config) -> Tensors:
    return from_ours(weights, config.model.num_attention_heads)


def _decoder_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Make decoder tokens [b, s / 2] that differ from the encoder's ``tokens`` [b, s]."""
    return tokens.flip(1)[:, : tokens.shape[1] // 2]


def _model_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, _decoder_tokens(tokens)).transpose(0, 1)
    return logits


def _hf_inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens, "decoder_input_ids": _decoder_tokens(tokens)}


def _mt5_problems(config: Config) -> Iterator[str]:
    yield from _problems(config)
    if not config.model.untie_embeddings:
        yield "mT5 requires an untied head, got a tied head. Add --untie-embeddings-and-output-weights"


def _mt5_fields(config: Config) -> dict[str, Any]:
    """Omit ``scale_decoder_outputs`` from config.json.

    The Hugging Face class treats every mT5 as tied and never scales its head. In files on the hub,
    ``tie_word_embeddings`` has the true value.
    """
    fields = {**_fields(config), "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5"}
    del fields["scale_decoder_outputs"]
    return fields


FORMAT = HFFormat(
    model_types=("t5",),
    problems=_problems,
    fields=_fields,
    values=_values,
    to_ours=_all_to_ours,
    from_ours=_all_from_ours,
    recipes=_recipes,
    word="shared.weight",
    word_copies=tuple(f"{name}.weight" for name in _WORD_COPIES),
    ties_missing_head=True,  # T5Config and MT5Config always set tie_word_embeddings
    ignored_names=re.compile(re.escape(f"{_IGNORED_BIAS}.weight")),
    logit_tolerance=1e-5,  # Hugging Face computes the variance of norms in fp32
    auto_class="AutoModelForSeq2SeqLM",
    model_logits=_model_logits,
    hf_inputs=_hf_inputs,
)
FORMATS = (FORMAT, replace(FORMAT, model_types=("mt5",), problems=_mt5_problems, fields=_mt5_fields))
"""The first format is also used for untied models (T5 v1.1), unless the imported folder or a flag selects mt5."""
