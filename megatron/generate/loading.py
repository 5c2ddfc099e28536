"""A model that generates, from a checkpoint of any layout in any layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.checkpoint import Checkpoint, TensorRecord, named_parameters
from megatron.checkpoint.whole import WEIGHTS
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError
from megatron.generate.part import Part
from megatron.generate.stage_model import build
from megatron.model.sizes import Place, Sizes
from megatron.models import registry
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import shard_of

WRITES = ("decoder", "encoder-decoder")
"""Kinds of families that write text."""


def load(
    checkpoint: Checkpoint,
    config: Config,
    *,
    tensor: Group = SINGLE,
    pipe: Group = SINGLE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Part:
    """Return this rank's part of the model in ``checkpoint``, of which it reads just that part.

    Args:
        config: the model's, as ``settings.saved_config`` finds it in the checkpoint.
        tensor, pipe: the groups over which it is cut; nothing of how it was saved matters.
        dtype: of weights and activations.

    Raises:
        ConfigError: the model cannot be cut so; the same on every rank.
        CheckpointError: tensors are missing or have other shapes.
    """
    sizes = _sizes(config)
    try:
        part = build(sizes, Place(tensor), pipe, dtype=dtype, device=torch.device(device))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parameters = named_parameters(part.module)
    records = [TensorRecord(WEIGHTS + name, parameter, shard_of(parameter)) for name, parameter in parameters]
    _refuse_others(checkpoint, config)
    checkpoint.load(records)
    return part


def _sizes(config: Config) -> Sizes:
    """Return the sizes of ``config`` without dropout and without more padding than the cut needs.

    Raises:
        ConfigError: models of this family do not generate.
    """
    family = registry.FAMILIES[config.family]
    if family.kind not in WRITES:
        raise ConfigError(f"a {family.title} does not write text. Load one of {registry.titles(*WRITES)}")
    model = replace(config.model, make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0)
    sizes: Sizes = registry.load(config.family, "model").model_args(replace(config, model=model))
    return sizes


def _refuse_others(checkpoint: Checkpoint, config: Config) -> None:
    """Check that no weight would be left unread: the model would be another one."""
    whole = build(_sizes(config), Place(), SINGLE, dtype=torch.float32, device=torch.device("meta"))
    own = {name for name, _ in named_parameters(whole.module)}
    others = [name for name in checkpoint.names() if name.startswith(WEIGHTS) and name[len(WEIGHTS) :] not in own]
    if others:
        programs = ", ".join(family.program for family in registry.FAMILIES.values() if family.kind in WRITES)
        raise CheckpointError(
            f"{checkpoint.path} holds weights that its configuration does not tell of: {', '.join(sorted(others))}. Is "
            f"it a model of a script of its own? Only those of {programs} generate text here"
        )
