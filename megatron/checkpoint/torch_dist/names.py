"""Our weight names in ``torch_dist`` checkpoints of Megatron-Core's GPT. No torch.

| Megatron-Core, after ``decoder.layers.`` | ours, after ``layers.i.`` |
|---|---|
| self_attention.linear_qkv.layer_norm_weight, or input_layernorm.weight | input_norm.weight |
| self_attention.linear_qkv, linear_proj | attention.query_key_value, attention.dense |
| self_attention.q_layernorm, k_layernorm | attention.query_norm, attention.key_norm |
| mlp.linear_fc1.layer_norm_weight, or pre_mlp_layernorm.weight | post_attention_norm.weight |
| mlp.linear_fc1, linear_fc2 | mlp.up, mlp.down |
| mlp.router.weight, bias, expert_bias | mlp.router.* |
| mlp.experts.experts.linear_fc1.weight, element e | mlp.experts.e.up.weight |
| mlp.shared_experts.linear_fc1, gate_weight | mlp.shared_expert.up, mlp.shared_expert_gate.weight |

A tensor's layers are stacked in its first dimension if all layers are alike; otherwise the layer number is part
of the name. Experts are the next dimension, or also part of the name. Grouped and sequential experts have the
same names. A gated layer's rows are all gates, then all values; they may be two tensors ``_w`` and ``_v``.

Optimizer states have the same names after ``optimizer.state.exp_avg.`` and the like.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

_TOP_LEVEL = {
    "embedding.word.weight": "embedding.word_embeddings.weight",
    "embedding.position.weight": "embedding.position_embeddings.weight",
    "final_norm.weight": "decoder.final_layernorm.weight",
    "final_norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(up|down)\.(weight|bias)")
_MODULES = {
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "attention.query_norm": "self_attention.q_layernorm",
    "attention.key_norm": "self_attention.k_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
    "mlp.router": "mlp.router",
    "mlp.shared_expert.up": "mlp.shared_experts.linear_fc1",
    "mlp.shared_expert.down": "mlp.shared_experts.linear_fc2",
}
_EXPERT_MODULES = {"up": "linear_fc1", "down": "linear_fc2"}
_NORMS = {
    "input_norm": ("self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}"),
    "post_attention_norm": ("mlp.linear_fc1.layer_norm_{}", "pre_mlp_layernorm.{}"),
}
LAYERS = "decoder.layers."
NOT_WEIGHTS = re.compile(r"optimizer\..*|.*_extra_state(/.*)?|rng_state.*|common_state.*|rerun_state_machine.*")
"""Entries that are not weights of the model."""


class Place(NamedTuple):
    """A tensor, or an element of a stacked tensor, in a checkpoint.

    Args:
        name: tensor name.
        element: indices along its first dimensions; empty for the full tensor.
    """

    name: str
    element: tuple[int, ...] = ()


def candidates(our_name: str) -> Iterator[Place]:
    """Yield places where the weight ``our_name`` may be stored; none for a weight that Megatron-Core lacks."""
    if our_name in _TOP_LEVEL:
        yield Place(_TOP_LEVEL[our_name])
        return
    layer = _LAYER.fullmatch(our_name)
    if layer is None:
        return
    layer_idx = int(layer[1])
    for suffix, expert in _layer_suffixes(layer[2]):
        yield Place(LAYERS + suffix, (layer_idx, *expert))
        yield Place(f"{LAYERS}{layer_idx}.{suffix}", expert)


def _layer_suffixes(our_suffix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name within a layer, expert index) for our name within a layer."""
    if expert := _EXPERT.fullmatch(our_suffix):
        module, kind = _EXPERT_MODULES[expert[2]], expert[3]
        yield f"mlp.experts.experts.{module}.{kind}", (int(expert[1]),)
        yield f"mlp.experts.experts.{expert[1]}.{module}.{kind}", ()
        return
    if our_suffix == "mlp.shared_expert_gate.weight":
        yield "mlp.shared_experts.gate_weight", ()
        return
    module, _, kind = our_suffix.rpartition(".")
    if module in _NORMS:
        yield from ((pattern.format(kind), ()) for pattern in _NORMS[module])
    elif module in _MODULES:
        yield f"{_MODULES[module]}.{kind}", ()


def locate(our_name: str, names: Collection[str]) -> tuple[Place, ...]:
    """Find the places in a checkpoint that make up the weight ``our_name``; empty if it has none.

    Args:
        names: tensor names in the checkpoint.

    Returns:
        One place, or two for a gated layer whose gate and value are separate tensors.
    """
    for place in candidates(our_name):
        if place.name in names:
            return (place,)
        parts = tuple(Place(place.name + part, place.element) for part in ("_w", "_v"))
        if all(part.name in names for part in parts):
            return parts
    return ()


class WeightNames:
    """Set of our weight names in a checkpoint."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __contains__(self, our_name: object) -> bool:
        return isinstance(our_name, str) and bool(locate(our_name, self._names))


def stored_places(our_name: str, *, is_stacked: bool, has_experts: bool) -> tuple[Place, ...]:
    """Find the places at which an exported checkpoint stores the weight ``our_name``; empty if there are none.

    Args:
        is_stacked: the model's layers are alike, and stacked.
        has_experts: the layer has experts. Its second norm is then stored under two names: the name in Transformer
            Engine's layers and the name in Megatron-Core's own layers.
    """
    places = list(candidates(our_name))
    if len(places) == 1:
        return tuple(places)
    by_name = places[0::2] if is_stacked else places[1::2]
    if ".post_attention_norm." in our_name:
        return tuple(by_name) if has_experts else (by_name[0],)
    return (by_name[0],) if by_name else ()
