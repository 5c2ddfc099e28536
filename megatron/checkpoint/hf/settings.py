"""``config.json`` of a Hugging Face folder from our configuration, and back.

What the fields are stands in the file of each family: ``forms`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.arguments.values import all_options, config_from_values
from megatron.checkpoint.hf.forms import family_by_type, form_of, with_forms
from megatron.config import Config
from megatron.config.option import Option, is_derived
from megatron.config.validate import model_problems
from megatron.errors import CheckpointError
from megatron.models.registry import FAMILIES

_TOKENIZER = ("tokenizer_type", "tokenizer_path", "vocab_file", "merge_file")


def saved_config(state: Mapping[str, Any]) -> Config:
    """Return the configuration that a checkpoint's ``state`` keeps: what says what the model is, and the tokenizer.

    Raises:
        CheckpointError: there is none, or it is of a family that this program does not know.
    """
    try:
        saved, sizes = state["config"], state["model"]
        sections = ("model", saved["family"], "data")
        values = {key: value for name in sections for key, value in saved.get(name, {}).items()}
        known = {option.name for _, option in all_options()}
        values = {key: value for key, value in values.items() if key in known}
        config = config_from_values(values, family=saved["family"])
        return replace(config, model=replace(config.model, vocab_size=sizes["vocab_size"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint does not say which model it holds ({type(error).__name__}: {error}); only those of "
            f"{', '.join(FAMILIES[family].title for family in with_forms())} that the pretraining scripts save can be "
            "converted"
        ) from error


def to_theirs(config: Config, dtype: str) -> dict[str, Any]:
    """Return the fields of ``config.json``, ids of control tokens left out.

    Raises:
        CheckpointError: listing everything of the model that has no form there.
    """
    form = form_of(config.family)
    problems = list(form.problems(config))
    if problems:
        raise CheckpointError(f"this model has no Hugging Face form: {'; '.join(problems)}")
    return {**form.fields(config), "dtype": dtype}


def to_ours(theirs: Mapping[str, Any]) -> Config:
    """Return our configuration of the model that ``config.json`` describes.

    Raises:
        CheckpointError: another architecture, a setting that our models do not have, a size that is missing; or listing
            every value that no flag would take.
    """
    kind, families = theirs.get("model_type"), family_by_type()
    if kind is None or kind not in families:
        raise CheckpointError(f"model_type must be one of {', '.join(families)}, got {kind!r}: another architecture")
    try:
        values = _with_whole_numbers(form_of(families[kind]).values(dict(theirs)))
        found = list(_out_of_range(values))
        config = Config() if found else config_from_values(values, family=families[kind])
        found = found or list(model_problems(replace(config, given=tuple(values))))
    except KeyError as error:
        raise CheckpointError(f"config.json must hold {error} for a {kind}; it is missing") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json does not describe a {kind}: {error}") from error
    if found:
        raise CheckpointError(f"config.json does not describe a {kind} that we have: {'; '.join(found)}")
    return config


def _with_whole_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with 16.0 as 16 where a whole number is wanted."""
    whole = {option.name for _, option in all_options() if option.kind == "int"}
    return {
        name: int(value) if name in whole and isinstance(value, float) and value.is_integer() else value
        for name, value in values.items()
    }


def _out_of_range(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no flag would take."""
    for _, option in all_options():
        value = values.get(option.name)
        problem = option.problem(value, option.flag or option.name) if value is not None else None
        if problem and not is_derived(option, value):
            yield problem


def flags(config: Config) -> list[str]:
    """Return the flags with which a pretraining script builds the model of ``config`` and reads its tokenizer."""
    files = {name: getattr(config.data, name) for name in _TOKENIZER}
    beside = {name: getattr(config.model, name) for name in ("max_position_embeddings", "layernorm_epsilon")}
    given, usual = {**config.identity(), **beside, **files}, config.own.DEFAULTS
    words: list[str] = []
    for _, option in all_options():
        value = given.get(option.name)
        if value is not None and value != usual.get(option.name, option.default):
            words += _words(option, value)
    return words


def _words(option: Option, value: Any) -> list[str]:
    """Return how a command line says ``value``."""
    if value is True and option.flag:
        return [option.flag]
    if isinstance(value, bool):
        return [flag for flag, constant in option.constants.items() if constant is value][:1]
    return [option.flag, str(value)]
