"""Our names of the weights in checkpoints of Megatron-LM and its descendants.

| theirs, behind prefixes | ours |
|---|---|
| word_embeddings, position_embeddings | embedding.word, embedding.position |
| {transformer, encoder}.layers.{i}.input_layernorm | layers.{i}.input_norm |
| ...{attention, self_attention}.{query_key_value, dense} | ...attention.* |
| ...post_attention_layernorm | ...post_attention_norm, in a decoder ...cross_norm |
| ...inter_attention.{query, key_value, dense} | ...cross_attention.* |
| ...post_inter_attention_layernorm | ...post_attention_norm |
| ...mlp.{dense_h_to_4h, dense_4h_to_h} | ...mlp.{up, down} |
| ...final_layernorm | final_norm |
| output_layer, lm_head | head |

Since 2023 Megatron-LM's norms are called input_norm and so on, without "layer".
A T5 has ``encoder.`` and ``decoder.`` before the layers, here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_PREFIX = re.compile(r"^(module\.|model\.|language_model\.|embedding\.)+")
_LAYER = re.compile(r"(transformer|encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_FINAL = re.compile(r"(transformer|encoder|decoder)\.final_(?:layer_)?norm\.(weight|bias)")
_UNREAD = re.compile(
    r"(.*_extra_state|.*masked_bias|.*attention\.bias|(.*\.)?word_embeddings_for_head\..*|.*pooler\..*)"
)
_SIDES = {"transformer": "encoder", "encoder": "encoder", "decoder": "decoder"}
_TOP = {
    "word_embeddings.weight": "embedding.word.weight",
    "position_embeddings.weight": "embedding.position.weight",
    "output_layer.weight": "head.weight",
    "lm_head.weight": "head.weight",
}
_PARTS = {
    "input_norm": "input_norm",
    "attention.query_key_value": "attention.query_key_value",
    "self_attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "self_attention.dense": "attention.dense",
    "inter_attention.query": "cross_attention.query",
    "inter_attention.key_value": "cross_attention.key_value",
    "inter_attention.dense": "cross_attention.dense",
    "post_attention_norm": "post_attention_norm",
    "post_inter_attention_norm": "post_attention_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_ROWS = ("embedding.word", "head", "attention.query_key_value", "cross_attention.query", "cross_attention.key_value")


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of nested dictionaries by their names joined with dots; what is no tensor is left out."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            flat[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{key}."))
    return flat


def is_unread(name: str) -> bool:
    """Return whether a tensor of that name is a buffer or a copy, which no model of ours reads."""
    return _UNREAD.fullmatch(name) is not None


def our_name(theirs: str, first_layers: Mapping[str, int]) -> str | None:
    """Return our name of ``theirs`` in a model with two sides, None if we have none.

    Args:
        first_layers: of "encoder" and "decoder", the global number of the first layer of this stage.
    """
    name = _PREFIX.sub("", theirs).replace("layernorm.", "norm.")
    if name in _TOP:
        return _TOP[name]
    if match := _FINAL.fullmatch(name):
        return f"{_SIDES[match[1]]}.final_norm.{match[2]}"
    match = _LAYER.fullmatch(name)
    if match is None or match[3] not in _PARTS:
        return None
    side, part = _SIDES[match[1]], _PARTS[match[3]]
    if side == "decoder" and match[3] == "post_attention_norm":
        part = "cross_norm"
    return f"{side}.layers.{int(match[2]) + first_layers[side]}.{part}.{match[4]}"


def layers_of(side: str, names: Iterable[str]) -> int:
    """Return how many layers of ``side`` there are, by our ``names``."""
    numbers = [int(name.split(".")[2]) for name in names if name.startswith(f"{side}.layers.")]
    return max(numbers, default=-1) + 1


def of_one_side(name: str) -> str:
    """Return our name of the encoder's weight ``name`` in a model that has no decoder."""
    return name.removeprefix("encoder.")


def cut_dim(ours: str) -> int | None:
    """Return the dimension along which tensor ranks hold slices of the weight; None: each holds all of it."""
    stem, _, kind = ours.rpartition(".")
    if stem.endswith(_ROWS) or stem.endswith("mlp.up"):
        return 0
    return 1 if kind == "weight" and stem.endswith((".dense", "mlp.down")) else None


def heads_parts(ours: str) -> int:
    """Return how many of query, key and value a weight's rows hold for each head; 1 where their order is no matter."""
    stem = ours.rpartition(".")[0]
    return 3 if stem.endswith("query_key_value") else 2 if stem.endswith("key_value") else 1
