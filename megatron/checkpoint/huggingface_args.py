"""Read model settings from a Hugging Face folder; check config.json against the headers of the safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from megatron.arguments.flag_values import all_options
from megatron.checkpoint.huggingface.config import (
    CONFIG,
    INDEX,
    WEIGHTS,
    config_from_huggingface,
    copy_names,
    family_by_type,
    format_of,
    full_names,
    missing_file_error,
    missing_head_advice,
    read_json,
    uses_index,
    without_missing_mtp,
)
from megatron.checkpoint.settings_source import SettingsSource, check_family
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import MATCHES_NOTHING
from megatron.models.registry import costs_of


def read_huggingface(path: Path, family: str, model: str) -> SettingsSource:
    """Read the model settings in the Hugging Face folder ``path``.

    Args:
        family: family that the program trains.
        model: ``--model``; empty without the flag.

    Raises:
        CheckpointError: the model is unknown, it does not match ``family`` or ``model``, or its config.json does not
            describe its tensors.
    """
    hf_config, family_of_type = read_json(path, CONFIG), family_by_type()
    model_type = hf_config.get("model_type")
    if model_type not in family_of_type:
        raise CheckpointError(
            f"{path / CONFIG}: model_type must be one of {', '.join(family_of_type)}, got {model_type!r}. This "
            "architecture is not supported"
        )
    check_family(family_of_type[model_type], family, f"{path / CONFIG}: model_type {model_type}", model)
    if model and model not in (model_type, family_of_type[model_type]):
        raise CheckpointError(
            f"{path / CONFIG} has the model_type {model_type}, but --model is {model}. Use --model {model_type}, or "
            "choose another folder"
        )
    try:
        config = config_from_huggingface(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error
    tensors = read_headers(path)
    try:
        config = _with_biases(without_missing_mtp(tensors, config, model_type), tensors, model_type)
        is_fitting = _fits(config, tensors, model_type)
    except CheckpointError as error:
        raise CheckpointError(f"{path / CONFIG} does not describe a model that we support: {error}") from error
    if not is_fitting:
        raise CheckpointError(_mismatch_message(path, hf_config, config, tensors))
    fields = {option.name for _, option in all_options()}
    return SettingsSource(path / CONFIG, config, fields)


@dataclass(frozen=True)
class Header:
    """Location and type of a tensor: ``start`` and ``stop`` are byte offsets in ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_headers(folder: Path) -> dict[str, Header]:
    """Read name -> header for every tensor in a Hugging Face folder, without reading the tensors.

    Raises:
        CheckpointError: a file is missing, truncated, not a safetensors file, or lacks tensors that the index lists.
    """
    if not uses_index(folder):
        return _read_header(folder, WEIGHTS)
    index = read_json(folder, INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(Path(str(name)).name == name for name in index.values()):
        raise CheckpointError(
            f"{folder / INDEX} is not a safetensors index: weight_map must map each tensor to a file of the folder"
        )
    headers_of_file = {name: _read_header(folder, name) for name in sorted(set(index.values()))}
    if missing := sorted(key for key, name in index.items() if key not in headers_of_file[name]):
        raise CheckpointError(f"{folder}: the files lack tensors that the index lists: {', '.join(missing)}")
    return {key: headers_of_file[name][key] for key, name in index.items()}


def _read_header(folder: Path, name: str) -> dict[str, Header]:
    path = folder / name
    if not path.exists():
        raise missing_file_error(folder, name)
    try:
        with open(path, "rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if not 0 < length <= size - 8:
                raise ValueError("the file is shorter than its header")
            fields = json.loads(file.read(length))
        headers = {
            key: Header(
                path,
                tensor_fields["dtype"],
                tuple(tensor_fields["shape"]),
                *(8 + length + offset for offset in tensor_fields["data_offsets"]),
            )
            for key, tensor_fields in fields.items()
            if key != "__metadata__"
        }
        end = max((header.stop for header in headers.values()), default=8 + length)
        if end != size:
            raise ValueError(f"it has {size} bytes, but its header requires {end}")
        return headers
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _with_biases(config: Config, tensors: Mapping[str, Header], model_type: str) -> Config:
    """Return ``config`` with biases enabled if config.json disables them but the tensors include nonzero biases."""
    biases = format_of(config, model_type).optional_biases
    if config.model.hidden_bias or biases is MATCHES_NOTHING:
        return config
    names = full_names(tensors, config, model_type)
    has_biases = any(_has_nonzero(tensors[name]) for full, name in names.items() if biases.fullmatch(full))
    return replace(config, model=replace(config.model, hidden_bias=has_biases))


def _has_nonzero(header: Header) -> bool:
    """Check if a tensor has an element that is neither 0 nor -0."""
    with open(header.file, "rb") as file:
        file.seek(header.start)
        data = file.read(header.stop - header.start)
    width = max(len(data) // max(prod(header.shape), 1), 1)
    signs = data[width - 1 :: width]  # little-endian: the last byte of each number contains the sign
    return bool(signs.strip(b"\0\x80")) or any(data[offset::width].strip(b"\0") for offset in range(width - 1))


def _fits(config: Config, tensors: Mapping[str, Header], model_type: str) -> bool:
    """Return True if the tensors' names and element counts match the model in ``config``."""
    expected, headers = _expected_names(config, model_type), _used_headers(config, tensors, model_type)
    word_name = format_of(config, model_type).word
    if expected != headers.keys() or len(headers[word_name].shape) != 2:
        return False
    if headers[word_name].shape != (config.model.vocab_size, config.model.hidden_size):
        return False
    unpadded = replace(config, model=replace(config.model, make_vocab_size_divisible_by=1))
    return bool(sum(prod(header.shape) for header in headers.values()) == costs_of(unpadded).num_parameters)


def _expected_names(config: Config, model_type: str) -> set[str]:
    recipes = format_of(config, model_type).recipes(config)
    return {name for recipe in recipes.values() for name in recipe.hf_names} - {*copy_names(config, model_type)}


def _used_headers(config: Config, tensors: Mapping[str, Header], model_type: str) -> dict[str, Header]:
    """Select the headers of the tensors that our model uses, by full name.

    Copies of the word table, and biases that our model does not have, are left out. If the folder has no head and the
    format ties a missing head to the word table, the head gets the header of the word table.
    """
    hf_format, expected = format_of(config, model_type), _expected_names(config, model_type)
    by_full_name = {full: tensors[name] for full, name in full_names(tensors, config, model_type).items()}
    if hf_format.ties_missing_head and hf_format.head in expected and hf_format.word in by_full_name:
        by_full_name.setdefault(hf_format.head, by_full_name[hf_format.word])
    redundant = {*copy_names(config, model_type), *hf_format.constants(config)}
    return {
        full: header
        for full, header in by_full_name.items()
        if full not in redundant and (full in expected or not hf_format.optional_biases.fullmatch(full))
    }


def _mismatch_message(path: Path, hf_config: Mapping[str, Any], config: Config, tensors: Mapping[str, Header]) -> str:
    """Format the error message for a config.json that does not match its tensors.

    The message lists each key of config.json whose correction would be sufficient. Without such a key, it lists the
    missing and unexpected tensors.
    """
    fixes = dict(_find_fixes(hf_config, config, tensors))
    if fixes:
        current = ", ".join(f"{key} {hf_config[key]}" for key in fixes)
        suggestion = " or ".join(f"{key} {new_value}" for key, new_value in fixes.items())
        return (
            f"{path / CONFIG} does not match the tensors of its folder: it has {current}, but the tensors have "
            f"{suggestion}. Download the folder again, or correct config.json"
        )
    model_type = hf_config["model_type"]
    expected, headers = _expected_names(config, model_type), _used_headers(config, tensors, model_type)
    problems = [f"{name}: missing" for name in sorted(expected - headers.keys())]
    problems += [f"{name}: no such tensor in this model" for name in sorted(headers.keys() - expected)]
    shapes = [f"{name} {list(header.shape)} in {header.file.name}" for name, header in headers.items()]
    description = "; ".join(problems[:8] or [f"the shapes {', '.join(shapes[:8])}"])
    more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
    advice = missing_head_advice(expected - headers.keys(), config, model_type) or ". Download the folder again"
    return f"{path / CONFIG} does not match the tensors of its folder: {description}{more}{advice}"


def _find_fixes(
    hf_config: Mapping[str, Any], config: Config, tensors: Mapping[str, Header]
) -> Iterator[tuple[str, int]]:
    """Yield (key, value) pairs such that changing only this key in config.json makes it match the tensors."""
    model_type = hf_config["model_type"]
    for key, value in hf_config.items():
        if type(value) is not int or key.endswith("_id"):
            continue
        for candidate in sorted(_candidate_values(tensors, config) - {value}):
            try:
                changed = config_from_huggingface({**hf_config, key: candidate})
                changed = without_missing_mtp(tensors, changed, model_type)
                is_match = _fits(_with_biases(changed, tensors, model_type), tensors, model_type)
            except CheckpointError:
                continue
            if is_match:
                yield key, candidate
                break


def _candidate_values(tensors: Mapping[str, Header], config: Config) -> set[int]:
    """Collect candidates for a setting's value: dimension lengths, lengths per head, and layer counts."""
    lengths = {length for header in tensors.values() for length in header.shape}
    heads = {config.model.kv_hidden_size, config.model.num_attention_heads}
    lengths_per_head = {length // head for length in lengths for head in heads if head and length % head == 0}
    num_layers_by_prefix: dict[str, int] = {}
    for name in tensors:
        components = name.split(".")
        idx = next((position for position, component in enumerate(components) if component.isdecimal()), None)
        if idx is not None:
            layer_prefix = ".".join(components[:idx])
            num_layers_by_prefix[layer_prefix] = max(
                num_layers_by_prefix.get(layer_prefix, 0), int(components[idx]) + 1
            )
    return lengths | lengths_per_head | {*num_layers_by_prefix.values()}
