"""HFFormat: names, settings and weights of a Hugging Face model type. Imports torch only when weights are converted."""

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

# Conversion of weights. One description per weight serves both directions, for full tensors and for slices.
#
# | ours | Hugging Face | recipe |
# |---|---|---|
# | a norm or embedding | one tensor | ``WeightMapping(("name",))`` |
# | a linear layer | one tensor [in, out] of a ``Conv1D`` | ``WeightMapping(("name",), is_transposed=True)`` |
# | query, key and value per head | three tensors | ``WeightMapping(("q", "k", "v"), blocks=heads)`` |
# | the same | one tensor, all queries first | ``WeightMapping(("qkv",), blocks=heads, parts_in_one=3)`` |
# | interleaved gate and value | two tensors of f rows | ``WeightMapping(("gate", "up"), blocks=f)`` |
#
# The rows of our weight are the first block of each part, then the second block of each part, and so on. Blocks of
# different parts may have different numbers of rows (with grouped queries: several query heads, one key, one value).


class Readable(Protocol):
    """A tensor, or a slice of a file that returns a tensor when indexed."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class WeightMapping:
    """The Hugging Face tensors that make up one of our weights.

    Args:
        names: names of the Hugging Face tensors, in the order in which their blocks are interleaved.
        blocks: number of blocks of rows in each part.
        parts_in_one: number of parts of equal height that are concatenated in a single Hugging Face tensor.
        is_transposed: the Hugging Face tensor is [in, out], ours is [out, in].
    """

    names: tuple[str, ...]
    blocks: int = 1
    parts_in_one: int = 1
    is_transposed: bool = False


def to_our_weight(recipe: WeightMapping, theirs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return our weight, built from the Hugging Face tensors ``theirs``; it does not share memory with them.

    Raises:
        CheckpointError: the rows cannot be split into blocks.
    """
    import torch  # takes half a second; a dry run that reads only settings does not need it

    parts = _parts(recipe, [theirs[name].detach() for name in recipe.names])
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    blocks = [_blocks(recipe, part) for part in parts]  # each [blocks, rows, ...]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def from_our_weight(
    recipe: WeightMapping, ours: torch.Tensor, heights: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Return the Hugging Face tensors of our weight, by name.

    Args:
        heights: rows of each part by tensor name; None: all parts have the same height.
    """
    import torch

    count = len(recipe.names) * recipe.parts_in_one
    if count == 1:
        parts = [ours.detach()]
    else:
        if ours.shape[0] % recipe.blocks:
            raise _uneven(recipe, ours.shape[0])
        rows = ours.shape[0] // recipe.blocks
        part_rows = [rows // count] * count
        if heights is not None and recipe.parts_in_one == 1:
            part_rows = [heights[name] // recipe.blocks for name in recipe.names]
        if sum(part_rows) != rows:
            raise _uneven(recipe, ours.shape[0])
        parts = [
            part.flatten(0, 1) for part in ours.detach().unflatten(0, (recipe.blocks, rows)).split(part_rows, dim=1)
        ]
    tensors = [torch.cat(parts)] if recipe.parts_in_one > 1 else parts
    if recipe.is_transposed:
        tensors = [part.t() if part.dim() == 2 else part for part in tensors]
    return {name: part.contiguous() for name, part in zip(recipe.names, tensors, strict=True)}


def read_into(
    target: torch.Tensor,
    recipe: WeightMapping,
    theirs: Mapping[str, Readable],
    shapes: Mapping[str, list[int]],
    shard: Shard,
) -> None:
    """Fill ``target`` with the slice ``shard`` of our weight.

    Only the required rows and columns of the Hugging Face tensors are read, one tensor at a time.

    Args:
        theirs: the Hugging Face tensors by name; indexed with slices.
        shapes: their shapes by name.

    Raises:
        CheckpointError: rows cannot be split into blocks.
    """
    heights = _heights(recipe, shapes)
    begin, end = shard.start, shard.start + shard.length
    if shard.partition_dim == 0:
        for start, stop in _spans(begin, end, sum(heights)):
            _fill(target[start - begin : stop - begin], recipe, theirs, heights, start, None)
    else:
        _fill(target, recipe, theirs, heights, 0, None if shard.partition_dim is None else slice(begin, end))


def _heights(recipe: WeightMapping, shapes: Mapping[str, list[int]]) -> list[int]:
    """Return the rows per block of each part."""
    rows = [shapes[name][-1 if recipe.is_transposed else 0] for name in recipe.names]
    if any(height % (recipe.blocks * recipe.parts_in_one) for height in rows):
        raise _uneven(recipe, sum(rows))
    return [height // recipe.blocks // recipe.parts_in_one for height in rows for _ in range(recipe.parts_in_one)]


def _spans(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """Split our rows ``start`` to ``stop`` into a span of complete blocks (``rows`` rows each) and parts of blocks."""
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
    """Fill ``target``, our rows from ``start`` on: either complete blocks, or rows of one block.

    Our block has ``heights[i]`` rows of part i, for example query, key and value of a head. In the Hugging Face tensor
    the rows of a part are contiguous over all blocks.
    """
    block_height = sum(heights)
    first_block, low = divmod(start, block_height)
    num_blocks = -(-(low + target.shape[0]) // block_height)
    blocks = target.unflatten(0, (num_blocks, -1))  # rows low to high of each block
    high = low + blocks.shape[1]
    part_start = 0
    for part_idx, height in enumerate(heights):
        begin, end = max(low, part_start), min(high, part_start + height)  # this part's rows in the block
        if begin < end:
            name, part = recipe.names[part_idx // recipe.parts_in_one], part_idx % recipe.parts_in_one
            first_row = (part * recipe.blocks + first_block) * height + begin - part_start
            rows = slice(first_row, first_row + (num_blocks - 1) * height + end - begin)
            source = _cut(recipe, theirs[name], rows, columns)
            blocks[:, begin - low : end - low].copy_(source.unflatten(0, (num_blocks, -1)))
        part_start += height


def _cut(recipe: WeightMapping, tensor: Readable, rows: slice, columns: slice | None) -> torch.Tensor:
    """Return a slice of our weight; rows and columns are swapped in a transposed Hugging Face tensor."""
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
        f"{', '.join(recipe.names)}: the rows of each part must divide into {recipe.blocks} blocks of equal height, "
        f"one per head or query group, got {rows} rows, which is not a multiple of {recipe.blocks}"
    )


# The Hugging Face format of a model type: settings and weights in both directions.

Tensors: TypeAlias = "dict[str, torch.Tensor]"
NOTHING = re.compile(r"(?!)")
"""Pattern that matches no tensor name."""


def decoder_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, v] of a decoder whose inputs are tokens and their positions."""
    import torch

    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).transpose(0, 1)


