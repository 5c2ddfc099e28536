"""Convert our Config to config.json and back, using the families' formats. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from megatron.models.common.huggingface_mtp import PREFIX, has_mtp
from megatron.models.registry import FAMILIES, huggingface_formats, is_common_decoder

# Files of a Hugging Face folder that describe its contents.

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in the file ``name`` in ``folder``.

    Raises:
        CheckpointError: the file is missing or is not a JSON object.
    """
    try:
        content = json.loads((folder / name).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder} is not a Hugging Face folder: {name}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / name} must contain a JSON object")
    return content


def missing_file_error(folder: Path, name: str) -> CheckpointError:
    """Build the error for the missing tensor file ``name``, with advice if the folder has pickled weights instead."""
    pickle_names = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    advice = (
        f" {', '.join(pickle_names)} can contain code and is not read. Save it as safetensors first."
        if pickle_names
        else ""
    )
    return CheckpointError(f"{folder} must contain {name}, which is missing.{advice}")


def uses_index(folder: Path) -> bool:
    """Check if tensors in ``folder`` are read through its index, with the same rule as transformers.

    ``model.safetensors`` takes precedence: an index next to it is left over from an earlier save.
    """
    return (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file()


def missing_head_advice(missing: Iterable[str], config: Config, model_type: str | None = None) -> str:
    """Return advice for an untied model whose head is among the ``missing`` tensors; empty for any other model."""
    if not config.model.untie_embeddings or format_of(config, model_type).head not in missing:
        return ""
    return (
        ". config.json describes an untied head (tie_word_embeddings false). If the head shares the word embeddings, "
        'set "tie_word_embeddings": true'
    )


def full_names(names: Iterable[str], config: Config, model_type: str | None = None) -> dict[str, str]:
    """Map full tensor names to the names in the files, for the tensors that the model uses.

    Args:
        model_type: the files' model type, as in ``format_of``.
    """
    hf_format, names = format_of(config, model_type), list(names)
    uses_short_names = (
        hf_format.word.removeprefix(hf_format.optional_prefix) in names if hf_format.optional_prefix else False
    )
    name_in_files: dict[str, str] = {}
    for name in names:
        long_name = f"{hf_format.optional_prefix}{name}" if uses_short_names and name != hf_format.head else name
        full = None if hf_format.ignored_names.fullmatch(long_name) else hf_format.rename_tensor(long_name, config)
        if full is not None:
            name_in_files[full] = name
    return name_in_files


def copy_names(config: Config, model_type: str | None = None) -> dict[str, str]:
    """Map the name of each tensor copy in Hugging Face's files, such as a tied head, to the name of its original."""
    hf_format = format_of(config, model_type)
    names = (*hf_format.word_copies, *(() if config.model.untie_embeddings else (hf_format.head,)))
    return {**dict.fromkeys(names, hf_format.word), **hf_format.copies(config)}


def drops_mtp(config: Config, model_type: str | None = None) -> bool:
    """Check if the model has multi-token prediction layers for which its Hugging Face format has no names."""
    return config.model.mtp_num_layers > 0 and not has_mtp(format_of(config, model_type).recipes(config))


def without_missing_mtp(tensors: Iterable[str], config: Config, model_type: str | None = None) -> Config:
    """Return ``config``; multi-token prediction is disabled if ``tensors`` has none of its layers.

    transformers saves a model without these layers, but keeps the layer count in config.json.

    Args:
        tensors: tensor names in the folder.
        model_type: the folder's model type, as in ``format_of``.
    """
    recipes = format_of(config, model_type).recipes(config)
    names = {hf_name for name, recipe in recipes.items() if name.startswith(PREFIX) for hf_name in recipe.hf_names}
    if not names or not names.isdisjoint(full_names(tensors, config, model_type)):
        return config
    return replace(config, model=replace(config.model, mtp_num_layers=0))


# The families' Hugging Face formats.


def formats_of(family: str) -> tuple[HFFormat, ...]:
    """List the Hugging Face formats of ``family``, one for each model type.

    Raises:
        CheckpointError: the family has no format.
    """
    supported = families_with_format()
    if family not in supported:
        title = FAMILIES[family].title if family in FAMILIES else family
        titles = ", ".join(FAMILIES[name].title for name in supported)
        raise CheckpointError(f"{title} has no Hugging Face format. Families that have one: {titles}")
    return huggingface_formats(family)


def format_of(config: Config, model_type: str | None = None) -> HFFormat:
    """Find the Hugging Face format that represents the model in ``config``.

    The first format of the model's family that can express all settings is used. If no such format exists and the model
    is a common decoder, the formats of the other common decoder families are tried. For example, a run of
    pretrain_gpt2.py with the settings of a Qwen 3 is exported as a Qwen 3.

    Args:
        model_type: use this model type; None selects the first that fits.

    Raises:
        CheckpointError: no format fits; lists the problems of the closest format.
    """
    candidates = [hf_format for family in _related_families(config.family) for hf_format in formats_of(family)]
    if model_type is not None:
        candidates = [hf_format for hf_format in candidates if model_type in hf_format.model_types]
        if not candidates:
            available = [name for family in _related_families(config.family) for name in model_types_of(family)]
            raise CheckpointError(
                f"--model-type {model_type!r} is not available for models of this family. Use one of "
                f"{', '.join(available)}"
            )
    if config.model.moe_use_residual:
        raise CheckpointError("this model has no Hugging Face format: residual experts (--moe-use-residual)")
    problems_by_type: dict[str, list[str]] = {}
    for hf_format in candidates:
        problems = list(hf_format.problems(config))
        if not problems:
            return hf_format
        problems_by_type[hf_format.model_types[0]] = problems
    fewest = min(len(problems) for problems in problems_by_type.values())
    nearest = [
        f"{type_name}: {'; '.join(problems)}"
        for type_name, problems in problems_by_type.items()
        if len(problems) == fewest
    ]
    raise CheckpointError(f"this model has no Hugging Face format; the closest is {', or '.join(nearest)}")


def _related_families(family: str) -> list[str]:
    """List the families whose formats may represent a ``family`` model, ``family`` itself first.

    For a common decoder these include the other common decoders.

    Raises:
        CheckpointError: none of these families has a Hugging Face format.
    """
    if not is_common_decoder(family):
        return [family] if formats_of(family) else []
    own_formats = [family] if family in families_with_format() else []
    return own_formats + [name for name in families_with_format() if name != family and is_common_decoder(name)]


def model_types_of(family: str) -> list[str]:
    """List the ``model_type`` values in config.json that can be imported and exported for ``family``."""
    return [model_type for hf_format in formats_of(family) for model_type in hf_format.model_types]


def families_with_format() -> list[str]:
    """List the families that have a Hugging Face format."""
    return [name for name, family in FAMILIES.items() if family.huggingface]


def family_by_type() -> dict[str, str]:
    """Map Hugging Face's model_type to our family."""
    return {model_type: family for family in families_with_format() for model_type in model_types_of(family)}


# ``config.json`` of a Hugging Face folder from our configuration, and back.
#
# ``huggingface.py`` of each family defines the fields.

_TOKENIZER = ("tokenizer_type", "tokenizer_path", "vocab_file", "merge_file")


def saved_config(state: Mapping[str, Any]) -> Config:
    """Restore the configuration in a checkpoint's ``state``: the sections that define the model, and the tokenizer.

    Raises:
        CheckpointError: ``state`` has no configuration, or its family is unknown.
    """
    try:
        saved, model_identity = former.convert_settings(state["config"]), state["model"]
        sections = ("model", saved["family"], "data")
        values = {key: value for name in sections for key, value in saved.get(name, {}).items()}
        values = {**former_defaults(state["config"], sections), **values}
        option_names = {option.name for _, option in all_options()}
        values = {key: value for key, value in values.items() if key in option_names}
        config = config_from_values(values, family=saved["family"])
        return replace(config, model=replace(config.model, vocab_size=model_identity["vocab_size"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint does not describe its model ({type(error).__name__}: {error}). Only checkpoints of "
            f"{', '.join(FAMILIES[family].title for family in families_with_format())} that the pretraining scripts "
            "have saved can be converted"
        ) from error


def config_to_huggingface(config: Config, dtype: str, model_type: str | None = None) -> dict[str, Any]:
    """Convert the configuration to the fields of ``config.json``, without ids of control tokens.

    Args:
        model_type: as in ``format_of``.

    Raises:
        CheckpointError: lists all settings of the model that the format cannot express.
    """
    return {**format_of(config, model_type).fields(config), "dtype": dtype}


def config_from_huggingface(hf_config: Mapping[str, Any]) -> Config:
    """Convert ``config.json`` to our configuration.

    Raises:
        CheckpointError: the architecture or a setting is not supported, a size is missing, or values are out of range
            (all of them are listed).
    """
    model_type, families = hf_config.get("model_type"), family_by_type()
    if model_type is None or model_type not in families:
        raise CheckpointError(
            f"model_type must be one of {', '.join(families)}, got {model_type!r}. This architecture is not supported"
        )
    try:
        (hf_format,) = (
            candidate for candidate in formats_of(families[model_type]) if model_type in candidate.model_types
        )
        values = _with_ints(hf_format.values(dict(hf_config)))
        problems = list(_range_problems(values))
        config = Config() if problems else config_from_values(values, family=families[model_type])
        problems = problems or list(model_problems(replace(config, explicit_fields=tuple(values))))
    except (LookupError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        missing = _missing_keys(hf_format, hf_config)
        causes = [f"{', '.join(missing)} missing"] if missing else []
        causes += _malformed_values(hf_config)
        raise CheckpointError(f"config.json does not describe a {model_type}: {'; '.join(causes) or error}") from error
    if problems:
        raise CheckpointError(f"config.json does not describe a supported {model_type}: {'; '.join(problems)}")
    return config


_SIZE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok",
    "moe_k", "n_group", "topk_group", "moe_intermediate_size", "moe_layer_interval", "no_rope_layer_interval",
    "sliding_window_pattern", "original_max_position_embeddings", "head_dim", "num_key_value_heads",
)  # fmt: skip
_COUNT_KEYS = ("first_k_dense_replace", "n_shared_experts", "moe_layer_start_index", "max_window_layers")
_NUMBER_KEYS = (
    "scale_emb", "scale_depth", "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier",
    "logit_scale", "routed_scaling_factor",
)  # fmt: skip
_NULLABLE_KEYS = {
    "n_group", "topk_group", "head_dim", "num_key_value_heads", "original_max_position_embeddings", "n_shared_experts",
    "scale_depth", "routed_scaling_factor",
}  # fmt: skip
_OBJECT_KEYS = ("rope_scaling", "rope_parameters")
_LIST_KEYS = ("layer_types", "mlp_layer_types", "no_rope_layers", "mlp_only_layers")


def _malformed_values(hf_config: Mapping[str, Any]) -> list[str]:
    """Describe each value of config.json that does not have the type of its key."""

    def is_integer(value: Any, lowest: int) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and float(value).is_integer() and value >= lowest

    checks: dict[str, tuple[str, Callable[[Any], bool]]] = {
        **dict.fromkeys(_SIZE_KEYS, ("a positive integer", lambda value: is_integer(value, 1))),
        **dict.fromkeys(_COUNT_KEYS, ("an integer of at least 0", lambda value: is_integer(value, 0))),
        **dict.fromkeys(_NUMBER_KEYS, ("a number", lambda value: isinstance(value, (int, float)))),
        **dict.fromkeys(_OBJECT_KEYS, ("an object or null", lambda value: value is None or isinstance(value, Mapping))),
        **dict.fromkeys(_LIST_KEYS, ("a list or null", lambda value: value is None or isinstance(value, list))),
    }
    return [
        f"{key} must be {expected}, got {hf_config[key]!r}"
        for key, (expected, is_valid) in checks.items()
        if key in hf_config and not is_valid(hf_config[key]) and not (hf_config[key] is None and key in _NULLABLE_KEYS)
    ]


def _missing_keys(hf_format: HFFormat, hf_config: Mapping[str, Any]) -> list[str]:
    """List the keys that config.json lacks and its model type requires."""
    completed = dict(hf_config)
    while True:
        try:
            hf_format.values(dict(completed))
        except KeyError as error:
            key = error.args[0]
            if key in completed:  # raised by a look-up other than of a key of config.json
                break
            completed[key] = 1
        except Exception:  # an error that the caller describes
            break
        else:
            break
    return [key for key in completed if key not in hf_config]


def _with_ints(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert integral floats such as 16.0 to int for integer fields."""
    int_fields = {option.name for _, option in all_options() if option.value_type == "int"}
    return {
        name: int(value) if name in int_fields and isinstance(value, float) and value.is_integer() else value
        for name, value in values.items()
    }


def _range_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Describe each value that its flag would reject."""
    for _, option in all_options():
        value = values.get(option.name)
        problem = option.problem(value, option.flag or option.name) if value is not None else None
        if problem and not is_derived(option, value):
            yield problem


def model_flags(config: Config) -> list[str]:
    """List the flags with which a pretraining script builds the model in ``config`` and loads its tokenizer."""
    tokenizer_fields = {name: getattr(config.data, name) for name in _TOKENIZER}
    extra_fields = {name: getattr(config.model, name) for name in ("max_position_embeddings", "layernorm_epsilon")}
    values = {**config.identity(), **extra_fields, **tokenizer_fields}
    if config.model.multi_latent_attention:
        del values["kv_hidden_size"]  # the sum of two other sizes
    return flag_words(values, config)


def flag_words(field_values: Mapping[str, Any], config: Config) -> list[str]:
    """List the flags for those fields in ``field_values`` that differ from the family's defaults."""
    defaults = {**config.family_config.DEFAULTS, "num_query_groups": config.model.num_attention_heads}
    words: list[str] = []
    for _, option in all_options():
        value = field_values.get(option.name)
        if value is not None and value != defaults.get(option.name, option.default):
            words += _option_words(option, value)
    return words


def _option_words(option: Option, value: Any) -> list[str]:
    """Format the command-line words that set ``option`` to ``value``."""
    if value is True and option.flag:
        return [option.flag]
    if isinstance(value, bool):
        return [flag for flag, constant in option.constants.items() if constant is value][:1]
    return [option.flag, str(value)]
