"""Bit-exact conversion of GPT-2 weights to and from Hugging Face's ``GPT2LMHeadModel``.

| ours | Hugging Face | change |
|---|---|---|
| embedding.word.weight [v, h] | transformer.wte.weight | |
| embedding.position.weight [s, h] | transformer.wpe.weight | |
| layers.{i}.input_norm.* | transformer.h.{i}.ln_1.* | |
| layers.{i}.attention.query_key_value.* | transformer.h.{i}.attn.c_attn.* | transposed; [q, k, v] -> q, k, v per head |
| layers.{i}.attention.dense.* | transformer.h.{i}.attn.c_proj.* | transposed |
| layers.{i}.post_attention_norm.* | transformer.h.{i}.ln_2.* | |
| layers.{i}.mlp.up.* | transformer.h.{i}.mlp.c_fc.* | transposed |
| layers.{i}.mlp.down.* | transformer.h.{i}.mlp.c_proj.* | transposed |
| final_norm.* | transformer.ln_f.* | |
| head.weight (only when untied) | lm_head.weight | |

Hugging Face's ``Conv1D`` stores weights as [in, out]; ours are [out, in]. The GPT-2 files on the hub omit the prefix
``transformer.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common import huggingface
from megatron.models.common.huggingface import HFFormat, Tensors, WeightMapping, unsupported_settings

if TYPE_CHECKING:
    import torch

_TOP_NAMES = {"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"}
_LAYER_NAMES = {
    "input_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_TOP_BY_HF_NAME = {hf_name: our_name for our_name, hf_name in _TOP_NAMES.items()}
_LAYER_BY_HF_NAME = {hf_name: our_name for our_name, hf_name in _LAYER_NAMES.items()}
_CONV1D_LAYERS = {"attention.query_key_value", "attention.dense", "mlp.up", "mlp.down"}
_LAYER_WEIGHT = re.compile(r"layers\.\d+\..+\.weight")
_HF_MASKS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
_ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"}
_HF_ACTIVATIONS = {"gelu-tanh": "gelu_new", "gelu": "gelu"}
_WORD_EMBEDDING, _HEAD, _HF_HEAD = "embedding.word.weight", "head.weight", "lm_head.weight"


def weight_mapping(name: str, num_heads: int) -> WeightMapping | None:
    """Return the mapping for our weight ``name``, or None if GPT-2 has no such weight."""
    hf_name = _hf_name(name)
    if hf_name is None:
        return None
    layer_name = re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", name)
    if layer_name == "attention.query_key_value":
        return WeightMapping((hf_name,), num_blocks=num_heads, num_packed=3, is_transposed=True)
    return WeightMapping((hf_name,), is_transposed=layer_name in _CONV1D_LAYERS)


def to_ours(hf_state: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """Convert ``GPT2LMHeadModel.state_dict()`` to our logical names and weights, which do not share memory with it.

    The result has ``head.weight`` only if ``lm_head.weight`` differs from the word embedding.

    Raises:
        CheckpointError: a name is not in Hugging Face's GPT-2; the message lists all of them.
    """
    hf_weights = {name: tensor for name, tensor in hf_state.items() if not _HF_MASKS.fullmatch(name)}
    names = {hf_name: _our_name(hf_name) for hf_name in hf_weights}
    if unknown := [hf_name for hf_name, name in names.items() if name is None]:
        raise CheckpointError(f"GPT2LMHeadModel has no weights with these names: {', '.join(unknown)}")
    weights = {}
    for hf_name, tensor in hf_weights.items():
        mapping = weight_mapping(name := str(names[hf_name]), num_heads)
        assert mapping is not None  # _our_name uses the inverse of the same table
        weights[name] = huggingface.weight_from_hf(mapping, dict.fromkeys(mapping.hf_names, tensor))
    if _HEAD in weights and _WORD_EMBEDDING in weights and weights[_HEAD].equal(weights[_WORD_EMBEDDING]):
        del weights[_HEAD]
    return weights


def from_ours(weights: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """Convert our weights to the state dict of ``GPT2LMHeadModel``; a tied head shares the word embedding's tensor.

    Raises:
        CheckpointError: a name is not in our GPT-2; the message lists all of them.
    """
    if unknown := [name for name in weights if weight_mapping(name, num_heads) is None]:
        raise CheckpointError(f"our GPT-2 has no weights with these names: {', '.join(unknown)}")
    hf_weights: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        mapping = weight_mapping(name, num_heads)
        assert mapping is not None
        hf_weights.update(huggingface.weight_to_hf(mapping, tensor))
    if _HEAD not in weights and _WORD_EMBEDDING in weights:
        hf_weights[_HF_HEAD] = hf_weights["transformer.wte.weight"]
    return hf_weights


def model_fields(hf_config: Any) -> dict[str, Any]:
    """Convert a Hugging Face ``GPT2Config`` (or its dict) to our model settings, by field name.

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    settings = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
    activation = settings.get("activation_function", "gelu_new")
    required_values = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    unsupported = [
        f"{key} {settings[key]}" for key, required in required_values.items() if settings.get(key, required) != required
    ]
    if activation not in _ACTIVATIONS:
        unsupported.append(f"activation_function {activation!r} (supported: {', '.join(_ACTIVATIONS)})")
    if unsupported:
        raise CheckpointError(f"our GPT-2 does not support these settings: {'; '.join(unsupported)}")
    return {
        "num_layers": settings["n_layer"],
        "hidden_size": settings["n_embd"],
        "num_attention_heads": settings["n_head"],
        "ff_hidden_size": settings.get("n_inner") or 4 * settings["n_embd"],
        "activation": _ACTIVATIONS[activation],
        "hidden_bias": True,
        "layernorm_epsilon": settings.get("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": settings.get("n_positions", 1024),
        "vocab_size": settings["vocab_size"],
        "untie_embeddings": not settings.get("tie_word_embeddings", True),
    }


def _our_name(hf_name: str) -> str | None:
    """Convert a Hugging Face tensor name to ours, or return None if it is unknown."""
    if hf_name == _HF_HEAD:
        return _HEAD
    stem, _, suffix = hf_name.removeprefix("transformer.").rpartition(".")
    if stem in _TOP_BY_HF_NAME:
        return f"{_TOP_BY_HF_NAME[stem]}.{suffix}"
    match = re.fullmatch(r"h\.(\d+)\.(.+)", stem)
    if match and match[2] in _LAYER_BY_HF_NAME:
        return f"layers.{match[1]}.{_LAYER_BY_HF_NAME[match[2]]}.{suffix}"
    return None


def _hf_name(our_name: str) -> str | None:
    """Convert our weight name to Hugging Face's, or return None if it is unknown."""
    if our_name == _HEAD:
        return _HF_HEAD
    stem, _, suffix = our_name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"transformer.{_TOP_NAMES[stem]}.{suffix}"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
    if match and match[2] in _LAYER_NAMES:
        return f"transformer.h.{match[1]}.{_LAYER_NAMES[match[2]]}.{suffix}"
    return None


def _problems(config: Config) -> Iterator[str]:
    model = config.model
    yield from unsupported_settings(model, {"num_query_groups": model.num_attention_heads})
    if model.activation not in _HF_ACTIVATIONS:
        yield f"--activation must be {' or '.join(_HF_ACTIVATIONS)}, got {model.activation}"
    if model.attention_size != model.hidden_size:
        yield (
            "--num-attention-heads times --kv-hidden-size must equal --hidden-size, got "
            f"{model.num_attention_heads} heads of {model.kv_hidden_size} for {model.hidden_size}"
        )


def _fields(config: Config) -> dict[str, Any]:
    """Convert ``config`` to the contents of config.json.

    If the model has no biases, zero biases are exported, and ``"hidden_bias": false`` marks them.
    """
    model = config.model
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_ctx": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ff_hidden_size,
        "activation_function": _HF_ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings,
    }
    return fields if model.hidden_bias else {**fields, "hidden_bias": False}


def _values(hf_config: dict[str, Any]) -> dict[str, Any]:
    return {
        **model_fields(hf_config),
        "hidden_bias": hf_config.get("hidden_bias", True),
        "hidden_dropout": hf_config.get("resid_pdrop", 0.1),
        "attention_dropout": hf_config.get("attn_pdrop", 0.1),
        "init_method_std": hf_config.get("initializer_range", 0.02),
    }


def _recipes(config: Config) -> dict[str, WeightMapping]:
    """Return all weight mappings. Without biases, Hugging Face's zero biases are not read."""
    model = config.model
    names = [_WORD_EMBEDDING, "embedding.position.weight", "final_norm.weight", "final_norm.bias"]
    for i in range(model.num_layers):
        for layer_name in _LAYER_NAMES:
            suffixes = ("weight", "bias") if model.hidden_bias or layer_name not in _CONV1D_LAYERS else ("weight",)
            names += [f"layers.{i}.{layer_name}.{suffix}" for suffix in suffixes]
    if model.untie_embeddings:
        names.append(_HEAD)
    mappings = {name: weight_mapping(name, model.num_attention_heads) for name in names}
    return {name: mapping for name, mapping in mappings.items() if mapping is not None}


def _all_to_ours(hf_weights: Tensors, config: Config) -> Tensors:
    weights = to_ours(hf_weights, config.model.num_attention_heads)
    if config.model.untie_embeddings:
        weights.setdefault(_HEAD, hf_weights[_HF_HEAD].clone())
    return weights


def _all_from_ours(weights: Tensors, config: Config) -> Tensors:
    return from_ours({**weights, **_zero_biases(weights, config)}, config.model.num_attention_heads)


def _zero_biases(weights: Tensors, config: Config) -> Tensors:
    if config.model.hidden_bias:
        return {}
    names = {name: f"{name.removesuffix('weight')}bias" for name in weights if _LAYER_WEIGHT.fullmatch(name)}
    return {
        bias: weights[name].new_zeros(weights[name].shape[0]) for name, bias in names.items() if bias not in weights
    }


FORMAT = HFFormat(
    model_types=("gpt2",),
    problems=_problems,
    fields=_fields,
    values=_values,
    to_ours=_all_to_ours,
    from_ours=_all_from_ours,
    recipes=_recipes,
    word="transformer.wte.weight",
    optional_prefix="transformer.",  # omitted in the GPT-2 files on the hub
    optional_biases=re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_\w+\.bias"),
    ignored_names=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
)
FORMATS = (FORMAT,)
