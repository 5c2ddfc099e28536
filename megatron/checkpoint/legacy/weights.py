"""The weights of a checkpoint of these families, by our names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.legacy import merge, names, pickles
from megatron.checkpoint.legacy.find import Files
from megatron.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
_BIAS_OF_HEAD = "lm_head.bias"


@dataclass
class Found:
    """What the files hold.

    Attributes:
        settings: the arguments of the run that saved them; empty where there are none.
        order: of the rows of query, key and value; None where no file says it.
        notes: what a user should know.
    """

    weights: Tensors
    settings: dict[str, Any]
    order: str | None
    is_t5: bool = False
    notes: list[str] = field(default_factory=list)


def read(files: Files, *, num_heads: int | None, order: str | None) -> Found:
    """Return the weights in ``files``.

    Args:
        num_heads, order: as the user gives them; None: as the files say.

    Raises:
        CheckpointError: neither says it; a file cannot be read; tensors are unknown, or missing on some rank.
    """
    settings, said = _facts(files)
    found = Found({}, settings, order or said)
    heads = num_heads or settings.get("num_attention_heads")
    if not heads:
        raise CheckpointError("the files do not say how many heads there are; give --num-attention-heads")
    if found.order is None:
        raise CheckpointError(
            "the files carry no version, so the order of query, key and value is not known. Give --qkv-order: "
            "heads-3-d for CPM-Pretrain and Megatron-LM since 2.1, 3-heads-d for older ones (version 0), heads-d-3 for "
            "version 1. The wrong one gives another model: check with tools/generate.py"
        )
    for stage in _layer_stages(files) if files.layers else _stages(files):
        _add(found, stage, int(heads))
    found.is_t5 = names.layers_of("decoder", found.weights) > 0
    if not found.is_t5:
        found.weights = {names.of_one_side(name): tensor for name, tensor in found.weights.items()}
    return found


def _facts(files: Files) -> tuple[dict[str, Any], str | None]:
    """Return the settings of the run and the order of rows that the first file tells."""
    if not files.ranks:
        return {}, None
    content = pickles.read(files.ranks[0][0])
    args = content.get("args")
    settings = vars(args) if isinstance(args, argparse.Namespace) else {}
    if "checkpoint_version" in content:
        return settings, merge.order_of(float(content["checkpoint_version"]))
    is_cpm1 = isinstance(content.get("module"), Mapping) and any("language_model" in key for key in content["module"])
    if isinstance(content.get("module"), Mapping) and not is_cpm1:
        return settings, "3-heads-d"
    return settings, None


def _stages(files: Files) -> Iterator[list[Tensors]]:
    """Yield for each stage the tensors of its tensor ranks, by their names."""
    for stage in files.ranks:
        yield [_model_of(path) for path in stage]


def _model_of(path: Path) -> Tensors:
    content = pickles.read(path)
    for key in ("model", "module"):
        if isinstance(content.get(key), Mapping):
            return names.flattened(content[key])
    raise CheckpointError(
        f'{path} must hold a model under "model" or "module", got the keys {", ".join(map(str, content))}'
    )


def _layer_stages(files: Files) -> Iterator[list[Tensors]]:
    """Yield the layers of a DeepSpeed pipeline with the names that a model in one piece has; a tied copy is left out.

    Raises:
        CheckpointError: a file holds neither embeddings, nor a layer, nor a norm, nor a head.
    """
    has_embedding = False
    for paths in files.layers:
        ranks = [names.flattened(pickles.read(path)) for path in paths]
        kinds = set(ranks[0])
        if not kinds:
            continue
        if "word_embeddings.weight" in kinds:
            if not has_embedding:
                yield ranks
            has_embedding = True
        elif kinds & {"input_layernorm.weight", "input_norm.weight"}:
            yield _renamed(ranks, "transformer.layers.0.")  # each file is a stage of one layer
        elif kinds <= {"weight", "bias"} and ranks[0]["weight"].dim() == 1:
            yield _renamed(ranks, "transformer.final_layernorm.")
        elif kinds == {"weight"}:
            yield _renamed(ranks, "lm_head.")
        else:
            raise CheckpointError(f"{paths[0]} holds no layer of a GPT-2: {', '.join(sorted(kinds))}")


def _renamed(ranks: list[Tensors], prefix: str) -> list[Tensors]:
    return [{prefix + name: tensor for name, tensor in held.items()} for held in ranks]


def _add(found: Found, ranks: list[Tensors], num_heads: int) -> None:
    """Put the tensors of one stage into ``found``, whose layers come before this stage's."""
    first_layers = {side: names.layers_of(side, found.weights) for side in ("encoder", "decoder")}
    unknown = []
    for theirs in ranks[0]:
        if names.is_unread(theirs):
            continue
        if theirs.endswith(_BIAS_OF_HEAD):
            _require_zero(theirs, ranks)
            continue
        name = names.our_name(theirs, first_layers)
        if name is None:
            unknown.append(theirs)
        elif name not in found.weights:  # a later stage repeats the tables that both sides share
            found.weights[name] = _whole(found, name, theirs, ranks, num_heads)
    if unknown:
        raise CheckpointError(f"these tensors are of no GPT-2 or T5 of ours: {', '.join(unknown)}")


def _whole(found: Found, name: str, theirs: str, ranks: list[Tensors], num_heads: int) -> torch.Tensor:
    lacking = [str(rank) for rank, held in enumerate(ranks) if theirs not in held]
    if lacking:
        raise CheckpointError(f"{theirs} is on tensor rank 0 and not on {', '.join(lacking)}")
    whole, difference = merge.merged(name, [held[theirs] for held in ranks], found.order or "", num_heads)
    if difference:
        found.notes.append(f"{name}: copies on the tensor ranks differ by up to {difference:.1e}; rank 0's is taken")
    return whole


def _require_zero(name: str, ranks: list[Tensors]) -> None:
    if any(bool(held[name].any()) for held in ranks if name in held):
        raise CheckpointError(f"{name} is not zero, and the head of our models has no bias")
