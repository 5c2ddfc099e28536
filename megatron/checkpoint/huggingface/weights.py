"""Convert all weights between our names and Hugging Face's; read slices directly into a rank's shards."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import (
    config_from_huggingface,
    copy_names,
    drops_mtp,
    format_of,
    full_names,
    missing_head_advice,
    model_flags,
    without_missing_mtp,
)
from megatron.checkpoint.model_match import check_model
from megatron.checkpoint.resized_vocab import fill_resized, is_resized
from megatron.checkpoint.tensor_record import TensorRecord, shard_shape
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models import registry
from megatron.models.common.huggingface import MATCHES_NOTHING, Tensors, WeightMapping, read_into
from megatron.models.common.huggingface_mtp import PREFIX
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import named_parameters
from megatron.models.common.stacked_rows import Readable
from megatron.mpu.shard import Shard

# All tensors of a model, with our names or Hugging Face's, checked against the tensors that the model must have.

_BLOCK_ROWS = 4096
_MAX_ROUNDING_ERROR = 2.0**-6
"""Bound for the relative rounding error of constants in 16-bit formats; 1e-6 is subnormal in fp16."""


Named = TypeVar("Named", bound=Readable)


def build_model(config: Config) -> torch.nn.Module:
    """Build the model described by ``config``, unsharded and without dropout; its weights are not initialized."""
    model = replace(config.model, make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0)
    try:
        return registry.build_model(replace(config, model=model), ParallelContext())
    except ValueError as error:
        raise CheckpointError(f"the settings do not define a valid model: {error}") from error


def weights_to_huggingface(
    weights: Mapping[str, torch.Tensor], config: Config, model_type: str | None = None
) -> Tensors:
    """Convert our ``weights`` to a Hugging Face file's tensors, without copies of a tied table.

    Multi-token prediction layers are left out if the format has no names for them (``drops_mtp``).

    Args:
        model_type: the file's model type, as in ``format_of``.

    Raises:
        CheckpointError: lists every weight that is missing, unknown, or has another shape than ``config`` defines.
    """
    check_weights("the checkpoint", weights, config)
    hf_tensors = _weights_to_huggingface(weights, config, model_type)
    copies = format_of(config, model_type).copies(config)
    return {**hf_tensors, **{name: hf_tensors[original].clone() for name, original in copies.items()}}


def weights_from_huggingface(
    tensors: Mapping[str, torch.Tensor], config: Config, model_type: str | None = None
) -> Tensors:
    """Convert a Hugging Face file's ``tensors`` to our weights.

    Args:
        model_type: the file's model type, as in ``format_of``.

    Raises:
        CheckpointError: lists every tensor that is missing, unknown, or has another shape than ``config`` defines; or a
            copy of the word table differs from it.
    """
    hf_tensors = check_tensors(tensors, config, model_type)
    weights, expected = format_of(config, model_type).to_ours(hf_tensors, config), expected_weights(config)
    return {name: tensor for name, tensor in weights.items() if name in expected}


def check_tensors(tensors: Mapping[str, Named], config: Config, model_type: str | None = None) -> dict[str, Named]:
    """Check a Hugging Face folder's ``tensors`` against the model; return them by full name, without copies.

    Args:
        model_type: the folder's model type, as in ``format_of``.

    Raises:
        CheckpointError: as ``weights_from_huggingface``.
    """
    hf_format, hf_tensors = format_of(config, model_type), _by_full_name(tensors, config, model_type)
    expected = _weights_to_huggingface(expected_weights(config), config, model_type)
    expected = {name: tensor for name, tensor in expected.items() if name not in hf_format.constants(config)}
    if hf_format.ties_missing_head and hf_format.head in expected and hf_format.word in hf_tensors:
        hf_tensors.setdefault(hf_format.head, hf_tensors[hf_format.word])
    _check_shapes(
        "the Hugging Face folder",
        hf_tensors,
        expected,
        missing_head_advice(expected.keys() - hf_tensors.keys(), config, model_type),
    )
    return hf_tensors


def check_weights(subject: str, weights: Mapping[str, torch.Tensor], config: Config) -> None:
    """Check that ``weights`` are exactly our weights of the model in ``config``.

    Args:
        subject: subject of the error message, such as "the checkpoint".

    Raises:
        CheckpointError: lists every weight that is missing, unknown, or has another shape.
    """
    _check_shapes(subject, weights, expected_weights(config))


def without_zero_biases(tensors: Mapping[str, Readable], config: Config, model_type: str | None = None) -> Config:
    """Return ``config`` with biases enabled if config.json disables them but the tensors include nonzero biases."""
    biases = format_of(config, model_type).optional_biases
    if config.model.hidden_bias or biases is MATCHES_NOTHING:
        return config
    by_full_name = _by_full_name(tensors, config, model_type)
    has_biases = any(bool(tensor[:].any()) for name, tensor in by_full_name.items() if biases.fullmatch(name))
    return replace(config, model=replace(config.model, hidden_bias=has_biases))


def _check_constant(name: str, tensor: Readable, value: float) -> None:
    """Check that the tensor ``name`` is the scalar ``value``, perhaps rounded to 16 bits.

    Raises:
        CheckpointError: it has another value.
    """
    actual = tensor[...]
    if not (actual.double() - value).abs().max() <= _MAX_ROUNDING_ERROR * abs(value):
        raise CheckpointError(f"{name} must be {value}, got {actual.tolist()}. Other values are not supported")


def _by_full_name(tensors: Mapping[str, Named], config: Config, model_type: str | None = None) -> dict[str, Named]:
    """Rename ``tensors`` to full names, without copies of word table and head and without unused tensors."""
    hf_format = format_of(config, model_type)
    by_full_name: dict[str, Any] = {}
    for full, name in full_names(tensors, config, model_type).items():
        parts = hf_format.unpack(full, tensors[name].shape)
        by_full_name |= {part: rows.of(tensors[name]) for part, rows in parts.items()} or {full: tensors[name]}
    for name, value in hf_format.constants(config).items():
        constant = by_full_name.pop(name, None)
        if constant is not None:
            _check_constant(name, constant, value)
    mtp_copies = hf_format.copies(config)
    for name, original in copy_names(config, model_type).items():
        copy = by_full_name.pop(name, None)
        if copy is not None and not _equal(copy, by_full_name.setdefault(original, copy)):
            reason = (
                "the multi-token prediction layers share it"
                if name in mtp_copies
                else "config.json ties them (tie_word_embeddings)"
            )
            raise CheckpointError(f"{name} must equal {original}, because {reason}, but their values differ")
    return by_full_name


def _equal(first: Readable, second: Readable) -> bool:
    """Return True if two tables have the same values. They are compared block by block to limit memory.

    Tables of different types are compared in the type with fewer bits, since a copy may have been rounded.
    """
    return tuple(first.shape) == tuple(second.shape) and all(
        _same_values(first[start : start + _BLOCK_ROWS], second[start : start + _BLOCK_ROWS])
        for start in range(0, first.shape[0], _BLOCK_ROWS)
    )


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype == second.dtype:
        return torch.equal(first, second)
    if first.element_size() == second.element_size():  # bf16 and fp16
        return torch.equal(first.float(), second.float())
    coarse_dtype = min(first, second, key=torch.Tensor.element_size).dtype
    return torch.equal(first.to(coarse_dtype), second.to(coarse_dtype))


def expected_weights(config: Config) -> Tensors:
    """Create our weights as meta tensors."""
    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in named_parameters(build_model(config))}


def _weights_to_huggingface(
    weights: Mapping[str, torch.Tensor], config: Config, model_type: str | None = None
) -> Tensors:
    has_names = not drops_mtp(config, model_type)
    named_weights = {name: weight for name, weight in weights.items() if has_names or not name.startswith(PREFIX)}
    hf_tensors, copies = format_of(config, model_type).from_ours(named_weights, config), copy_names(config, model_type)
    return {name: tensor for name, tensor in hf_tensors.items() if name not in copies}


def _check_shapes(
    subject: str, tensors: Mapping[str, Any], expected: Mapping[str, torch.Tensor], advice: str = ""
) -> None:
    problems = [f"{name}: missing" for name in expected if name not in tensors]
    problems += [f"{name}: no such tensor in this model" for name in tensors if name not in expected]
    problems += [
        f"{name}: {list(tensors[name].shape)}, but the model needs {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(tensor.shape)
    ]
    if problems:
        listed = "; ".join(problems)
        raise CheckpointError(f"{subject} does not match this model ({len(problems)} tensors): {listed}{advice}")


# Weights of a Hugging Face folder read directly into a rank's shards, for any layout.
#
# A rank opens the files and reads the blocks of rows or columns that its shards consist of. It needs memory for its
# shards, plus a copy of one shard at a time. Nothing is written. ``megatron.checkpoint.resized_vocab`` handles a
# changed vocabulary size.


def is_huggingface_folder(source: Path) -> bool:
    """Return True for a Hugging Face folder, even if its model is not supported."""
    if not (source / folder.CONFIG).is_file():
        return False
    return folder.read_json(source, folder.CONFIG).get("model_type") is not None


@dataclass(frozen=True)
class Pretrained:
    """An open Hugging Face folder.

    Args:
        config: our configuration for its model, with its vocabulary size.
        shapes: our weight's name -> its full shape.
        recipes: our weight's name -> its conversion from Hugging Face's tensors.
        slices: Hugging Face's tensors by name; each can be read in slices.
    """

    path: Path
    config: Config
    shapes: Mapping[str, tuple[int, ...]]
    recipes: Mapping[str, WeightMapping]
    slices: Mapping[str, folder.Slice]

    def check_fits(self, config: Config) -> None:
        """Check that the folder's weights fit the run's model, given the run's --resize-vocab and --finetune.

        Raises:
            CheckpointError: names the differences, and the flags that fit.
        """
        saved_vocab_size = self.config.model.vocab_size
        try:
            check_model(self.config.identity(), config)
        except CheckpointError as error:
            has_other_vocab = saved_vocab_size != config.model.vocab_size and not config.checkpoint.resize_vocab
            remedy = ", or --resize-vocab for the vocabulary size" if has_other_vocab else ""
            raise CheckpointError(f"{error} {self.path} requires these flags: {self.flags}{remedy}") from None

    @property
    def flags(self) -> str:
        """Flags with which a pretraining script builds this model."""
        return shlex.join(model_flags(self.config))

    def load(self, records: Iterable[TensorRecord]) -> None:
        """Fill the tensors of ``records``, which must be records of weights.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        for record in records:
            name = record.name.removeprefix("weights/")
            if name.startswith(PREFIX) and name not in self.shapes:
                continue  # new layers start from their initial weights
            target = record.shard.unpadded(record.tensor)
            try:
                self._fill(target, name, record.shard)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error

    def _fill(self, target: torch.Tensor, name: str, shard: Shard) -> None:
        saved_shape = self.shapes[name]
        if is_resized(saved_shape, shard.global_shape):
            fill_resized(target, shard, saved_shape, lambda row_shard: self.read(name, row_shard))
        elif target.numel():
            self._read_into(target, name, shard)

    def read(self, name: str, shard: Shard) -> torch.Tensor:
        """Read the slice ``shard`` of our weight ``name``."""
        result = torch.empty(shard_shape(shard), dtype=self.slices[self.recipes[name].hf_names[0]].dtype)
        self._read_into(result, name, shard)
        return result

    def _read_into(self, target: torch.Tensor, name: str, shard: Shard) -> None:
        recipe = self.recipes[name]
        shapes = {hf_name: list(self.slices[hf_name].shape) for hf_name in recipe.hf_names}
        read_into(target, recipe, self.slices, shapes, shard)


def open_pretrained(source: Path, stack: ExitStack) -> Pretrained:
    """Open the Hugging Face folder ``source``; it stays open as long as ``stack``.

    Raises:
        CheckpointError: ``source`` is not a Hugging Face folder of a supported model, or its tensors do not match its
            ``config.json``.
    """
    hf_config = folder.read_json(source, folder.CONFIG)
    config, model_type = config_from_huggingface(hf_config), hf_config["model_type"]
    slices = folder.open_slices(source, stack)
    config = without_zero_biases(slices, without_missing_mtp(slices, config, model_type), model_type)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected_weights(config).items()}
    recipes = format_of(config, model_type).recipes(config)
    return Pretrained(source, config, shapes, recipes, check_tensors(slices, config, model_type))
