"""HFFormat: names, settings and weight recipes, read in both directions and in slices; torch with the first weight."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from megatron.config import Config
from megatron.config.decoder import BASE_WIDTHS
from megatron.config.model import ModelConfig
from megatron.config.option import options_of
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from megatron.mpu.shard import Shard

# How each of our weights is made of Hugging Face's tensors: one description, read in both directions and in parts.
#
# | ours | theirs | recipe |
# |---|---|---|
# | a norm, a table | one tensor | ``WeightMapping(("name",))`` |
# | a product, of ``Conv1D`` | one tensor [in, out] | ``WeightMapping(("name",), is_transposed=True)`` |
# | query, key and value by head | three tensors | ``WeightMapping(("q", "k", "v"), blocks=heads)`` |
# | the same | one tensor, all queries first | ``WeightMapping(("qkv",), blocks=heads, parts_in_one=3)`` |
# | gate and value in turns | two tensors of f rows | ``WeightMapping(("gate", "up"), blocks=f)`` |
#
# Our rows are the first block of each part, then the second of each, and so on; parts may have blocks of different
# heights (of grouped queries: several heads, one key, one value).


class Readable(Protocol):
    """A tensor, or a slice of a file that gives a tensor when it is indexed."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class WeightMapping:
    """Which of their tensors make up one of ours.

    Args:
        names: theirs, in the order in which their blocks take turns.
        blocks: how many blocks the rows of each part have.
        parts_in_one: a single tensor of theirs holds so many parts of equal height, one after the other.
        is_transposed: theirs is [in, out], ours [out, in].
    """

    names: tuple[str, ...]
    blocks: int = 1
    parts_in_one: int = 1
    is_transposed: bool = False


