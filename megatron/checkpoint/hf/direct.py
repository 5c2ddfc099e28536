"""Weights of a Hugging Face folder read straight into the parts that a rank holds, whatever the layout.

A rank opens the files, reads the blocks of rows or columns that its parts are made of, and holds no more than its parts
and one of them once more. Nothing is written. ``megatron.checkpoint.resize`` has the rule for a vocabulary of another
size.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from megatron.checkpoint.compare import check_model
from megatron.checkpoint.hf import folder as hf_folder
from megatron.checkpoint.hf import settings, tensors
from megatron.checkpoint.hf.forms import form_of
from megatron.checkpoint.hf.recipes import Recipe, read_into
from megatron.checkpoint.records import TensorRecord, part_shape
from megatron.checkpoint.resize import fill, is_resized
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard


def is_folder(source: Path) -> bool:
    """Tell whether ``source`` is a Hugging Face folder, of a model that we have or of another one."""
    if not (source / hf_folder.CONFIG).is_file():
        return False
    return hf_folder.read_json(source, hf_folder.CONFIG).get("model_type") is not None


@dataclass(frozen=True)
class Pretrained:
    """An open Hugging Face folder.

    Args:
        config: our configuration of its model, with its vocabulary.
        shapes, recipes: of our weights of this model.
        slices: their tensors, to be read in parts.
    """

    path: Path
    config: Config
    shapes: Mapping[str, tuple[int, ...]]
    recipes: Mapping[str, Recipe]
    slices: Mapping[str, hf_folder.Slice]

    def check_fits(self, config: Config) -> None:
        """Check that the folder's weights fit the run's model, as closely as its flags ask for.

        Raises:
            CheckpointError: naming what differs, with the flags that fit.
        """
        saved = self.config.model.vocab_size
        try:
            check_model(self.config.identity(), config)
        except CheckpointError as error:
            is_other = saved != config.model.vocab_size and not config.checkpoint.resize_vocab
            told = ", or --resize-vocab for the vocabulary" if is_other else ""
            raise CheckpointError(f"{error} {self.path} needs these flags: {self.flags}{told}") from None

    @property
    def flags(self) -> str:
        """The flags with which a pretraining script builds this model."""
        return shlex.join(settings.flags(self.config))

    def load(self, records: Iterable[TensorRecord]) -> None:
        """Fill the tensors of ``records``, whose names are those of weights.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        for record in records:
            name = record.name.removeprefix("weights/")
            target = record.shard.unpadded(record.tensor)
            try:
                self._fill(target, name, record.shard)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error

    def _fill(self, target: torch.Tensor, name: str, shard: Shard) -> None:
        saved = self.shapes[name]
        if is_resized(saved, shard.global_shape):
            fill(target, shard, saved, lambda part: self.read(name, part))
        elif target.numel():
            self._read_into(target, name, shard)

    def read(self, name: str, shard: Shard) -> torch.Tensor:
        """Return the part ``shard`` of our weight ``name``."""
        part = torch.empty(part_shape(shard), dtype=self.slices[self.recipes[name].names[0]].dtype)
        self._read_into(part, name, shard)
        return part

    def _read_into(self, target: torch.Tensor, name: str, shard: Shard) -> None:
        recipe = self.recipes[name]
        shapes = {part: list(self.slices[part].shape) for part in recipe.names}
        read_into(target, recipe, self.slices, shapes, shard)


def opened(source: Path, stack: ExitStack) -> Pretrained:
    """Return the folder ``source``, open as long as ``stack`` is.

    Raises:
        CheckpointError: it is no Hugging Face folder of a model that we have, or its tensors are not those that its
            ``config.json`` asks for.
    """
    config = settings.to_ours(hf_folder.read_json(source, hf_folder.CONFIG))
    held = hf_folder.open_slices(source, stack)
    config = tensors.without_zero_biases(held, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.own(config).items()}
    recipes = form_of(config.family).recipes(config)
    return Pretrained(source, config, shapes, recipes, tensors.checked(held, config))
