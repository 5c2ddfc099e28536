"""config.json from our Config and back, by the formats of the families; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.arguments.flag_values import all_options, config_from_values
from megatron.arguments.validate import model_problems
from megatron.checkpoint import former
from megatron.config import Config
from megatron.config.changed_defaults import former_defaults
from megatron.config.option import Option, is_derived
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import HFFormat
from megatron.models.registry import FAMILIES, huggingface_formats, is_common_decoder

# The files of a folder that say what it holds.

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in the file ``name`` of ``folder``.

    Raises:
        CheckpointError: it is missing, or holds something else.
    """
    try:
        content = json.loads((folder / name).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder} is not a Hugging Face folder: {name}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / name} must hold a JSON object")
    return content


def missing_file(folder: Path, name: str) -> CheckpointError:
    """Return the error for a file with tensors that is not there."""
    pickled = sorted(found.name for found in folder.glob("pytorch_model*.bin"))
    cure = f" {', '.join(pickled)} can carry code and is not read: save it as safetensors first." if pickled else ""
    return CheckpointError(f"{folder} must hold {name}, which is missing.{cure}")


def uses_index(folder: Path) -> bool:
    """Return True if the tensors of ``folder`` are those of its index, as transformers chooses.

    A ``model.safetensors`` takes precedence: an index next to it is left over from an earlier save.
    """
    return (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file()


def missing_head(missing: Iterable[str], config: Config) -> str:
    """Return the advice for an untied model whose head is among the ``missing`` tensors; empty for any other model."""
    if not config.model.untie_embeddings or format_of(config).head not in missing:
        return ""
    return (
        ". config.json describes a head of its own (tie_word_embeddings false); if the word embeddings are the head, "
        'set "tie_word_embeddings": true'
    )


def full_names(names: Iterable[str], config: Config) -> dict[str, str]:
    """Return tensor's full name -> its name in the files, without what no model reads."""
    hf_format, names = format_of(config), list(names)
    is_short = hf_format.word.removeprefix(hf_format.short) in names if hf_format.short else False
    found: dict[str, str] = {}
    for name in names:
        whole = f"{hf_format.short}{name}" if is_short and name != hf_format.head else name
        full = None if hf_format.unread.fullmatch(whole) else hf_format.named(whole, config)
        if full is not None:
            found[full] = name
    return found


def copies(config: Config) -> tuple[str, ...]:
    """Return their names of what is the word table once more."""
    hf_format = format_of(config)
    return (*hf_format.copies, *(() if config.model.untie_embeddings else (hf_format.head,)))


# The Hugging Face formats of the families.


def formats_of(family: str) -> tuple[HFFormat, ...]:
    """Return the Hugging Face formats of ``family``, one for each model type.

    Raises:
        CheckpointError: it has none.
    """
    known = families_with_format()
    if family not in known:
        title = FAMILIES[family].title if family in FAMILIES else family
        have = ", ".join(FAMILIES[name].title for name in known)
        raise CheckpointError(f"{title} has no Hugging Face form here; {have} have one")
    return huggingface_formats(family)


def format_of(config: Config, model_type: str | None = None) -> HFFormat:
    """Return the format there that holds the model of ``config``.

    It is the first of its family that holds all of its settings; where none does, and it is the common decoder, the
    first of the other decoders. So a run of pretrain_gpt2.py with the settings of a Qwen 3 is a Qwen 3 there.

    Args:
        model_type: the one to take; None: the first that fits.

    Raises:
        CheckpointError: none fits; it says what stands against the nearest.
    """
    known = [one for family in _relatives(config.family) for one in formats_of(family)]
    if model_type is not None:
        known = [one for one in known if model_type in one.model_types]
        if not known:
            raise CheckpointError(
                f"--model-type must be one that a model of this family can have, got {model_type!r}. Use one of "
                f"{', '.join(kind for family in _relatives(config.family) for kind in types_of(family))}"
            )
    against: dict[str, list[str]] = {}
    for one in known:
        problems = list(one.problems(config))
        if not problems:
            return one
        against[one.model_types[0]] = problems
    fewest = min(len(problems) for problems in against.values())
    nearest = [f"{kind}: {'; '.join(problems)}" for kind, problems in against.items() if len(problems) == fewest]
    raise CheckpointError(f"this model has no Hugging Face form; the nearest is {', or '.join(nearest)}")


def _relatives(family: str) -> list[str]:
    """Return the families whose formats may hold a model of ``family``: itself, and of the common decoder the others.

    Raises:
        CheckpointError: there is none.
    """
    if not is_common_decoder(family):
        return [family] if formats_of(family) else []
    own = [family] if family in families_with_format() else []
    return own + [name for name in families_with_format() if name != family and is_common_decoder(name)]


def types_of(family: str) -> list[str]:
    """Return the values of ``model_type`` that a model of ``family`` is read from and may be written as."""
    return [kind for one in formats_of(family) for kind in one.model_types]


def families_with_format() -> list[str]:
    """Return the families that have a Hugging Face format."""
    return [name for name, family in FAMILIES.items() if family.huggingface]


def family_by_type() -> dict[str, str]:
    """Return their model_type -> our family."""
    return {kind: family for family in families_with_format() for kind in types_of(family)}


# ``config.json`` of a Hugging Face folder from our configuration, and back.
#
# The fields are in the ``huggingface.py`` of each family.

_TOKENIZER = ("tokenizer_type", "tokenizer_path", "vocab_file", "merge_file")


def saved_config(state: Mapping[str, Any]) -> Config:
    """Return the configuration that a checkpoint's ``state`` keeps: what says what the model is, and the tokenizer.

    Raises:
        CheckpointError: there is none, or it is of a family that this program does not know.
    """
    try:
        saved, sizes = former.settings(state["config"]), state["model"]
        sections = ("model", saved["family"], "data")
        values = {key: value for name in sections for key, value in saved.get(name, {}).items()}
        values = {**former_defaults(state["config"], sections), **values}
        known = {option.name for _, option in all_options()}
        values = {key: value for key, value in values.items() if key in known}
        config = config_from_values(values, family=saved["family"])
        return replace(config, model=replace(config.model, vocab_size=sizes["vocab_size"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint does not say which model it holds ({type(error).__name__}: {error}); only those of "
            f"{', '.join(FAMILIES[family].title for family in families_with_format())} that the pretraining scripts "
            "save can be converted"
        ) from error


def config_to_huggingface(config: Config, dtype: str, model_type: str | None = None) -> dict[str, Any]:
    """Return the fields of ``config.json``, ids of control tokens left out.

    Args:
        model_type: as of ``format_of``.

    Raises:
        CheckpointError: listing everything of the model that has no form there.
    """
    return {**format_of(config, model_type).fields(config), "dtype": dtype}


def config_from_huggingface(theirs: Mapping[str, Any]) -> Config:
    """Return our configuration of the model that ``config.json`` describes.

    Raises:
        CheckpointError: another architecture, a setting that our models do not have, a size that is missing; or listing
            every value that no flag would take.
    """
    kind, families = theirs.get("model_type"), family_by_type()
    if kind is None or kind not in families:
        raise CheckpointError(f"model_type must be one of {', '.join(families)}, got {kind!r}: another architecture")
    try:
        (hf_format,) = (one for one in formats_of(families[kind]) if kind in one.model_types)
        values = _with_whole_numbers(hf_format.values(dict(theirs)))
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


def flags_of(config: Config) -> list[str]:
    """Return the flags with which a pretraining script builds the model of ``config`` and reads its tokenizer."""
    files = {name: getattr(config.data, name) for name in _TOKENIZER}
    beside = {name: getattr(config.model, name) for name in ("max_position_embeddings", "layernorm_epsilon")}
    return words_of({**config.identity(), **beside, **files}, config)


def words_of(given: Mapping[str, Any], config: Config) -> list[str]:
    """Return the flags that set the fields ``given``, as far as the defaults of the family of ``config`` differ."""
    usual = {**config.own.DEFAULTS, "num_query_groups": config.model.num_attention_heads}
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
