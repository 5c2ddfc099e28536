"""What a family's file says of its Hugging Face form: settings both ways, and how its weights are made of theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch

from megatron.checkpoint.hf import recipes
from megatron.checkpoint.hf.recipes import Recipe
from megatron.config import Config, ModelConfig
from megatron.errors import CheckpointError
from megatron.model import Place

Tensors = dict[str, torch.Tensor]
NOTHING = re.compile(r"(?!)")


def decoder_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, v] of a decoder that takes tokens and their positions."""
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).transpose(0, 1)


def tokens_alone(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a model of theirs is called with that reads one sequence."""
    return {"input_ids": tokens}


def leave_as_it_is(theirs: Any, config: Config) -> None:
    """Do nothing: their model does what its settings say."""


def as_it_is(name: str, config: Config) -> str:
    """Return ``name``: old files and new ones name their tensors alike."""
    return name


class Build(Protocol):
    """Builds our model of a family."""

    def __call__(self, model: ModelConfig, config: Config, place: Place | None = None, /) -> torch.nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Form:
    """One family there.

    Args:
        model_types: values of ``model_type`` in config.json.
        build: our model, given its section ``model`` without dropout and padding, and the configuration; the third
            argument is which part of it, None for all.
        problems: what of a configuration has no form there.
        fields: config.json of a configuration, without ``dtype`` and ids of control tokens.
        values: flat fields of our configuration, by name, of a config.json.
        to_ours, from_ours: all weights, given the configuration.
        recipes: how each of our weights is made, by name; what a rank reads of a folder by itself goes by them.
        word: their name of the word table.
        copies: their names of copies of it, which they may leave out; a tied head is one anyway.
        head: their name of the head.
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
    """

    model_types: tuple[str, ...]
    build: Build
    problems: Callable[[Config], Iterator[str]]
    fields: Callable[[Config], dict[str, Any]]
    values: Callable[[dict[str, Any]], dict[str, Any]]
    to_ours: Callable[[Tensors, Config], Tensors]
    from_ours: Callable[[Tensors, Config], Tensors]
    recipes: Callable[[Config], Mapping[str, Recipe]]
    word: str
    copies: tuple[str, ...] = ()
    head: str = "lm_head.weight"
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


def by_recipes(
    recipes_of: Callable[[Config], Mapping[str, Recipe]],
    heights_of: Callable[[Config], Mapping[str, int]] = lambda config: {},
) -> dict[str, Any]:
    """Return ``recipes``, ``to_ours`` and ``from_ours`` of a family that has a recipe for each of its weights.

    Args:
        heights_of: rows of each part by the end of its name (``k_proj.weight``), where those of a weight differ.
    """

    def to_ours(theirs: Tensors, config: Config) -> Tensors:
        return {name: recipes.to_our_weight(recipe, theirs) for name, recipe in recipes_of(config).items()}

    def from_ours(ours: Tensors, config: Config) -> Tensors:
        known, heights = recipes_of(config), heights_of(config)
        unknown = [name for name in ours if name not in known]
        if unknown:
            raise CheckpointError(f"these names are not of our model: {', '.join(unknown)}")
        theirs: Tensors = {}
        for name, tensor in ours.items():
            parts = known[name].names
            each = {part: rows for part in parts for end, rows in heights.items() if part.endswith(end)}
            theirs.update(recipes.from_our_weight(known[name], tensor, each if len(each) == len(parts) else None))
        return theirs

    return {"recipes": recipes_of, "to_ours": to_ours, "from_ours": from_ours}
