"""Files in the formats of Megatron-LM, CPM-1 and DeepSpeed, made from weights of our models."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.arguments import config_from_values
from megatron.models import DecoderModel, T5Model, model_args_from, t5_model_args_from

Tensors = dict[str, torch.Tensor]
NUM_HEADS, HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE = 4, 16, 4, 40
MODEL_VALUES = {
    "num_layers": NUM_LAYERS,
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": NUM_HEADS,
    "max_position_embeddings": 8,
    "vocab_size": VOCAB_SIZE,
    "hidden_bias": True,
    "activation": "gelu-tanh",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "cross_norm": "post_attention_layernorm",
    "cross_attention.query": "inter_attention.query",
    "cross_attention.key_value": "inter_attention.key_value",
    "cross_attention.dense": "inter_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_ROW_SHARDED = ("query_key_value", "query", "key_value", "word_embeddings", "dense_h_to_4h", "output_layer")
_COLUMN_SHARDED = ("dense.weight", "dense_4h_to_h.weight")


def make_model(family: str = "gpt2", **overrides: Any) -> torch.nn.Module:
    """Return a tiny model in fp32 with random weights; T5 has learned positions."""
    torch.manual_seed(3)
    t5 = {"position_embedding_type": "learned"} if family == "t5" else {}
    config = config_from_values({**MODEL_VALUES, **t5, **overrides}, family=family)
    args = t5_model_args_from(config.model, config.family_config) if family == "t5" else model_args_from(config.model)
    model = (T5Model if family == "t5" else DecoderModel)(args)  # type: ignore[operator]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def megatron_name(name: str) -> str:
    """Return Megatron-LM's name of a parameter, without the prefix ``language_model.``."""
    if name.startswith("embedding."):
        return name.replace("embedding.word", "embedding.word_embeddings").replace(
            "embedding.position", "embedding.position_embeddings"
        )
    if name == "head.weight":
        return "output_layer.weight"
    side, suffix = name.split(".", 1) if name.startswith(("encoder.", "decoder.")) else ("transformer", name)
    if suffix.startswith("final_norm"):
        return f"{side}.{suffix.replace('final_norm', 'final_layernorm')}"
    _, layer, param_name = suffix.split(".", 2)
    stem, weight_or_bias = param_name.rsplit(".", 1)
    megatron_stem = _LAYER_NAMES[stem]
    if side == "decoder" and stem == "post_attention_norm":
        megatron_stem = "post_inter_attention_layernorm"
    return f"{side}.layers.{layer}.{megatron_stem}.{weight_or_bias}"


def make_shard(name: str, weight: torch.Tensor, rank: int, size: int, version: float) -> torch.Tensor:
    """Return tensor rank ``rank``'s shard of ``weight``.

    Args:
        version: version of the checkpoint format, which determines the order of the rows of query, key and value.
    """
    stem = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
    if stem in _ROW_SHARDED:
        shard = weight.chunk(size, 0)[rank]
        num_projections = {"query_key_value": 3, "key_value": 2}.get(stem, 1)
        heads, other_dims = NUM_HEADS // size, tuple(shard.shape[1:])
        if num_projections > 1 and version < 2:
            blocks = shard.reshape(heads, num_projections, -1, *other_dims)
            blocks = blocks.transpose(0, 1) if version == 0 else blocks.transpose(1, 2)
            shard = blocks.reshape(shard.shape)
        return shard.clone()
    if name.endswith(_COLUMN_SHARDED):
        return weight.chunk(size, 1)[rank].clone()
    return weight.clone()


def nest(flat: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the parameters in nested dictionaries, as Megatron-LM saves them; names within layers stay flat."""
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        top, suffix = name.split(".", 1)
        if top == "embedding":
            table, weight_name = suffix.split(".")
            tree.setdefault(top, {}).setdefault(table, {})[weight_name] = tensor
        else:
            tree.setdefault(top, {})[suffix] = tensor
    return tree


def make_args(**overrides: Any) -> argparse.Namespace:
    """Return the settings that a Megatron-LM checkpoint contains."""
    return argparse.Namespace(
        num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, num_attention_heads=NUM_HEADS, **overrides
    )


def write_megatron_checkpoint(
    folder: Path, weights: Tensors, *, tensor: int = 1, pipe: int = 1, version: float | None = 3.0, **args: Any
) -> Path:
    """Write iter_0000100 of Megatron-LM with its tracker file; return their folder."""
    full_tensors = {megatron_name(name): weight for name, weight in weights.items()}
    for stage in range(pipe):
        for rank in range(tensor):
            local_tensors = {
                _local_name(name, pipe): make_shard(name, weight, rank, tensor, 3.0 if version is None else version)
                for name, weight in full_tensors.items()
                if stage in _stages(name, pipe)
            }
            content: dict[str, Any] = {
                "args": make_args(**args),
                "iteration": 100,
                "model": {"language_model": nest(local_tensors)},
                "np_rng_state": np.random.RandomState(1).get_state(),
            }
            if stage == pipe - 1 and pipe > 1:
                content["model"]["word_embeddings_for_head"] = {
                    "weight": full_tensors["embedding.word_embeddings.weight"]
                }
            if version is not None:
                content["checkpoint_version"] = version
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipe > 1 else "")
            path = folder / "iter_0000100" / name / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def _stages(name: str, pipe: int) -> set[int]:
    if name.startswith("embedding"):
        return {0}
    if ".layers." not in name:
        return {pipe - 1}
    return {int(name.split(".")[2]) * pipe // NUM_LAYERS}


def _local_name(name: str, pipe: int) -> str:
    fields = name.split(".")
    if ".layers." in name:
        fields[2] = str(int(fields[2]) % (NUM_LAYERS // pipe))
    return ".".join(fields)


def write_cpm1_checkpoint(folder: Path, weights: Tensors, tensor: int = 2) -> Path:
    """Write 80000/mp_rank_0X_model_states.pt in the form of the CPM-1 release, in fp16, without settings."""
    (folder / "80000").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("80000\n")
    for rank in range(tensor):
        module = {
            megatron_name(name).removeprefix("embedding."): make_shard(
                megatron_name(name), weight.half(), rank, tensor, 0
            )
            for name, weight in weights.items()
        }
        torch.save({"module": module, "optimizer": None}, folder / "80000" / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def write_layer_checkpoint(folder: Path, weights: Tensors, tensor: int = 2) -> Path:
    """Write global_step5 of a DeepSpeed pipeline: a file per layer and tensor rank; the tied table is stored twice."""
    step_dir = folder / "global_step5"
    step_dir.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    files: dict[int, Tensors] = {}
    for name, weight in weights.items():
        fields = megatron_name(name).split(".")
        layer = 1 if fields[0] == "embedding" else NUM_LAYERS + 4 if "final" in name else 3 + int(fields[2])
        local_name = ".".join(fields[1:] if layer == 1 else fields[3:] if layer < NUM_LAYERS + 3 else fields[2:])
        files.setdefault(layer, {})[local_name] = weight
    files[NUM_LAYERS + 5] = {"word_embeddings.weight": weights["embedding.word.weight"]}
    for rank in range(tensor):
        for layer, tensors in files.items():
            shards = {name: make_shard(name, weight, rank, tensor, 3.0) for name, weight in tensors.items()}
            torch.save(shards, step_dir / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
        states = {"args": make_args(), "checkpoint_version": 3.0, "module": None}
        torch.save(states, step_dir / f"mp_rank_{rank:02d}_model_states.pt")
    return folder
