"""Read a legacy checkpoint's weights: convert the names to ours and merge the tensor ranks' slices."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.legacy.files import LegacyFiles, unpickle_allowed
from megatron.checkpoint.legacy.settings import get_num_groups
from megatron.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

# Our names for weights in checkpoints of Megatron-LM and its descendants.
#
# | theirs, after prefixes | ours |
# |---|---|
# | word_embeddings, position_embeddings | embedding.word, embedding.position |
# | {transformer, encoder}.layers.{i}.input_layernorm | layers.{i}.input_norm |
# | ...{attention, self_attention}.{query_key_value, dense} | ...attention.* |
# | ...post_attention_layernorm | ...post_attention_norm, in a decoder ...cross_norm |
# | ...inter_attention.{query, key_value, dense} | ...cross_attention.* |
# | ...post_inter_attention_layernorm | ...post_attention_norm |
# | ...mlp.{dense_h_to_4h, dense_4h_to_h} | ...mlp.{up, down} |
# | ...final_layernorm | final_norm |
# | output_layer, lm_head | head |
#
# Since 2023 Megatron-LM's norms have names without "layer", such as input_norm.
# A T5 has ``encoder.`` and ``decoder.`` before the layers, in our names as well.
#
# Megatron-Core's GPT (``--ckpt-format torch``) calls its only side ``decoder``. Its checkpoints are detected by the
# names of their layers. Transformer Engine's layers store a norm together with the linear layer that follows it:
#
# | Megatron-Core | name in the first table |
# |---|---|
# | self_attention.linear_qkv, linear_proj | self_attention.query_key_value, dense |
# | self_attention.q_layernorm, k_layernorm | self_attention.query_norm, key_norm |
# | mlp.linear_fc1, linear_fc2 | mlp.dense_h_to_4h, dense_4h_to_h |
# | pre_mlp_layernorm | post_attention_layernorm |
# | self_attention.linear_qkv.layer_norm_weight | input_layernorm.weight |
# | mlp.linear_fc1.layer_norm_weight | post_attention_layernorm.weight |

_PREFIX = re.compile(r"^(module\.|model\.|language_model\.|embedding\.)+")
_LAYER = re.compile(r"(transformer|encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_FINAL = re.compile(r"(transformer|encoder|decoder)\.final_(?:layer_)?norm\.(weight|bias)")
_UNUSED = re.compile(
    r"(.*_extra_state|.*masked_bias|.*attention\.bias|(.*\.)?word_embeddings_for_head\..*|.*pooler\..*)"
)
_SIDES = {"transformer": "encoder", "encoder": "encoder", "decoder": "decoder"}
_TOP_LEVEL_NAMES = {
    "word_embeddings.weight": "embedding.word.weight",
    "position_embeddings.weight": "embedding.position.weight",
    "output_layer.weight": "head.weight",
    "lm_head.weight": "head.weight",
}
_MODULE_NAMES = {
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
    "self_attention.query_norm": "attention.query_norm",
    "self_attention.key_norm": "attention.key_norm",
}
_CORE_MARK = ".self_attention.linear_qkv."
_CORE_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "post_attention_layernorm."),
    ("self_attention.linear_qkv.", "self_attention.query_key_value."),
    ("self_attention.linear_proj.", "self_attention.dense."),
    ("self_attention.q_layernorm.", "self_attention.query_norm."),
    ("self_attention.k_layernorm.", "self_attention.key_norm."),
    ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
    ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
    ("pre_mlp_layernorm.", "post_attention_layernorm."),
)
_SPLIT_BY_ROWS = (
    "embedding.word",
    "head",
    "attention.query_key_value",
    "cross_attention.query",
    "cross_attention.key_value",
)


def flatten_tensors(tree: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Collect tensors in nested dictionaries, with keys joined by dots; other values are left out."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            flat[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            flat.update(flatten_tensors(value, f"{prefix}{key}."))
    return flat


def is_unused(name: str) -> bool:
    """Return True for the name of a buffer, or of a copy, that our models do not use."""
    return _UNUSED.fullmatch(name) is not None


def convert_name(source_name: str, first_layers: Mapping[str, int]) -> str | None:
    """Convert ``source_name`` to our name, with the prefix of its side; None if our models lack the tensor.

    Args:
        first_layers: side ("encoder", "decoder") -> global index of this stage's first layer.
    """
    name = _PREFIX.sub("", source_name).replace("layernorm.", "norm.")
    if name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[name]
    if match := _FINAL.fullmatch(name):
        return f"{_SIDES[match[1]]}.final_norm.{match[2]}"
    match = _LAYER.fullmatch(name)
    if match is None or match[3] not in _MODULE_NAMES:
        return None
    side, module_name = _SIDES[match[1]], _MODULE_NAMES[match[3]]
    if side == "decoder" and match[3] == "post_attention_norm":
        module_name = "cross_norm"
    return f"{side}.layers.{int(match[2]) + first_layers[side]}.{module_name}.{match[4]}"


def convert_core_names(tensors: Tensors) -> Tensors:
    """Convert a Megatron-Core GPT's names to Megatron-LM's (second table above); other names are unchanged.

    Raises:
        CheckpointError: the tensors belong to a Megatron-Core T5.
    """
    if not any(_CORE_MARK in name for name in tensors):
        return tensors
    if any(_PREFIX.sub("", name).startswith("encoder.") for name in tensors):
        raise CheckpointError("a T5 of Megatron-Core cannot be imported; only a GPT can")
    renamed = {}
    for name, tensor in tensors.items():
        for core_name, megatron_name in _CORE_NAMES:
            if core_name in name:
                name = name.replace(core_name, megatron_name)
                break
        renamed[re.sub(r"(^|\.)decoder\.", r"\1encoder.", name)] = tensor
    return renamed


def count_layers(side: str, names: Iterable[str]) -> int:
    """Count the layers on ``side``, from our ``names``."""
    indices = [int(name.split(".")[2]) for name in names if name.startswith(f"{side}.layers.")]
    return max(indices, default=-1) + 1


def without_side(name: str) -> str:
    """Remove the prefix "encoder." from our weight name, which a model with one side does not have."""
    return name.removeprefix("encoder.")


def partition_dim(name: str) -> int | None:
    """Return the dimension along which the weight is split over tensor ranks; None if it is replicated."""
    stem, _, suffix = name.rpartition(".")
    if stem.endswith(_SPLIT_BY_ROWS) or stem.endswith("mlp.up"):
        return 0
    return 1 if suffix == "weight" and stem.endswith((".dense", "mlp.down")) else None


def num_parts_per_head(name: str) -> int:
    """Count the parts (query, key, value) per head in a weight's rows; 1 if the rows need no reordering."""
    stem = name.rpartition(".")[0]
    return 3 if stem.endswith("query_key_value") else 2 if stem.endswith("key_value") else 1


