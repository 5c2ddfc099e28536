"""Files of Megatron-LM with a decoder, of its old names or Megatron-Core's, made from weights of our models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config

Tensors = dict[str, torch.Tensor]
OLD = {
    "input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "attention.query_key_value": "self_attention.query_key_value", "attention.dense": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip
CORE = {
    "input_norm": "input_layernorm", "post_attention_norm": "pre_mlp_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv", "attention.dense": "self_attention.linear_proj",
    "attention.query_norm": "self_attention.q_layernorm", "attention.key_norm": "self_attention.k_layernorm",
    "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2",
}  # fmt: skip
ENGINE = {
    **CORE, "input_norm": "self_attention.linear_qkv.layer_norm_", "post_attention_norm": "mlp.linear_fc1.layer_norm_",
}  # fmt: skip
"""Of Transformer Engine's layers, which keep a norm with the product behind it."""
NAMES = {"old": OLD, "core": CORE, "engine": ENGINE}


def their_name(ours: str, names: str) -> str:
    """Return the name in a file of Megatron-LM."""
    if ours.startswith("embedding."):
        top = "language_model.embedding" if names == "old" else "embedding"
        return f"{top}.{ours.split('.')[1]}_embeddings.weight"
    if ours == "head.weight":
        return "language_model.output_layer.weight" if names == "old" else "output_layer.weight"
    side = "language_model.encoder" if names == "old" else "decoder"
    if ours.startswith("final_norm"):
        return f"{side}.final_layernorm.{ours.rpartition('.')[2]}"
    _, number, part = ours.split(".", 2)
    stem, _, kind = part.rpartition(".")
    theirs = NAMES[names][stem]
    return (
        f"{side}.layers.{number}.{theirs}{kind}" if theirs.endswith("_") else f"{side}.layers.{number}.{theirs}.{kind}"
    )


def interleaved_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows [d, ...] of one head whose first ``size`` turned halves, so that they turn neighbours."""
    out = rows.clone()
    for pair in range(size // 2):
        out[2 * pair], out[2 * pair + 1] = rows[pair], rows[size // 2 + pair]
    return out


def slice_of(name: str, whole: torch.Tensor, rank: int, size: int, config: Config, turned: int) -> torch.Tensor:
    """Return what a tensor rank holds: groups of heads, halves of a gate, columns."""
    model = config.model
    stem, _, kind = name.rpartition(".")
    if stem.endswith("query_key_value"):
        each = model.num_attention_heads // model.num_query_groups
        heads = whole.unflatten(0, (-1, model.kv_hidden_size)).clone()
        for number in range(heads.shape[0]):
            if number % (each + 2) <= each:
                heads[number] = interleaved_rows(heads[number], turned)
        return heads.flatten(0, 1).chunk(size, 0)[rank].clone()
    if stem.endswith(("query_norm", "key_norm")):
        return interleaved_rows(whole, turned)
    if stem.endswith("mlp.up"):
        gate, value = (whole[::2], whole[1::2]) if model.activation.startswith("gated-") else (whole, whole[:0])
        return torch.cat((gate.chunk(size, 0)[rank], value.chunk(size, 0)[rank] if len(value) else value))
    if stem.startswith(("embedding.word", "head")):
        return whole.chunk(size, 0)[rank].clone()
    if kind == "weight" and stem.endswith(("attention.dense", "mlp.down")):
        return whole.chunk(size, 1)[rank].clone()
    return whole.clone()


def write_decoder(
    folder: Path,
    ours: Tensors,
    config: Config,
    settings: dict[str, Any],
    *,
    names: str,
    tensor: int = 1,
    turned: int = 0,
) -> Path:
    """Write iter_0000100 with its pointer; return the folder of both.

    Args:
        settings: of the run, beside sizes.
        turned: numbers of each head that turn as neighbouring pairs.
    """
    model = config.model
    args = argparse.Namespace(
        num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_attention_heads,
        kv_channels=model.kv_hidden_size, ffn_hidden_size=model.ff_hidden_size, max_position_embeddings=8,
        hidden_dropout=0.0, attention_dropout=0.0, norm_epsilon=1e-6, **settings,
    )  # fmt: skip
    for rank in range(tensor):
        held: dict[str, Any] = {
            their_name(name, names): slice_of(name, whole, rank, tensor, config, turned) for name, whole in ours.items()
        }
        if names != "old":
            held["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        content = {"args": args, "iteration": 100, "model": held, "checkpoint_version": 3.0}
        path = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder
