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

The ``Conv1D`` of Hugging Face stores weights as [in, out], ours are [out, in]. The GPT-2 files on the hub omit the
prefix ``transformer.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common import huggingface
from megatron.models.common.huggingface import HFFormat, Tensors, WeightMapping, other_settings

if TYPE_CHECKING:
    import torch

_TOP = {"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"}
_LAYER = {
    "input_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_TOP_OF_THEIRS = {theirs: ours for ours, theirs in _TOP.items()}
_LAYER_OF_THEIRS = {theirs: ours for ours, theirs in _LAYER.items()}
_CONV1D = {"attention.query_key_value", "attention.dense", "mlp.up", "mlp.down"}
_LAYER_WEIGHT = re.compile(r"layers\.\d+\..+\.weight")
_THEIR_MASKS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
_ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"}
_THEIR_ACTIVATIONS = {"gelu-tanh": "gelu_new", "gelu": "gelu"}
_WORD, _HEAD, _THEIR_HEAD = "embedding.word.weight", "head.weight", "lm_head.weight"


def recipe(name: str, num_heads: int) -> WeightMapping | None:
    """Return the mapping of our weight ``name``, or None if GPT-2 has no such weight."""
    their_name = _their_name(name)
    if their_name is None:
        return None
    layer_part = re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", name)
    if layer_part == "attention.query_key_value":
        return WeightMapping((their_name,), blocks=num_heads, parts_in_one=3, is_transposed=True)
    return WeightMapping((their_name,), is_transposed=layer_part in _CONV1D)


def to_ours(hf_state: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """Convert ``GPT2LMHeadModel.state_dict()`` to our logical names and weights, which do not share memory with it.

    The result has ``head.weight`` only if ``lm_head.weight`` differs from the word embedding.

    Raises:
        CheckpointError: a name is not in Hugging Face's GPT-2; the message lists all of them.
    """
    hf_weights = {name: tensor for name, tensor in hf_state.items() if not _THEIR_MASKS.fullmatch(name)}
    names = {their_name: _our_name(their_name) for their_name in hf_weights}
    if unknown := [their_name for their_name, name in names.items() if name is None]:
        raise CheckpointError(f"GPT2LMHeadModel has no weights with these names: {', '.join(unknown)}")
    ours = {}
    for their_name, tensor in hf_weights.items():
        mapping = recipe(name := str(names[their_name]), num_heads)
        assert mapping is not None  # _our_name uses the inverse of the same table
        ours[name] = huggingface.to_our_weight(mapping, dict.fromkeys(mapping.names, tensor))
    if _HEAD in ours and _WORD in ours and ours[_HEAD].equal(ours[_WORD]):
        del ours[_HEAD]
    return ours


def from_ours(ours: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """Convert our weights to the state dict of ``GPT2LMHeadModel``; a tied head shares the word embedding's tensor.

    Raises:
        CheckpointError: a name is not in our GPT-2; the message lists all of them.
    """
    if unknown := [name for name in ours if recipe(name, num_heads) is None]:
        raise CheckpointError(f"our GPT-2 has no weights with these names: {', '.join(unknown)}")
    hf_weights: dict[str, torch.Tensor] = {}
    for name, tensor in ours.items():
        mapping = recipe(name, num_heads)
        assert mapping is not None
        hf_weights.update(huggingface.from_our_weight(mapping, tensor))
    if _HEAD not in ours and _WORD in ours:
        hf_weights[_THEIR_HEAD] = hf_weights["transformer.wte.weight"]
    return hf_weights


def model_fields(hf_config: Any) -> dict[str, Any]:
    """Convert a Hugging Face ``GPT2Config`` (or its dict) to settings of our model, by field name.

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    settings = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
    activation = settings.get("activation_function", "gelu_new")
    fixed = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    problems = [f"{key} {settings[key]}" for key, required in fixed.items() if settings.get(key, required) != required]
    if activation not in _ACTIVATIONS:
        problems.append(f"activation_function {activation!r} (supported: {', '.join(_ACTIVATIONS)})")
    if problems:
        raise CheckpointError(f"our GPT-2 does not support these settings: {'; '.join(problems)}")
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


def _our_name(theirs: str) -> str | None:
    """Return our name for the Hugging Face tensor ``theirs``, or None if the tensor is unknown."""
    if theirs == _THEIR_HEAD:
        return _HEAD
    stem, _, suffix = theirs.removeprefix("transformer.").rpartition(".")
    if stem in _TOP_OF_THEIRS:
        return f"{_TOP_OF_THEIRS[stem]}.{suffix}"
    match = re.fullmatch(r"h\.(\d+)\.(.+)", stem)
    if match and match[2] in _LAYER_OF_THEIRS:
        return f"layers.{match[1]}.{_LAYER_OF_THEIRS[match[2]]}.{suffix}"
    return None


def _their_name(ours: str) -> str | None:
    """Return the Hugging Face name of our weight ``ours``, or None if the weight is unknown."""
    if ours == _HEAD:
        return _THEIR_HEAD
    stem, _, suffix = ours.rpartition(".")
    if stem in _TOP:
        return f"transformer.{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
    if match and match[2] in _LAYER:
        return f"transformer.h.{match[1]}.{_LAYER[match[2]]}.{suffix}"
    return None


def _problems(config: Config) -> Iterator[str]:
    model = config.model
    yield from other_settings(model, {"num_query_groups": model.num_attention_heads})
    if model.activation not in _THEIR_ACTIVATIONS:
        yield f"--activation must be {' or '.join(_THEIR_ACTIVATIONS)}, got {model.activation}"
    if model.attention_size != model.hidden_size:
        yield (
            "--num-attention-heads times --kv-hidden-size must equal --hidden-size, got "
            f"{model.num_attention_heads} heads of {model.kv_hidden_size} for {model.hidden_size}"
        )


def _fields(config: Config) -> dict[str, Any]:
    """Return the contents of config.json for ``config``.

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
        "activation_function": _THEIR_ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings,
    }
    return fields if model.hidden_bias else {**fields, "hidden_bias": False}


def _values(theirs: dict[str, Any]) -> dict[str, Any]:
    return {
        **model_fields(theirs),
        "hidden_bias": theirs.get("hidden_bias", True),
        "hidden_dropout": theirs.get("resid_pdrop", 0.1),
        "attention_dropout": theirs.get("attn_pdrop", 0.1),
        "init_method_std": theirs.get("initializer_range", 0.02),
    }


def _recipes(config: Config) -> dict[str, WeightMapping]:
    """Return the mapping of each weight of the model. Without biases, the zero biases of Hugging Face are not read."""
    model = config.model
    names = [_WORD, "embedding.position.weight", "final_norm.weight", "final_norm.bias"]
    for i in range(model.num_layers):
        for part in _LAYER:
            suffixes = ("weight", "bias") if model.hidden_bias or part not in _CONV1D else ("weight",)
            names += [f"layers.{i}.{part}.{suffix}" for suffix in suffixes]
    if model.untie_embeddings:
        names.append(_HEAD)
    mappings = {name: recipe(name, model.num_attention_heads) for name in names}
    return {name: mapping for name, mapping in mappings.items() if mapping is not None}


def _all_to_ours(theirs: Tensors, config: Config) -> Tensors:
    ours = to_ours(theirs, config.model.num_attention_heads)
    if config.model.untie_embeddings:
        ours.setdefault(_HEAD, theirs[_THEIR_HEAD].clone())
    return ours


def _all_from_ours(ours: Tensors, config: Config) -> Tensors:
    return from_ours({**ours, **_zero_biases(ours, config)}, config.model.num_attention_heads)


def _zero_biases(ours: Tensors, config: Config) -> Tensors:
    if config.model.hidden_bias:
        return {}
    names = {name: f"{name.removesuffix('weight')}bias" for name in ours if _LAYER_WEIGHT.fullmatch(name)}
    return {bias: ours[name].new_zeros(ours[name].shape[0]) for name, bias in names.items() if bias not in ours}


FORMAT = HFFormat(
    model_types=("gpt2",),
    problems=_problems,
    fields=_fields,
    values=_values,
    to_ours=_all_to_ours,
    from_ours=_all_from_ours,
    recipes=_recipes,
    word="transformer.wte.weight",
    short="transformer.",  # omitted in the GPT-2 files on the hub
    biases=re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_\w+\.bias"),
    unread=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
)
FORMATS = (FORMAT,)
