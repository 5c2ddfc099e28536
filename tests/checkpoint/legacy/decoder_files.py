"""Files of Megatron-LM with a decoder, of its old names or Megatron-Core's, made from weights of our models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config

Tensors = dict[str, torch.Tensor]
OLD_NAMES = {
    "input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "attention.query_key_value": "self_attention.query_key_value", "attention.dense": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip
CORE_NAMES = {
    "input_norm": "input_layernorm", "post_attention_norm": "pre_mlp_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv", "attention.dense": "self_attention.linear_proj",
    "attention.query_norm": "self_attention.q_layernorm", "attention.key_norm": "self_attention.k_layernorm",
    "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2",
}  # fmt: skip
ENGINE_NAMES = {
    **CORE_NAMES, "input_norm": "self_attention.linear_qkv.layer_norm_",
    "post_attention_norm": "mlp.linear_fc1.layer_norm_",
}  # fmt: skip
"""Of Transformer Engine's layers, which keep a norm with the product behind it."""
NAMING_SCHEMES = {"old": OLD_NAMES, "core": CORE_NAMES, "engine": ENGINE_NAMES}


def megatron_name(name: str, scheme: str) -> str:
    """Return the name in a file of Megatron-LM."""
    if name.startswith("embedding."):
        top = "language_model.embedding" if scheme == "old" else "embedding"
        return f"{top}.{name.split('.')[1]}_embeddings.weight"
    if name == "head.weight":
        return "language_model.output_layer.weight" if scheme == "old" else "output_layer.weight"
    prefix = "language_model.encoder" if scheme == "old" else "decoder"
    if name.startswith("final_norm"):
        return f"{prefix}.final_layernorm.{name.rpartition('.')[2]}"
    _, layer_idx, suffix = name.split(".", 2)
    stem, _, attribute = suffix.rpartition(".")
    megatron_stem = NAMING_SCHEMES[scheme][stem]
    return (
        f"{prefix}.layers.{layer_idx}.{megatron_stem}{attribute}"
        if megatron_stem.endswith("_")
        else f"{prefix}.layers.{layer_idx}.{megatron_stem}.{attribute}"
    )


def interleaved_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows [d, ...] of one head whose first ``size`` turned halves, so that they turn neighbours."""
    out = rows.clone()
    for pair in range(size // 2):
        out[2 * pair], out[2 * pair + 1] = rows[pair], rows[size // 2 + pair]
    return out


def tensor_shard(
    name: str, full_weight: torch.Tensor, rank: int, size: int, config: Config, rotary_size: int
) -> torch.Tensor:
    """Return what a tensor rank holds: groups of heads, halves of a gate, columns."""
    model = config.model
    stem, _, attribute = name.rpartition(".")
    if stem.endswith("query_key_value"):
        heads_per_group = model.num_attention_heads // model.num_query_groups
        heads = full_weight.unflatten(0, (-1, model.kv_hidden_size)).clone()
        for head_idx in range(heads.shape[0]):
            if head_idx % (heads_per_group + 2) <= heads_per_group:
                heads[head_idx] = interleaved_rows(heads[head_idx], rotary_size)
        return heads.flatten(0, 1).chunk(size, 0)[rank].clone()
    if stem.endswith(("query_norm", "key_norm")):
        return interleaved_rows(full_weight, rotary_size)
    if stem.endswith("mlp.up"):
        gate, value = (
            (full_weight[::2], full_weight[1::2])
            if model.activation.startswith("gated-")
            else (full_weight, full_weight[:0])
        )
        return torch.cat((gate.chunk(size, 0)[rank], value.chunk(size, 0)[rank] if len(value) else value))
    if stem.startswith(("embedding.word", "head")):
        return full_weight.chunk(size, 0)[rank].clone()
    if attribute == "weight" and stem.endswith(("attention.dense", "mlp.down")):
        return full_weight.chunk(size, 1)[rank].clone()
    return full_weight.clone()


def write_decoder(
    folder: Path,
    weights: Tensors,
    config: Config,
    settings: dict[str, Any],
    *,
    scheme: str,
    tensor: int = 1,
    rotary_size: int = 0,
) -> Path:
    """Write iter_0000100 with its pointer; return the folder of both.

    Args:
        settings: of the run, beside sizes.
        rotary_size: numbers of each head that turn as neighbouring pairs.
    """
    model = config.model
    args = argparse.Namespace(
        num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_attention_heads,
        kv_channels=model.kv_hidden_size, ffn_hidden_size=model.ff_hidden_size, max_position_embeddings=8,
        hidden_dropout=0.0, attention_dropout=0.0, norm_epsilon=1e-6, **settings,
    )  # fmt: skip
    for rank in range(tensor):
        model_state: dict[str, Any] = {
            megatron_name(name, scheme): tensor_shard(name, full_weight, rank, tensor, config, rotary_size)
            for name, full_weight in weights.items()
        }
        if scheme != "old":
            model_state["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        content = {"args": args, "iteration": 100, "model": model_state, "checkpoint_version": 3.0}
        path = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder
