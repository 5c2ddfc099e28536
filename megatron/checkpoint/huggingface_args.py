"""Model sizes from a Hugging Face folder: config.json checked against the headers of the safetensors files."""

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
    copies,
    family_by_type,
    format_of,
    full_names,
    missing_file,
    missing_head,
    read_json,
    uses_index,
)
from megatron.checkpoint.settings_source import Source, require_family
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import NOTHING
from megatron.models.registry import costs_of


def read_huggingface(path: Path, family: str, model: str) -> Source:
    theirs, known = read_json(path, CONFIG), family_by_type()
    kind = theirs.get("model_type")
    if kind not in known:
        raise CheckpointError(
            f"{path / CONFIG}: model_type must be one of {', '.join(known)}, got {kind!r}. Its architecture is not here"
        )
    require_family(known[kind], family, f"{path / CONFIG}: model_type {kind}", model)
    if model and model not in (kind, known[kind]):
        raise CheckpointError(
            f"{path / CONFIG}: model_type {kind} is not --model {model}. Use --model {kind}, or name another folder"
        )
    try:
        config = config_from_huggingface(theirs)
    except CheckpointError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error
    tensors = read_headers(path)
    config = _with_biases(config, tensors)
    if not _fits(config, tensors):
        raise CheckpointError(_misfit(path, theirs, config, tensors))
    fields = {option.name for _, option in all_options()}
    return Source(path / CONFIG, config, fields)


