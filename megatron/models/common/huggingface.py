"""HFFormat: names, settings and weights of a Hugging Face model type. Imports torch only when weights are converted."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from megatron.config import Config
from megatron.config.decoder import BASE_WIDTHS, window_layers
from megatron.config.layer_features import no_rope_layers
from megatron.config.model import ModelConfig
from megatron.config.option import options_of
from megatron.errors import CheckpointError
from megatron.models.common.row_order import RowOrder
from megatron.models.common.stacked_rows import StackedRows

if TYPE_CHECKING:
    import torch

    from megatron.mpu.shard import Shard

# Conversion of weights. One description per weight serves both directions, for full tensors and for slices.
#
# | ours | Hugging Face | recipe |
# |---|---|---|
# | a norm or embedding | one tensor | ``WeightMapping(("name",))`` |
# | a linear layer | one tensor [in, out] of a ``Conv1D`` | ``WeightMapping(("name",), is_transposed=True)`` |
# | query, key and value per head | three tensors | ``WeightMapping(("q", "k", "v"), num_blocks=heads)`` |
# | the same | one tensor, all queries first | ``WeightMapping(("qkv",), num_blocks=heads, num_packed=3)`` |
# | interleaved gate and value | two tensors of f rows | ``WeightMapping(("gate", "up"), num_blocks=f)`` |
# | query, key and value per group | one tensor, all queries first | the same with ``packed_rows=(a d, g d, g d)`` |
# | queries and keys rotated by halves | rotated by adjacent rows | the same with ``row_orders`` |
# | queries, then gates of a group | query and gate by head | the same with ``row_orders`` |
# | weight of expert i | one tensor of all experts [E, ...] | ``WeightMapping(("name",), index=i)`` |
# | one of several projections | one tensor of all projections | ``WeightMapping(("name",), rows=(first, number))`` |
# | the same in each of g groups | the same in groups of n rows | the same with ``rows_per_group=n`` |
# | a depthwise convolution [c, k] | [c, 1, k] | ``WeightMapping(("name",), unit_dims=(1,))`` |
#
# The rows of our weight are the first block of each part, then the second block of each part, and so on. Blocks of
# different parts may have different numbers of rows (with grouped queries: several query heads, one key, one value).


class Sliceable(Protocol):
    """A tensor, or a slice of a file that returns a tensor when indexed."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class WeightMapping:
    """The Hugging Face tensors that make up one of our weights.

    Args:
        hf_names: names of the Hugging Face tensors, in the order in which their blocks are interleaved.
        num_blocks: number of blocks of rows in each part.
        num_packed: number of parts of equal height that are concatenated in a single Hugging Face tensor.
        is_transposed: the Hugging Face tensor is [in, out], ours is [out, in].
        packed_rows: rows of each packed part, if their heights differ.
        row_orders: for each part, the order of its rows if it differs from ours, or None; empty: none.
        index: our weight is element ``index`` of the first dimension of a single Hugging Face tensor, in which all
            weights with the same ``hf_names`` are stacked; None: the tensors are not stacked.
        unit_dims: dimensions of the Hugging Face tensors that have size 1 and that our weight lacks.
        rows: (first row, number of rows) of our weight in a single Hugging Face tensor, whose other rows are other
            weights; None: our weight has all rows.
        rows_per_group: the Hugging Face tensor consists of groups of this number of rows, and our weight has ``rows``
            of each group; 0: the tensor is one group.
    """

    hf_names: tuple[str, ...]
    num_blocks: int = 1
    num_packed: int = 1
    is_transposed: bool = False
    packed_rows: tuple[int, ...] = ()
    row_orders: tuple[RowOrder | None, ...] = ()
    index: int | None = None
    unit_dims: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    rows_per_group: int = 0