# Merge the tensor ranks' slices to full tensors, with query, key and value rows in our order.
#
# Megatron-LM has used three orders of a rank's query, key and value rows. The version in a file determines the order:
#
# | version | rows | |
# |---|---|---|
# | 0, CPM-1 | [3, heads, d] | all queries, all keys, all values |
# | 1 | [heads, d, 3] | |
# | 2 and later | [heads, 3, d] | our order |
#
# "heads" counts the heads per rank, so each slice is reordered before the slices are concatenated.

ORDERS = {"3-heads-d": 0.0, "heads-d-3": 1.0, "heads-3-d": 2.0}
"""Name of an order -> the first version that uses it."""


def row_order(version: float) -> str:
    """Look up the row order in files of ``version``."""
    return [name for name, first_version in ORDERS.items() if version >= first_version][-1]


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Row order of query, key, value and MLP weights on a tensor rank.

    Args:
        order: key of ``ORDERS``.
        num_groups: heads of keys and values. If there are fewer than ``num_heads``, rows are grouped, as in our
            models: the query heads of a group, its key, its value, then the next group.
        is_gated: ``mlp.up`` has all gate rows, then all factor rows. In our models, gate and factor rows alternate.
        num_interleaved: leading elements per head that rotary embedding rotates as adjacent pairs
            (--rotary-interleaved). Our models rotate halves, so the rows of queries and keys are reordered: even rows
            first, then odd rows.
    """

    order: str
    num_heads: int
    num_groups: int
    is_gated: bool = False
    num_interleaved: int = 0


def merge_slices(name: str, slices: Sequence[torch.Tensor], layout: RowLayout) -> tuple[torch.Tensor, float]:
    """Merge all tensor ranks' slices into the full weight ``name`` (our name).

    Returns (full weight, largest absolute difference between the ranks' copies if the weight is replicated).

    Raises:
        CheckpointError: the query, key and value row count is not a multiple of the heads; or the layout's order
            does not support groups.
    """
    num_parts, dim = num_parts_per_head(name), partition_dim(name)
    if num_parts > 1:
        slices = [_reorder_rows(name, tensor, num_parts, layout, len(slices)) for tensor in slices]
    if layout.is_gated and ".mlp.up." in name:
        slices = [tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for tensor in slices]
    if dim is not None and len(slices) > 1:
        return _deinterleave(name, torch.cat(list(slices), dim), layout), 0.0
    first = slices[0]
    differing = [tensor for tensor in slices[1:] if not torch.equal(tensor, first)]
    difference = max((float((tensor.double() - first.double()).abs().max()) for tensor in differing), default=0.0)
    return _deinterleave(name, first, layout), difference


def _reorder_rows(name: str, rows: torch.Tensor, num_parts: int, layout: RowLayout, num_ranks: int) -> torch.Tensor:
    """Reorder one rank's rows to [heads, parts, d], or [groups, heads / groups + 2, d]."""
    is_grouped = num_parts == 3 and layout.num_groups != layout.num_heads
    num_blocks = layout.num_groups if is_grouped else layout.num_heads
    heads_per_block = layout.num_heads // layout.num_groups + 2 if is_grouped else num_parts
    blocks_per_rank, remainder = divmod(num_blocks, num_ranks)
    if remainder or rows.shape[0] % (heads_per_block * max(blocks_per_rank, 1)):
        raise CheckpointError(
            f"{name}: {rows.shape[0]} rows on each of {num_ranks} tensor ranks do not fit {heads_per_block} x "
            f"{num_blocks} {'groups' if is_grouped else 'heads'}. Check --num-attention-heads"
        )
    if layout.order == "heads-3-d":
        return rows
    if is_grouped:
        raise CheckpointError(
            f"{name}: {layout.num_groups} groups for {layout.num_heads} heads require --qkv-order heads-3-d, because "
            f"rows are stored by group, got {layout.order}"
        )
    head_dim = rows.shape[0] // (num_parts * blocks_per_rank)
    trailing = tuple(rows.shape[1:])
    if layout.order == "3-heads-d":
        reordered = rows.reshape(num_parts, blocks_per_rank, head_dim, *trailing).transpose(0, 1)
    else:
        reordered = rows.reshape(blocks_per_rank, head_dim, num_parts, *trailing).transpose(1, 2)
    return reordered.reshape(rows.shape)


def _deinterleave(name: str, weight: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Reorder query and key rows in ``weight`` if rotary embedding rotates adjacent pairs."""
    num_rotated = layout.num_interleaved
    if not num_rotated or not name.rpartition(".")[0].endswith((".query_key_value", ".query_norm", ".key_norm")):
        return weight
    if not name.rpartition(".")[0].endswith(".query_key_value"):
        return torch.cat((weight[:num_rotated:2], weight[1:num_rotated:2], weight[num_rotated:]))
    heads_per_group = layout.num_heads // layout.num_groups + 2
    heads = weight.unflatten(0, (layout.num_groups, heads_per_group, -1)).clone()  # [g, a/g + 2, d, ...]
    rows = heads[:, :-1, :num_rotated].clone()  # rows of queries and keys
    heads[:, :-1, :num_rotated] = torch.cat((rows[:, :, ::2], rows[:, :, 1::2]), dim=2)
    return heads.flatten(0, 2)


# Read a legacy checkpoint's weights, with our names.

_HEAD_BIAS = "lm_head.bias"


@dataclass
class LegacyWeights:
    """A legacy checkpoint's weights and settings.

    Attributes:
        settings: arguments from the run that saved the weights; empty if the files have no arguments.
        order: order of query, key and value rows; None if no file determines it.
        notes: messages for the user.
    """

    weights: Tensors
    settings: dict[str, Any]
    order: str | None
    is_t5: bool = False
    notes: list[str] = field(default_factory=list)


def read_legacy_weights(
    files: LegacyFiles, *, num_heads: int | None, order: str | None, is_gated: bool | None = None
) -> LegacyWeights:
    """Read the weights in ``files``.

    Args:
        num_heads, order, is_gated: values given by the user; None takes them from the files.

    Raises:
        CheckpointError: a value is missing both in the arguments and in the files; a file cannot be read; tensors are
            unknown, or missing on some rank.
    """
    settings, order_in_files = _read_settings(files)
    legacy = LegacyWeights({}, settings, order or order_in_files)
    head_count = num_heads or settings.get("num_attention_heads")
    if not head_count:
        raise CheckpointError("the files do not contain the number of attention heads. Set --num-attention-heads")
    if legacy.order is None:
        raise CheckpointError(
            "the files contain no version, so the order of query, key and value is unknown. Set --qkv-order: "
            "heads-3-d for CPM-Pretrain and Megatron-LM since 2.1, 3-heads-d for older ones (version 0), heads-d-3 for "
            "version 1. A wrong order results in a wrong model: check it with tools/generate.py"
        )
    is_gated = bool(settings.get("swiglu")) if is_gated is None else is_gated
    layout = RowLayout(
        order=legacy.order,
        num_heads=int(head_count),
        num_groups=get_num_groups(settings, int(head_count)),
        is_gated=is_gated,
        num_interleaved=get_num_interleaved(settings, int(head_count)),
    )
    for stage in _layer_stages(files) if files.layers else _stages(files):
        _add_stage(legacy, [convert_core_names(tensors) for tensors in stage], layout)
    legacy.is_t5 = count_layers("decoder", legacy.weights) > 0
    if not legacy.is_t5:
        legacy.weights = {without_side(name): tensor for name, tensor in legacy.weights.items()}
    return legacy


def get_num_interleaved(settings: Mapping[str, Any], num_heads: int) -> int:
    """Count the elements per head that are rotated as adjacent pairs; 0 if there are none."""
    if not settings.get("rotary_interleaved"):
        return 0
    size = settings.get("kv_channels") or int(settings["hidden_size"]) // num_heads
    return int(size * (settings.get("rotary_percent") or 1.0))


def _read_settings(files: LegacyFiles) -> tuple[dict[str, Any], str | None]:
    """Read the run's settings and the row order from the first file; None if it does not show the order."""
    if not files.ranks:
        return {}, None
    content = unpickle_allowed(files.ranks[0][0])
    args = content.get("args")
    settings = vars(args) if isinstance(args, argparse.Namespace) else {}
    if "checkpoint_version" in content:
        return settings, row_order(float(content["checkpoint_version"]))
    is_cpm1 = isinstance(content.get("module"), Mapping) and any("language_model" in key for key in content["module"])
    if isinstance(content.get("module"), Mapping) and not is_cpm1:
        return settings, "3-heads-d"
    return settings, None


def _stages(files: LegacyFiles) -> Iterator[list[Tensors]]:
    """Yield a list per stage with every rank's tensors, under their original names."""
    for stage in files.ranks:
        yield [_read_model(path) for path in stage]


def _read_model(path: Path) -> Tensors:
    content = unpickle_allowed(path)
    for key in ("model", "module"):
        if isinstance(content.get(key), Mapping):
            return flatten_tensors(content[key])
    raise CheckpointError(
        f'{path} must contain a model under "model" or "module", got the keys {", ".join(map(str, content))}'
    )


def _layer_stages(files: LegacyFiles) -> Iterator[list[Tensors]]:
    """Yield the layers of a DeepSpeed pipeline, named as without a pipeline; skip the second copy of a tied table.

    Raises:
        CheckpointError: a file contains neither embeddings nor a layer, norm or head.
    """
    has_embedding = False
    for paths in files.layers:
        ranks = [flatten_tensors(unpickle_allowed(path)) for path in paths]
        names = set(ranks[0])
        if not names:
            continue
        if "word_embeddings.weight" in names:
            if not has_embedding:
                yield ranks
            has_embedding = True
        elif names & {"input_layernorm.weight", "input_norm.weight"}:
            yield _add_prefix(ranks, "transformer.layers.0.")  # each file is treated as a stage of one layer
        elif names <= {"weight", "bias"} and ranks[0]["weight"].dim() == 1:
            yield _add_prefix(ranks, "transformer.final_layernorm.")
        elif names == {"weight"}:
            yield _add_prefix(ranks, "lm_head.")
        else:
            raise CheckpointError(f"{paths[0]} is not a layer of a GPT-2: {', '.join(sorted(names))}")


def _add_prefix(ranks: list[Tensors], prefix: str) -> list[Tensors]:
    return [{prefix + name: tensor for name, tensor in tensors.items()} for tensors in ranks]


def _add_stage(legacy: LegacyWeights, ranks: list[Tensors], layout: RowLayout) -> None:
    """Add one stage's tensors to ``legacy``, which has the earlier stages' layers."""
    first_layers = {side: count_layers(side, legacy.weights) for side in ("encoder", "decoder")}
    unknown = []
    for source_name in ranks[0]:
        if is_unused(source_name):
            continue
        if source_name.endswith(_HEAD_BIAS):
            _check_zero(source_name, ranks)
            continue
        name = convert_name(source_name, first_layers)
        if name is None:
            unknown.append(source_name)
        elif name not in legacy.weights:  # a later stage repeats tables shared by both sides
            legacy.weights[name] = _merge_ranks(legacy, name, source_name, ranks, layout)
    if unknown:
        raise CheckpointError(f"these tensors do not belong to a supported decoder or T5: {', '.join(unknown)}")


def _merge_ranks(
    legacy: LegacyWeights, name: str, source_name: str, ranks: list[Tensors], layout: RowLayout
) -> torch.Tensor:
    missing_ranks = [str(rank) for rank, tensors in enumerate(ranks) if source_name not in tensors]
    if missing_ranks:
        raise CheckpointError(f"{source_name} exists on tensor rank 0, but not on {', '.join(missing_ranks)}")
    full, difference = merge_slices(name, [tensors[source_name] for tensors in ranks], layout)
    if difference:
        legacy.notes.append(f"{name}: copies on the tensor ranks differ by up to {difference:.1e}; rank 0's is used")
    return full


def _check_zero(name: str, ranks: list[Tensors]) -> None:
    if any(bool(tensors[name].any()) for tensors in ranks if name in tensors):
        raise CheckpointError(f"{name} is not zero, but the head of our models has no bias")