@dataclass(frozen=True)
class Header:
    """Where a tensor lies: ``start`` and ``stop`` in bytes of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_headers(folder: Path) -> dict[str, Header]:
    """Return name -> header of every tensor of a Hugging Face folder; of the tensors themselves nothing is read.

    Raises:
        CheckpointError: a file is missing, cut off, no safetensors, or lacks what the index says.
    """
    if not uses_index(folder):
        return _header_of(folder, WEIGHTS)
    index = read_json(folder, INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(Path(str(name)).name == name for name in index.values()):
        raise CheckpointError(
            f"{folder / INDEX} is not an index of safetensors: weight_map must say which file of the folder has which "
            "tensor"
        )
    held = {name: _header_of(folder, name) for name in sorted(set(index.values()))}
    if missing := sorted(key for key, name in index.items() if key not in held[name]):
        raise CheckpointError(f"{folder}: the files lack what the index says they hold: {', '.join(missing)}")
    return {key: held[name][key] for key, name in index.items()}


def _header_of(folder: Path, name: str) -> dict[str, Header]:
    path = folder / name
    if not path.exists():
        raise missing_file(folder, name)
    try:
        with open(path, "rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if not 0 < length <= size - 8:
                raise ValueError("the file is shorter than its header")
            said = json.loads(file.read(length))
        found = {
            key: Header(path, one["dtype"], tuple(one["shape"]), *(8 + length + at for at in one["data_offsets"]))
            for key, one in said.items()
            if key != "__metadata__"
        }
        end = max((header.stop for header in found.values()), default=8 + length)
        if end != size:
            raise ValueError(f"it has {size} bytes, and {end} by its header")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _with_biases(config: Config, tensors: Mapping[str, Header]) -> Config:
    """Return ``config`` as it is, or with biases where it says that there are none and some are not zero."""
    biases = format_of(config).biases
    if config.model.hidden_bias or biases is NOTHING:
        return config
    names = full_names(tensors, config)
    has_biases = any(_is_set(tensors[name]) for full, name in names.items() if biases.fullmatch(full))
    return replace(config, model=replace(config.model, hidden_bias=has_biases))


def _is_set(header: Header) -> bool:
    """Tell whether a tensor has a number that is neither 0 nor -0."""
    with open(header.file, "rb") as file:
        file.seek(header.start)
        data = file.read(header.stop - header.start)
    width = max(len(data) // max(prod(header.shape), 1), 1)
    signs = data[width - 1 :: width]  # little-endian: the byte with the sign is the last of each number
    return bool(signs.strip(b"\0\x80")) or any(data[at::width].strip(b"\0") for at in range(width - 1))


def _fits(config: Config, tensors: Mapping[str, Header]) -> bool:
    """Tell whether names and numbers of the tensors are those of the model."""
    expected, found = _expected(config), _found(config, tensors)
    word = format_of(config).word
    if expected != found.keys() or len(found[word].shape) != 2:
        return False
    if found[word].shape != (config.model.vocab_size, config.model.hidden_size):
        return False
    whole = replace(config, model=replace(config.model, make_vocab_size_divisible_by=1))
    return bool(sum(prod(header.shape) for header in found.values()) == costs_of(whole).num_parameters)


def _expected(config: Config) -> set[str]:
    hf_format = format_of(config)
    return {name for recipe in hf_format.recipes(config).values() for name in recipe.names} - {*copies(config)}


def _found(config: Config, tensors: Mapping[str, Header]) -> dict[str, Header]:
    """Return the tensors that count by their full names: no copies, no biases that a model of ours lacks."""
    hf_format, expected = format_of(config), _expected(config)
    found = {full: tensors[name] for full, name in full_names(tensors, config).items()}
    if hf_format.ties_missing_head and hf_format.head in expected and hf_format.word in found:
        found.setdefault(hf_format.head, found[hf_format.word])
    redundant = copies(config)
    return {
        full: header
        for full, header in found.items()
        if full not in redundant and (full in expected or not hf_format.biases.fullmatch(full))
    }


def _misfit(path: Path, theirs: Mapping[str, Any], config: Config, tensors: Mapping[str, Header]) -> str:
    """Return what is told of a folder whose config.json is not of its tensors: the key that would mend it, or names."""
    mended = dict(_mended(theirs, config, tensors))
    if mended:
        got = ", ".join(f"{key} {theirs[key]}" for key in mended)
        fitting = " or ".join(f"{key} {other}" for key, other in mended.items())
        return (
            f"{path / CONFIG}: the sizes must be those of the tensors, got {got}, and the tensors are those of "
            f"{fitting}. Fetch the folder again, or correct the key"
        )
    expected, found = _expected(config), _found(config, tensors)
    problems = [f"{name}: missing" for name in sorted(expected - found.keys())]
    problems += [f"{name}: no such tensor in this model" for name in sorted(found.keys() - expected)]
    shapes = [f"{name} {list(header.shape)} in {header.file.name}" for name, header in found.items()]
    what = "; ".join(problems[:8] or [f"the shapes {', '.join(shapes[:8])}"])
    more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
    advice = missing_head(expected - found.keys(), config) or ". Fetch the folder again"
    return f"{path / CONFIG} does not describe the tensors of its folder: {what}{more}{advice}"


def _mended(theirs: Mapping[str, Any], config: Config, tensors: Mapping[str, Header]) -> Iterator[tuple[str, int]]:
    """Yield the keys of config.json of which another value alone makes it fit, and that value."""
    for key, value in theirs.items():
        if type(value) is not int or key.endswith("_id"):
            continue
        for other in sorted(_sizes_in(tensors, config) - {value}):
            try:
                is_it = _fits(_with_biases(config_from_huggingface({**theirs, key: other}), tensors), tensors)
            except CheckpointError:
                continue
            if is_it:
                yield key, other
                break


def _sizes_in(tensors: Mapping[str, Header], config: Config) -> set[int]:
    """Return the numbers that a size may be: lengths of tensors, of their parts by head, and numbers of layers."""
    lengths = {length for header in tensors.values() for length in header.shape}
    heads = {config.model.kv_hidden_size, config.model.num_attention_heads}
    parts = {length // head for length in lengths for head in heads if head and length % head == 0}
    layers: dict[str, int] = {}
    for name in tensors:
        words = name.split(".")
        number = next((at for at, word in enumerate(words) if word.isdecimal()), None)
        if number is not None:
            kind = ".".join(words[:number])
            layers[kind] = max(layers.get(kind, 0), int(words[number]) + 1)
    return lengths | parts | {*layers.values()}