def weight_from_hf(mapping: WeightMapping, hf_weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return our weight, built from the Hugging Face tensors ``hf_weights``; it does not share memory with them.

    Raises:
        CheckpointError: the rows cannot be split into blocks.
    """
    import torch  # takes half a second; a dry run that reads only settings does not need it

    tensors = [hf_weights[name].detach() for name in mapping.hf_names]
    tensors = [tensor.squeeze(mapping.unit_dims) for tensor in tensors]
    if mapping.rows is not None:
        by_group = [tensor.unflatten(0, (-1, mapping.rows_per_group or len(tensor))) for tensor in tensors]
        tensors = [tensor.narrow(1, *mapping.rows).flatten(0, 1) for tensor in by_group]
    components = _split_components(mapping, tensors if mapping.index is None else [tensors[0][mapping.index]])
    for idx, row_order in enumerate(mapping.row_orders):
        components[idx] = components[idx] if row_order is None else row_order.to_ours(components[idx])
    if len(components) == 1:
        return components[0].clone(memory_format=torch.contiguous_format)
    blocks = [_split_blocks(mapping, component) for component in components]  # each [blocks, rows, ...]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def weight_to_hf(
    mapping: WeightMapping, weight: torch.Tensor, heights: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Return the Hugging Face tensors of our weight, by name.

    ``stack_indexed`` stacks those with an ``index``, and ``join_rows`` concatenates those with ``rows``.

    Args:
        heights: rows of each part by tensor name; None: all parts have the same height.
    """
    import torch

    num_components = len(mapping.hf_names) * mapping.num_packed
    if num_components == 1:
        components = [weight.detach()]
    else:
        if weight.shape[0] % mapping.num_blocks:
            raise _uneven_rows_error(mapping, weight.shape[0])
        rows = weight.shape[0] // mapping.num_blocks
        component_rows = [rows // num_components] * num_components
        if heights is not None and mapping.num_packed == 1:
            component_rows = [heights[name] // mapping.num_blocks for name in mapping.hf_names]
        if mapping.packed_rows:
            component_rows = [num_rows // mapping.num_blocks for num_rows in mapping.packed_rows]
        if sum(component_rows) != rows:
            raise _uneven_rows_error(mapping, weight.shape[0])
        components = [
            component.flatten(0, 1)
            for component in weight.detach().unflatten(0, (mapping.num_blocks, rows)).split(component_rows, dim=1)
        ]
    for idx, row_order in enumerate(mapping.row_orders):
        components[idx] = components[idx] if row_order is None else row_order.to_hf(components[idx])
    tensors = [torch.cat(components)] if mapping.num_packed > 1 else components
    if mapping.is_transposed:
        tensors = [component.t() if component.dim() == 2 else component for component in tensors]
    for dim in mapping.unit_dims:  # in ascending order
        tensors = [component.unsqueeze(dim) for component in tensors]
    return {name: component.contiguous() for name, component in zip(mapping.hf_names, tensors, strict=True)}


def stack_indexed(tensors_by_index: Mapping[str, Mapping[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the stacked Hugging Face tensors, given the element of each index of the first dimension.

    Raises:
        CheckpointError: elements are missing.
    """
    import torch

    for name, tensors in tensors_by_index.items():
        if sorted(tensors) != list(range(len(tensors))):
            raise CheckpointError(f"{name} needs a weight for each index, got only {sorted(tensors)}")
    return {name: torch.stack([tensors[i] for i in range(len(tensors))]) for name, tensors in tensors_by_index.items()}


def join_rows(
    tensors_by_row: Mapping[str, Mapping[int, torch.Tensor]], num_groups: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the Hugging Face tensors whose rows are several of our weights, given the weight from each first row on.

    Args:
        num_groups: number of groups of rows of each tensor (``rows_per_group``).

    Raises:
        CheckpointError: rows are missing.
    """
    import torch

    joined = {}
    for name, tensors in tensors_by_row.items():
        in_order = [tensors[start].unflatten(0, (num_groups[name], -1)) for start in sorted(tensors)]
        expected_starts = [0, *itertools.accumulate(tensor.shape[1] for tensor in in_order)][:-1]
        if sorted(tensors) != expected_starts:
            raise CheckpointError(f"{name} needs the weights of all its rows, got those from rows {sorted(tensors)} on")
        joined[name] = torch.cat(in_order, dim=1).flatten(0, 1)
    return joined


class _PartOfTensor:
    """The rows of a Hugging Face tensor that are one of our weights, without dimensions of size 1.

    Attributes:
        shape: shape of our weight.
    """

    def __init__(self, tensor: Sliceable, shape: list[int], mapping: WeightMapping) -> None:
        self._tensor, self._rows, self._unit_dims = tensor, mapping.rows, mapping.unit_dims
        self._num_dims = len(shape)
        self.shape = [size for dim, size in enumerate(shape) if dim not in mapping.unit_dims]
        self._rows_per_group = mapping.rows_per_group or self.shape[0]
        if mapping.rows is not None:
            self.shape[0] = self.shape[0] // self._rows_per_group * mapping.rows[1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        if self._rows is None:
            return self._read(rows, columns)
        start, num_rows = self._rows
        first_group, end_group = rows.start // num_rows, -(-rows.stop // num_rows)
        if end_group == first_group + 1:
            offset = first_group * (self._rows_per_group - num_rows) + start
            return self._read(slice(rows.start + offset, rows.stop + offset), columns)
        groups = self._read(slice(first_group * self._rows_per_group, end_group * self._rows_per_group), columns)
        part = groups.unflatten(0, (-1, self._rows_per_group))[:, start : start + num_rows].flatten(0, 1)
        return part[rows.start - first_group * num_rows : rows.stop - first_group * num_rows]

    def _read(self, rows: slice, columns: list[slice]) -> torch.Tensor:
        """Return rows and columns of the Hugging Face tensor, without dimensions of size 1."""
        indices = iter((rows, *columns))
        index = [slice(None) if dim in self._unit_dims else next(indices, slice(None)) for dim in range(self._num_dims)]
        return self._tensor[tuple(index)].squeeze(self._unit_dims)


def read_into(
    target: torch.Tensor,
    mapping: WeightMapping,
    hf_weights: Mapping[str, Sliceable],
    shapes: Mapping[str, list[int]],
    shard: Shard,
) -> None:
    """Fill ``target`` with the slice ``shard`` of our weight.

    Only the required rows and columns of the Hugging Face tensors are read, one tensor at a time.

    Args:
        hf_weights: the Hugging Face tensors by name; indexed with slices.
        shapes: their shapes by name.

    Raises:
        CheckpointError: rows cannot be split into blocks.
    """
    if mapping.rows is not None or mapping.unit_dims:
        parts = {name: _PartOfTensor(hf_weights[name], shapes[name], mapping) for name in mapping.hf_names}
        hf_weights, shapes = parts, {name: part.shape for name, part in parts.items()}
    heights = _rows_per_block(mapping, shapes)
    shard_start, shard_stop = shard.start, shard.start + shard.length
    if shard.partition_dim == 0:
        for start, stop in _split_at_blocks(shard_start, shard_stop, sum(heights)):
            _fill(target[start - shard_start : stop - shard_start], mapping, hf_weights, heights, start, None)
    else:
        _fill(
            target,
            mapping,
            hf_weights,
            heights,
            0,
            None if shard.partition_dim is None else slice(shard_start, shard_stop),
        )


def _rows_per_block(mapping: WeightMapping, shapes: Mapping[str, list[int]]) -> list[int]:
    """Return the rows per block of each part."""
    if mapping.packed_rows:
        (num_rows,) = {shapes[name][0] for name in mapping.hf_names}
        if num_rows != sum(mapping.packed_rows) or any(rows % mapping.num_blocks for rows in mapping.packed_rows):
            raise _uneven_rows_error(mapping, num_rows)
        return [rows // mapping.num_blocks for rows in mapping.packed_rows]
    heights = [shapes[name][_row_dim(mapping, shapes[name])] for name in mapping.hf_names]
    if any(height % (mapping.num_blocks * mapping.num_packed) for height in heights):
        raise _uneven_rows_error(mapping, sum(heights))
    return [height // mapping.num_blocks // mapping.num_packed for height in heights for _ in range(mapping.num_packed)]


def _row_dim(mapping: WeightMapping, shape: list[int]) -> int:
    """Return the dimension of the Hugging Face tensor that corresponds to the rows of our weight."""
    return len(shape) - 1 if mapping.is_transposed else int(mapping.index is not None)


def _split_at_blocks(start: int, stop: int, block_height: int) -> Iterator[tuple[int, int]]:
    """Split our rows ``start`` to ``stop`` into a span of complete blocks of ``block_height`` rows, and remainders."""
    edges = {
        edge
        for edge in (-(-start // block_height) * block_height, stop // block_height * block_height)
        if start < edge < stop
    }
    return itertools.pairwise(sorted({start, stop} | edges))


def _fill(
    target: torch.Tensor,
    mapping: WeightMapping,
    hf_weights: Mapping[str, Sliceable],
    heights: list[int],
    start: int,
    columns: slice | None,
) -> None:
    """Fill ``target``, our rows from ``start`` on: either complete blocks, or rows of one block.

    Our block has ``heights[i]`` rows of part i, for example query, key and value of a head. In the Hugging Face tensor
    the rows of a part are contiguous over all blocks.
    """
    block_height = sum(heights)
    first_block, low = divmod(start, block_height)
    num_blocks = -(-(low + target.shape[0]) // block_height)
    blocks = target.unflatten(0, (num_blocks, -1))  # rows low to high of each block
    high = low + blocks.shape[1]
    component_start = 0
    for component_idx, height in enumerate(heights):
        begin, end = max(low, component_start), min(high, component_start + height)  # this part's rows in the block
        if begin < end:
            name, packed_idx = mapping.hf_names[component_idx // mapping.num_packed], component_idx % mapping.num_packed
            part_start = sum(mapping.packed_rows[:packed_idx]) or packed_idx * mapping.num_blocks * height
            first_row = part_start + first_block * height + begin - component_start
            rows = slice(first_row, first_row + (num_blocks - 1) * height + end - begin)
            row_order = mapping.row_orders[component_idx] if mapping.row_orders else None
            if row_order is None:
                source = _read_slice(mapping, hf_weights[name], rows, columns)
            else:
                heads = row_order.enclosing(rows)
                source = row_order.to_ours(_read_slice(mapping, hf_weights[name], heads, columns))
                source = source[rows.start - heads.start : rows.stop - heads.start]
            blocks[:, begin - low : end - low].copy_(source.unflatten(0, (num_blocks, -1)))
        component_start += height


def _read_slice(mapping: WeightMapping, tensor: Sliceable, rows: slice, columns: slice | None) -> torch.Tensor:
    """Return a slice of our weight; rows and columns are swapped in a transposed Hugging Face tensor."""
    if mapping.index is not None:
        stacked = slice(mapping.index, mapping.index + 1)
        if not mapping.is_transposed:
            return tensor[stacked, rows][0] if columns is None else tensor[stacked, rows, columns][0]
        return (tensor[stacked, :, rows] if columns is None else tensor[stacked, columns, rows])[0].t()
    if mapping.is_transposed:
        return (tensor[..., rows] if columns is None else tensor[columns, rows]).t()
    return tensor[rows] if columns is None else tensor[rows, columns]


def _split_components(mapping: WeightMapping, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if mapping.is_transposed:
        tensors = [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]
    if mapping.num_packed == 1:
        return tensors
    if mapping.packed_rows:
        if tensors[0].shape[0] != sum(mapping.packed_rows):
            raise _uneven_rows_error(mapping, tensors[0].shape[0])
        return list(tensors[0].split(list(mapping.packed_rows)))
    if tensors[0].shape[0] % mapping.num_packed:
        raise _uneven_rows_error(mapping, tensors[0].shape[0])
    return list(tensors[0].chunk(mapping.num_packed))


def _split_blocks(mapping: WeightMapping, component: torch.Tensor) -> torch.Tensor:
    if component.shape[0] % mapping.num_blocks:
        raise _uneven_rows_error(mapping, component.shape[0])
    return component.unflatten(0, (mapping.num_blocks, -1))


def _uneven_rows_error(mapping: WeightMapping, num_rows: int) -> CheckpointError:
    return CheckpointError(
        f"{', '.join(mapping.hf_names)}: the rows of each part must divide into {mapping.num_blocks} blocks of equal "
        f"height, one per head or query group, got {num_rows} rows, which is not a multiple of {mapping.num_blocks}"
    )


# The Hugging Face format of a model type: settings and weights in both directions.

Tensors: TypeAlias = "dict[str, torch.Tensor]"
MATCHES_NOTHING = re.compile(r"(?!)")
"""Pattern that matches no tensor name."""


def decoder_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, v] of a decoder whose inputs are tokens and their positions."""
    import torch

    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).transpose(0, 1)


def input_ids_only(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a Hugging Face model whose only input is ``tokens``."""
    return {"input_ids": tokens}


def leave_hf_model_unchanged(hf_model: Any, config: Config) -> None:
    """Do nothing: the Hugging Face model follows its settings."""


def keep_tensor_name(name: str, config: Config) -> str:
    """Return ``name``: tensor names are the same in old and new files."""
    return name


def no_constants(config: Config) -> dict[str, float]:
    """Return no constants: all tensors in the files are weights."""
    return {}


_GPT2_SETTINGS: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "rotary_scaling": "none",
    "rotary_percent": 1.0,
    "rotary_local_base": 0.0,
    "normalization": "LayerNorm",
    "norm_bias": True,
    "layernorm_1p": False,
    "norm_placement": "before",
    "embed_layernorm": False,
    "qk_norm": "none",
    "add_qkv_bias": False,
    "window_size": 0,
    "softmax_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "scale_embeddings": False,
    "embedding_multiplier": 1.0,
    "residual_scale": 0.0,
    "dim_model_base": 0,
    "mup_base_hidden_size": 0,
    "clip_qkv": 0.0,
    "apply_residual_connection_post_layernorm": False,
    "num_experts": 0,
    "parallel_residual": "none",
    "logit_scale": 1.0,
    "attention_temperature_scale": 0.0,
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "no_rope_freq": "",
    "rotary_interleaved": False,
    "rotary_truncate": True,
    "qk_norm_order": "before",
    "activation_func_clamp_value": 0.0,
    "glu_linear_offset": 0.0,
    "sink_layers": "all",
    "window_num_query_groups": 0,
    "attention_value_scale": 1.0,
    "v_head_dim": 0,
    "multi_latent_attention": False,
    "experimental_attention_variant": "none",
    "hybrid_layer_pattern": "",
    "branch_multipliers": "",
}
"""Setting that distinguishes one decoder from another -> its value in GPT-2."""


def unsupported_settings(model: ModelConfig, fixed: Mapping[str, Any], *, free: Collection[str] = ()) -> Iterator[str]:
    """Yield a problem for each setting that changes ``model`` and that the format cannot express.

    A setting that is in neither ``fixed`` nor ``free`` must have its value in ``_GPT2_SETTINGS``. ``activation``,
    ``hidden_bias``, ``untie_embeddings`` and ``num_query_groups`` are not in that table: most formats support several
    values of these, and their ``problems`` check them.

    Args:
        fixed: setting -> the only value that the format can express.
        free: settings for which the format can express every value.
    """
    flags = {option.name: option.flag or option.name for option in options_of(ModelConfig)}
    for name, required in {**_GPT2_SETTINGS, **fixed}.items():
        value = getattr(model, name)
        if name not in free and value != required and _has_effect(model, name):
            yield f"{flags[name]} must be {required}, got {value}"


_UNSUPPORTED_MECHANISMS = {
    "quantization_config": "quantized weights",
    "index_topk": "sparse attention to the tokens that an indexer selects, as in DeepSeek-V3.2",
    "hc_mult": "hyper-connections of several residual streams, as in DeepSeek-V4",
    "sparse_config": "sparse attention to selected blocks, as in MiniCPM4",
    "sparse_attention_config": "sparse attention to selected blocks, as in MiniMax-M3",
}
"""Key of config.json -> the mechanism that it selects, which no decoder has; published models of a type may have the
key although the class of the type does not read it."""


def unsupported_mechanisms(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each mechanism of a config.json that no decoder has."""
    for key, mechanism in _UNSUPPORTED_MECHANISMS.items():
        if settings.get(key):
            yield f"{key} {settings[key]!r}: {mechanism} (supported: None)"


def _has_effect(model: ModelConfig, name: str) -> bool:
    """Return True if the setting takes effect given the other settings."""
    if name == "norm_bias":
        return model.normalization == "LayerNorm"
    if name == "rotary_local_base":
        return model.position_embedding_type == "rope" and model.window_size > 0
    if name in BASE_WIDTHS:
        return bool(model.width_logit_multiplier != 1.0)
    if name == "v_head_dim":
        return not model.multi_latent_attention
    if name == "sink_layers":
        return model.softmax_type != "vanilla" and not all(window_layers(model))
    if name == "window_num_query_groups":
        return any(window_layers(model))
    if name == "rotary_truncate" and model.rotary_scaling != "yarn":
        return False
    if name == "no_rope_freq":
        return model.position_embedding_type == "rope" and any(no_rope_layers(model.no_rope_freq, model.num_layers))
    if name == "qk_norm_order":
        return model.position_embedding_type == "rope" and model.qk_norm not in ("none", "l2")
    return not name.startswith("rotary_") or model.position_embedding_type == "rope"


@dataclass(frozen=True, kw_only=True)
class HFFormat:
    """A Hugging Face model type, or several that are equivalent for us.

    Args:
        model_types: values of ``model_type`` in config.json.
        problems: function that yields a message for each setting of a configuration that the format cannot express.
        fields: function from a configuration to the contents of config.json, without ``dtype`` and special token ids.
        values: function from the contents of config.json to our settings, by field name (without sections).
        to_ours, from_ours: functions from (all weights by name, configuration) to the converted weights.
        recipes: function from a configuration to the mapping of each of our weights, by name; used by ranks that read
            slices of a folder.
        word: Hugging Face name of the word embedding.
        key_groups: keys of config.json that together express one setting; an export replaces all keys of a group or
            none.
        word_copies: Hugging Face names of copies of the word embedding, which files may omit. A tied head is always
            treated as a copy and need not be listed.
        copies: function from a configuration to the Hugging Face names of further copies, each with the name of the
            tensor that it repeats. Exports contain them; imports check them if they are present.
        head: Hugging Face name of the head.
        ties_missing_head: the Hugging Face class uses the word embedding for a missing head, whatever config.json says.
        optional_prefix: prefix of tensor names that some files omit.
        optional_biases: Hugging Face names of biases that the Hugging Face model has and our model may lack.
        ignored_names: names of tensors in old files that no model reads.
        rename_tensor: function from a tensor's name in the file and our configuration to its current name; None for
            tensors that this model does not read.
        unpack: function from the current name and the shape of a tensor in the file to the tensors that it consists of,
            by name; empty if it is no stack of other tensors.
        logit_tolerance: maximum difference of logits in fp64, relative to the largest logit.
        auto_class: Hugging Face class that builds the model, or a function that returns it for our configuration.
        model_logits: function from our model and tokens [b, s] to its logits [b, s, v].
        hf_inputs: function from tokens to the keyword arguments of the Hugging Face model.
        hf_logits: function from the output of the Hugging Face model to its logits [b, s, v].
        patch_hf_model: function that patches a Hugging Face model that ignores some of its settings, before its
            forward.
        architecture: function that returns our settings, without sizes, that correspond to the defaults of the Hugging
            Face class. ``--model`` uses them; None if ``--model`` does not accept the type.
        fixed: our settings that all models of the type share.
        required_fields: names of the size fields that a model of the type requires.
        constants: function from a configuration to the constant tensors (not weights) that files may contain: name ->
            the only supported value. Exports contain them.
    """

    model_types: tuple[str, ...]
    problems: Callable[[Config], Iterator[str]]
    fields: Callable[[Config], dict[str, Any]]
    values: Callable[[dict[str, Any]], dict[str, Any]]
    to_ours: Callable[[Tensors, Config], Tensors]
    from_ours: Callable[[Tensors, Config], Tensors]
    recipes: Callable[[Config], Mapping[str, WeightMapping]]
    word: str
    key_groups: tuple[frozenset[str], ...] = ()
    word_copies: tuple[str, ...] = ()
    copies: Callable[[Config], Mapping[str, str]] = lambda config: {}
    head: str = "lm_head.weight"
    ties_missing_head: bool = False
    optional_prefix: str = ""
    optional_biases: re.Pattern[str] = MATCHES_NOTHING
    ignored_names: re.Pattern[str] = MATCHES_NOTHING
    rename_tensor: Callable[[str, Config], str | None] = keep_tensor_name
    unpack: Callable[[str, Sequence[int]], Mapping[str, StackedRows]] = lambda name, shape: {}
    logit_tolerance: float = 1e-10
    auto_class: str | Callable[[Config], str] = "AutoModelForCausalLM"
    model_logits: Callable[[Any, torch.Tensor], torch.Tensor] = decoder_logits
    hf_inputs: Callable[[torch.Tensor], dict[str, torch.Tensor]] = input_ids_only
    hf_logits: Callable[[Any], torch.Tensor] = attrgetter("logits")
    patch_hf_model: Callable[[Any, Config], None] = leave_hf_model_unchanged
    architecture: Callable[[], dict[str, Any]] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required_fields: tuple[str, ...] = ()
    constants: Callable[[Config], Mapping[str, float]] = no_constants


def by_recipes(
    recipes_of: Callable[[Config], Mapping[str, WeightMapping]],
    heights_of: Callable[[Config], Mapping[str, int]] = lambda config: {},
) -> dict[str, Any]:
    """Return ``recipes``, ``to_ours`` and ``from_ours`` of a format with one mapping per weight.

    Args:
        heights_of: function from a configuration to the number of rows of each part, by the suffix of the part's name
            (``k_proj.weight``), for weights whose parts have different numbers of rows.
    """

    def to_ours(hf_weights: Tensors, config: Config) -> Tensors:
        return {name: weight_from_hf(mapping, hf_weights) for name, mapping in recipes_of(config).items()}

    def from_ours(weights: Tensors, config: Config) -> Tensors:
        mappings, heights = recipes_of(config), heights_of(config)
        unknown = [name for name in weights if name not in mappings]
        if unknown:
            raise CheckpointError(f"our model has no weights with these names: {', '.join(unknown)}")
        hf_weights: Tensors = {}
        tensors_by_index: dict[str, dict[int, torch.Tensor]] = {}
        tensors_by_row: dict[str, dict[int, torch.Tensor]] = {}
        num_groups: dict[str, int] = {}
        for name, tensor in weights.items():
            hf_names, index = mappings[name].hf_names, mappings[name].index
            if index is not None:
                (stacked_tensor,) = weight_to_hf(mappings[name], tensor).values()
                tensors_by_index.setdefault(hf_names[0], {})[index] = stacked_tensor
                continue
            if (rows := mappings[name].rows) is not None:
                (part,) = weight_to_hf(mappings[name], tensor).values()
                tensors_by_row.setdefault(hf_names[0], {})[rows[0]] = part
                num_groups[hf_names[0]] = len(part) // rows[1]
                continue
            heights_by_name = {
                hf_name: num_rows
                for hf_name in hf_names
                for suffix, num_rows in heights.items()
                if hf_name.endswith(suffix)
            }
            hf_weights.update(
                weight_to_hf(mappings[name], tensor, heights_by_name if len(heights_by_name) == len(hf_names) else None)
            )
        return hf_weights | stack_indexed(tensors_by_index) | join_rows(tensors_by_row, num_groups)

    return {"recipes": recipes_of, "to_ours": to_ours, "from_ours": from_ours}
