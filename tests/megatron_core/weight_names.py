"""Weights of our decoders under the names, and with the order of rows, of megatron-core's local layers.

The mapping is independent of ``megatron.checkpoint.legacy``. Programs that use megatron-core import this file, so it
imports neither package.

| ours | megatron-core |
|---|---|
| embedding.word, embedding.position | embedding.word_embeddings, embedding.position_embeddings |
| layers.N.{input_norm, post_attention_norm} | decoder.layers.N.{input_layernorm, pre_mlp_layernorm} |
| layers.N.attention.{query_key_value, dense} | decoder.layers.N.self_attention.{linear_qkv, linear_proj} |
| layers.N.attention.{query_norm, key_norm} | decoder.layers.N.self_attention.{q_layernorm, k_layernorm} |
| layers.N.mlp.{up, down}, layers.N.mlp.router | decoder.layers.N.mlp.{linear_fc1, linear_fc2}, ... mlp.router |
| layers.N.mlp.experts.E.{up, down} | decoder.layers.N.mlp.experts.local_experts.E.{linear_fc1, linear_fc2} |
| final_norm, head | decoder.final_layernorm, output_layer |

The rows of query, key and value have the same order. Gate and value rows of a gated layer alternate in ours; in
megatron-core each rank has all its gate rows, then all its value rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

_NAMES = (
    (r"^embedding\.(word|position)\.", r"embedding.\1_embeddings."),
    (r"^layers\.", "decoder.layers."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_norm\.", ".pre_mlp_layernorm."),
    (r"\.attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.attention\.query_norm\.", ".self_attention.q_layernorm."),
    (r"\.attention\.key_norm\.", ".self_attention.k_layernorm."),
    (r"\.mlp\.experts\.", ".mlp.experts.local_experts."),
    (r"\.up\.", ".linear_fc1."),
    (r"\.down\.", ".linear_fc2."),
    (r"^final_norm\.", "decoder.final_layernorm."),
    (r"^head\.", "output_layer."),
)
_SHARDED_ROWS = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)$")
_SHARDED_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")


def core_name(name: str) -> str:
    """Return megatron-core's name of the weight that we call ``name``."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def to_core_rows(name: str, weight: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """Return the full weight with megatron-core's ``name``, with its order of rows, from ours."""
    if is_gated and ".linear_fc1." in name:
        return torch.cat([weight[0::2], weight[1::2]])
    return weight


def to_our_rows(name: str, weight: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """Return the full weight with megatron-core's ``name``, with our order of rows: inverse of ``to_core_rows``."""
    if is_gated and ".linear_fc1." in name:
        return torch.stack(weight.chunk(2), dim=1).flatten(0, 1)
    return weight


def shard_of_rank(name: str, weight: torch.Tensor, rank: int, size: int, *, is_gated: bool) -> torch.Tensor:
    """Return the shard of the full weight with megatron-core's ``name`` on tensor rank ``rank`` of ``size``."""
    if _SHARDED_COLUMNS.search(name):
        return weight.chunk(size, dim=1)[rank]
    if not _SHARDED_ROWS.search(name):
        return weight
    halves = weight.chunk(2) if is_gated and ".linear_fc1." in name else (weight,)
    return torch.cat([half.chunk(size)[rank] for half in halves])


def join_shards(name: str, shards: Sequence[torch.Tensor], *, is_gated: bool) -> torch.Tensor:
    """Return the full weight with megatron-core's ``name`` from the shards of all tensor ranks.

    Raises:
        ValueError: copies of a replicated weight differ.
    """
    if _SHARDED_COLUMNS.search(name):
        return torch.cat(list(shards), dim=1)
    if not _SHARDED_ROWS.search(name):
        if any(not torch.equal(shard, shards[0]) for shard in shards):
            raise ValueError(f"{name} differs between tensor ranks")
        return shards[0]
    if is_gated and ".linear_fc1." in name:
        return torch.cat([torch.cat(halves) for halves in zip(*(shard.chunk(2) for shard in shards), strict=True)])
    return torch.cat(list(shards))