def tokens_alone(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a Hugging Face model whose only input is ``tokens``."""
    return {"input_ids": tokens}


def leave_as_it_is(theirs: Any, config: Config) -> None:
    """Do nothing: the Hugging Face model follows its settings."""


def as_it_is(name: str, config: Config) -> str:
    """Return ``name``: tensor names are the same in old and new files."""
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
"""Setting that distinguishes one decoder from another -> its value in GPT-2."""


def other_settings(model: ModelConfig, fixed: Mapping[str, Any], *, free: Collection[str] = ()) -> Iterator[str]:
    """Yield a problem for each setting that changes ``model`` and that the format cannot express.

    A setting that is in neither ``fixed`` nor ``free`` must have its value in ``_PLAIN``. ``activation``,
    ``hidden_bias``, ``untie_embeddings`` and ``num_query_groups`` are not in that table: most formats support several
    values of these, and their ``problems`` check them.

    Args:
        fixed: setting -> the only value that the format can express.
        free: settings for which the format can express every value.
    """
    flags = {option.name: option.flag or option.name for option in options_of(ModelConfig)}
    for name, required in {**_PLAIN, **fixed}.items():
        value = getattr(model, name)
        if name not in free and value != required and _acts(model, name):
            yield f"{flags[name]} must be {required}, got {value}"


def _acts(model: ModelConfig, name: str) -> bool:
    """Return True if the setting takes effect given the other settings."""
    if name == "norm_bias":
        return model.normalization == "LayerNorm"
    if name == "rotary_local_base":
        return model.position_embedding_type == "rope" and model.window_size > 0
    if name in BASE_WIDTHS:
        return bool(model.logit_multiplier != 1.0)
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
        groups: keys of config.json that together express one setting; an export replaces all keys of a group or none.
        copies: Hugging Face names of copies of the word embedding, which files may omit. A tied head is always
            treated as a copy and need not be listed.
        head: Hugging Face name of the head.
        ties_missing_head: the Hugging Face class uses the word embedding for a missing head, whatever config.json says.
        short: prefix of tensor names that some files omit.
        biases: Hugging Face names of biases that the Hugging Face model has and our model may lack.
        unread: names of tensors in old files that no model reads.
        named: function from a tensor's name in the file and our configuration to its current name; None for tensors
            that this model does not read.
        allowed: maximum difference of logits in fp64, relative to the largest logit.
        auto: Hugging Face class that builds the model, or a function that returns it for our configuration.
        our_logits: function from our model and tokens [b, s] to its logits [b, s, v].
        their_inputs: function from tokens to the keyword arguments of the Hugging Face model.
        their_logits: function from the output of the Hugging Face model to its logits [b, s, v].
        prepare: function that patches a Hugging Face model that ignores some of its settings, before its forward.
        architecture: function that returns our settings, without sizes, that correspond to the defaults of the Hugging
            Face class. ``--model`` uses them; None if ``--model`` does not accept the type.
        fixed: our settings that all models of the type share.
        needs: names of the size fields that a model of the type requires.
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
    """Return ``recipes``, ``to_ours`` and ``from_ours`` of a format with one mapping per weight.

    Args:
        heights_of: function from a configuration to the number of rows of each part, by the suffix of the part's name
            (``k_proj.weight``), for weights whose parts have different numbers of rows.
    """

    def to_ours(theirs: Tensors, config: Config) -> Tensors:
        return {name: to_our_weight(recipe, theirs) for name, recipe in recipes_of(config).items()}

    def from_ours(ours: Tensors, config: Config) -> Tensors:
        mappings, heights = recipes_of(config), heights_of(config)
        unknown = [name for name in ours if name not in mappings]
        if unknown:
            raise CheckpointError(f"our model has no weights with these names: {', '.join(unknown)}")
        theirs: Tensors = {}
        for name, tensor in ours.items():
            parts = mappings[name].names
            part_heights = {part: rows for part in parts for end, rows in heights.items() if part.endswith(end)}
            theirs.update(
                from_our_weight(mappings[name], tensor, part_heights if len(part_heights) == len(parts) else None)
            )
        return theirs

    return {"recipes": recipes_of, "to_ours": to_ours, "from_ours": from_ours}