def to_our_weight(recipe: WeightMapping, theirs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return our weight, made of ``theirs``; it shares no memory with them.

    Raises:
        CheckpointError: their rows cannot be cut into the blocks.
    """
    import torch  # half a second, which a dry run that reads settings alone does not wait

    parts = _parts(recipe, [theirs[name].detach() for name in recipe.names])
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    blocks = [_blocks(recipe, part) for part in parts]  # each [blocks, rows, ...]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def from_our_weight(
    recipe: WeightMapping, ours: torch.Tensor, heights: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Return their tensors by name, of our weight.

    Args:
        heights: rows of a part by the name of its tensor; None: all alike.
    """
    import torch

    count = len(recipe.names) * recipe.parts_in_one
    if count == 1:
        parts = [ours.detach()]
    else:
        if ours.shape[0] % recipe.blocks:
            raise _uneven(recipe, ours.shape[0])
        rows = ours.shape[0] // recipe.blocks
        each = [rows // count] * count
        if heights is not None and recipe.parts_in_one == 1:
            each = [heights[name] // recipe.blocks for name in recipe.names]
        if sum(each) != rows:
            raise _uneven(recipe, ours.shape[0])
        parts = [part.flatten(0, 1) for part in ours.detach().unflatten(0, (recipe.blocks, rows)).split(each, dim=1)]
    whole = [torch.cat(parts)] if recipe.parts_in_one > 1 else parts
    if recipe.is_transposed:
        whole = [part.t() if part.dim() == 2 else part for part in whole]
    return {name: part.contiguous() for name, part in zip(recipe.names, whole, strict=True)}


def read_into(
    target: torch.Tensor,
    recipe: WeightMapping,
    theirs: Mapping[str, Readable],
    shapes: Mapping[str, list[int]],
    shard: Shard,
) -> None:
    """Fill ``target`` with the slice ``shard`` of our weight.

    Only the needed rows and columns of their tensors are read, one tensor after the other.

    Args:
        theirs: by name; indexed with slices.
        shapes: theirs, by name.

    Raises:
        CheckpointError: rows cannot be cut into blocks.
    """
    heights = _heights(recipe, shapes)
    begin, end = shard.start, shard.start + shard.length
    if shard.partition_dim == 0:
        for start, stop in _spans(begin, end, sum(heights)):
            _fill(target[start - begin : stop - begin], recipe, theirs, heights, start, None)
    else:
        _fill(target, recipe, theirs, heights, 0, None if shard.partition_dim is None else slice(begin, end))


def _heights(recipe: WeightMapping, shapes: Mapping[str, list[int]]) -> list[int]:
    """Return the rows of a block of each part."""
    rows = [shapes[name][-1 if recipe.is_transposed else 0] for name in recipe.names]
    if any(height % (recipe.blocks * recipe.parts_in_one) for height in rows):
        raise _uneven(recipe, sum(rows))
    return [height // recipe.blocks // recipe.parts_in_one for height in rows for _ in range(recipe.parts_in_one)]


def _spans(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield our rows ``start`` to ``stop`` as one span of whole blocks of ``rows`` rows, and spans within a block."""
    edges = {edge for edge in (-(-start // rows) * rows, stop // rows * rows) if start < edge < stop}
    return itertools.pairwise(sorted({start, stop} | edges))


def _fill(
    target: torch.Tensor,
    recipe: WeightMapping,
    theirs: Mapping[str, Readable],
    heights: list[int],
    start: int,
    columns: slice | None,
) -> None:
    """Fill ``target``, which holds our rows from ``start`` on: whole blocks, or rows of one block.

    A block of ours has ``heights[i]`` rows of each part, for example those of query, key and value of a head. In their
    tensor the rows of a part are contiguous over all blocks.
    """
    block_height = sum(heights)
    first_block, low = divmod(start, block_height)
    num_blocks = -(-(low + target.shape[0]) // block_height)
    blocks = target.unflatten(0, (num_blocks, -1))  # rows low to high of each block
    high = low + blocks.shape[1]
    part_start = 0
    for number, height in enumerate(heights):
        begin, end = max(low, part_start), min(high, part_start + height)  # rows of the block that are of this part
        if begin < end:
            name, part = recipe.names[number // recipe.parts_in_one], number % recipe.parts_in_one
            first_row = (part * recipe.blocks + first_block) * height + begin - part_start
            rows = slice(first_row, first_row + (num_blocks - 1) * height + end - begin)
            read = _cut(recipe, theirs[name], rows, columns)
            blocks[:, begin - low : end - low].copy_(read.unflatten(0, (num_blocks, -1)))
        part_start += height


def _cut(recipe: WeightMapping, tensor: Readable, rows: slice, columns: slice | None) -> torch.Tensor:
    """Return rows and columns of ours, which are columns and rows of a transposed weight of theirs."""
    if recipe.is_transposed:
        return (tensor[..., rows] if columns is None else tensor[columns, rows]).t()
    return tensor[rows] if columns is None else tensor[rows, columns]


def _parts(recipe: WeightMapping, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if recipe.is_transposed:
        tensors = [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]
    if recipe.parts_in_one == 1:
        return tensors
    if tensors[0].shape[0] % recipe.parts_in_one:
        raise _uneven(recipe, tensors[0].shape[0])
    return list(tensors[0].chunk(recipe.parts_in_one))


def _blocks(recipe: WeightMapping, part: torch.Tensor) -> torch.Tensor:
    if part.shape[0] % recipe.blocks:
        raise _uneven(recipe, part.shape[0])
    return part.unflatten(0, (recipe.blocks, -1))


def _uneven(recipe: WeightMapping, rows: int) -> CheckpointError:
    return CheckpointError(
        f"{', '.join(recipe.names)}: the rows of each part must be {recipe.blocks} blocks of one height (for each head "
        f"or group one), got {rows} rows, which is not a multiple of {recipe.blocks}"
    )


# What a family's file says of its Hugging Face form: settings both ways, and how its weights are made of theirs.

Tensors: TypeAlias = "dict[str, torch.Tensor]"
NOTHING = re.compile(r"(?!)")


def decoder_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, v] of a decoder that takes tokens and their positions."""
    import torch

    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).transpose(0, 1)


def tokens_alone(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a model of theirs is called with that reads one sequence."""
    return {"input_ids": tokens}


def leave_as_it_is(theirs: Any, config: Config) -> None:
    """Do nothing: their model does what its settings say."""


def as_it_is(name: str, config: Config) -> str:
    """Return ``name``: old files and new ones name their tensors alike."""
    return name


_PLAIN: dict[str, Any] = {
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
}
"""A setting of a decoder that makes another model of it -> its value in a GPT-2."""


def other_settings(model: ModelConfig, fixed: Mapping[str, Any], *, free: Collection[str] = ()) -> Iterator[str]:
    """Yield a problem for each setting of a decoder that changes ``model`` and that the format cannot express.

    A setting that neither ``fixed`` nor ``free`` names must have its value in ``_PLAIN``. The table does not have
    ``activation``, ``hidden_bias``, ``untie_embeddings`` and ``num_query_groups``: most formats have several values of
    these, and their ``problems`` check them.

    Args:
        fixed: setting -> the only value that the format can express.
        free: settings of which the format can express every value.
    """
    flags = {option.name: option.flag or option.name for option in options_of(ModelConfig)}
    for name, only in {**_PLAIN, **fixed}.items():
        value = getattr(model, name)
        if name not in free and value != only and _acts(model, name):
            yield f"{flags[name]} must be {only} there, got {value}"


def _acts(model: ModelConfig, name: str) -> bool:
    """Return whether a setting makes a difference beside the others."""
    if name == "norm_bias":
        return model.normalization == "LayerNorm"
    if name == "rotary_local_base":
        return model.position_embedding_type == "rope" and model.window_size > 0
    if name in BASE_WIDTHS:
        return bool(model.logit_multiplier != 1.0)
    return not name.startswith("rotary_") or model.position_embedding_type == "rope"


@dataclass(frozen=True, kw_only=True)
class HFFormat:
    """One model type there, or several that are the same to us.

    Args:
        model_types: values of ``model_type`` in config.json.
        problems: what of a configuration has no form there.
        fields: config.json of a configuration, without ``dtype`` and ids of control tokens.
        values: flat fields of our configuration, by name, of a config.json.
        to_ours, from_ours: all weights, given the configuration.
        recipes: how each of our weights is made, by name; what a rank reads of a folder by itself goes by them.
        word: their name of the word table.
        groups: keys of config.json that state one setting together; an export replaces all of a group or none.
        copies: their names of copies of it, which they may leave out; a tied head is one anyway.
        head: their name of the head.
        ties_missing_head: their class uses the word table for a missing head, whatever config.json says of it.
        short: beginning of their names that some files leave out.
        biases: their names of biases that a model of ours may lack, and theirs has.
        unread: names of what old files hold and no model reads.
        named: a tensor's name as today's model has it, None for what this model does not read; given its name in the
            file and our configuration.
        allowed: largest difference of a logit in fp64, as part of the largest logit.
        auto: their class that builds the model, or what tells it of our configuration.
        our_logits: of our model and tokens [b, s], its logits [b, s, v].
        their_inputs: what their model is called with for the same tokens.
        their_logits: the same of what their model returns.
        prepare: changes their model before it computes, where it does not do what its settings say.
        architecture: for ``--model`` with the model type: our settings of their class's defaults, sizes left out; None
            where ``--model`` does not take the type.
        fixed: those of our settings that every model of the type has.
        needs: fields that are sizes, and that a model of the type cannot be without.
    """

    model_types: tuple[str, ...]
    problems: Callable[[Config], Iterator[str]]
    fields: Callable[[Config], dict[str, Any]]
    values: Callable[[dict[str, Any]], dict[str, Any]]
    to_ours: Callable[[Tensors, Config], Tensors]
    from_ours: Callable[[Tensors, Config], Tensors]
    recipes: Callable[[Config], Mapping[str, WeightMapping]]
    word: str
    groups: tuple[frozenset[str], ...] = ()
    copies: tuple[str, ...] = ()
    head: str = "lm_head.weight"
    ties_missing_head: bool = False
    short: str = ""
    biases: re.Pattern[str] = NOTHING
    unread: re.Pattern[str] = NOTHING
    named: Callable[[str, Config], str | None] = as_it_is
    allowed: float = 1e-10
    auto: str | Callable[[Config], str] = "AutoModelForCausalLM"
    our_logits: Callable[[Any, torch.Tensor], torch.Tensor] = decoder_logits
    their_inputs: Callable[[torch.Tensor], dict[str, torch.Tensor]] = tokens_alone
    their_logits: Callable[[Any], torch.Tensor] = attrgetter("logits")
    prepare: Callable[[Any, Config], None] = leave_as_it_is
    architecture: Callable[[], dict[str, Any]] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def by_recipes(
    recipes_of: Callable[[Config], Mapping[str, WeightMapping]],
    heights_of: Callable[[Config], Mapping[str, int]] = lambda config: {},
) -> dict[str, Any]:
    """Return ``recipes``, ``to_ours`` and ``from_ours`` of a family that has a recipe for each of its weights.

    Args:
        heights_of: rows of each part by the end of its name (``k_proj.weight``), where those of a weight differ.
    """

    def to_ours(theirs: Tensors, config: Config) -> Tensors:
        return {name: to_our_weight(recipe, theirs) for name, recipe in recipes_of(config).items()}

    def from_ours(ours: Tensors, config: Config) -> Tensors:
        known, heights = recipes_of(config), heights_of(config)
        unknown = [name for name in ours if name not in known]
        if unknown:
            raise CheckpointError(f"these names are not of our model: {', '.join(unknown)}")
        theirs: Tensors = {}
        for name, tensor in ours.items():
            parts = known[name].names
            each = {part: rows for part in parts for end, rows in heights.items() if part.endswith(end)}
            theirs.update(from_our_weight(known[name], tensor, each if len(each) == len(parts) else None))
        return theirs

    return {"recipes": recipes_of, "to_ours": to_ours, "from_ours": from_ours}
