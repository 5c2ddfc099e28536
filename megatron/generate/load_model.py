"""Loading a model for generation from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.checkpoint import Checkpoint, TensorRecord, named_parameters
from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.huggingface.config import saved_config
from megatron.checkpoint.huggingface.tokenizer import has_tokenizer, tokenizer_config_fields
from megatron.checkpoint.huggingface.weights import Pretrained
from megatron.checkpoint.one_process import WEIGHTS, open_folder
from megatron.config import Config
from megatron.config.layer_types import layer_types
from megatron.errors import CheckpointError, ConfigError
from megatron.models import registry
from megatron.models.common.experts import stack_expert_weights
from megatron.models.common.generation import ModelStage, generation_layers
from megatron.models.common.language_model import Head
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.t5.config import t5_units
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import RelativeBias, T5DecoderLayer, T5Embedding, T5EncoderLayer, make_final_norm
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.shard import shard_of
from tds.partition import partition_balanced

# The units of a stage, as a module with the parameter names of the full model.


class WordEmbedding(nn.Module):
    """The word table without positions, for a tied head on a different stage from the embedding."""

    def __init__(self, args: ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            args.vocab_size, args.hidden_size, divisible_by=args.make_vocab_size_divisible_by, group=parallel.group
        )


class StageModel(nn.Module):
    """The modules of a stage; layers are named by their index in the full model.

    Attributes:
        units: the modules by unit index.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, unit_range: range) -> None:
        super().__init__()
        self.units: dict[int, nn.Module] = {}
        self.biases: dict[int, nn.Module | None] = {}
        if isinstance(args, T5ModelArgs):
            self._build_t5(args, parallel, unit_range)
        else:
            self._build_decoder(args, parallel, unit_range)

    def _build_decoder(self, args: ModelArgs, parallel: ParallelContext, unit_range: range) -> None:
        norm, layer_types = args.num_layers + 1, generation_layers(args.family)
        self._add_tables(args, parallel, unit_range, embeddings=(0,), head=norm + 1)
        layers = {
            unit_idx: layer_types.layer(args, parallel, unit_idx - 1) for unit_idx in unit_range if 0 < unit_idx < norm
        }
        self.layers = nn.ModuleDict({str(unit_idx - 1): layer for unit_idx, layer in layers.items()})
        self.units.update(layers)
        if norm in unit_range:
            self.final_norm = self.units[norm] = layer_types.norm(args)

    def _build_t5(self, args: T5ModelArgs, parallel: ParallelContext, unit_range: range) -> None:
        units = t5_units(args.enc_layers, args.dec_layers)
        embeddings = (units.enc_embedding, units.dec_embedding)
        self._add_tables(args, parallel, unit_range, embeddings=embeddings, head=units.head)
        local = [n for n in units.enc_layers if n in unit_range]
        encoder = {n: T5EncoderLayer(args, parallel, units.enc_layers.index(n)) for n in local}
        local = [n for n in units.dec_layers if n in unit_range]
        decoder = {n: T5DecoderLayer(args, parallel, args.enc_layers + units.dec_layers.index(n)) for n in local}
        self.encoder = self._build_side(
            args, parallel, "encoder", units.enc_layers, encoder, units.enc_norm in unit_range
        )
        self.decoder = self._build_side(
            args, parallel, "decoder", units.dec_layers, decoder, units.dec_norm in unit_range
        )

    def _build_side(
        self,
        args: T5ModelArgs,
        parallel: ParallelContext,
        name: str,
        unit_range: range,
        layers: Mapping[int, nn.Module],
        has_norm: bool,
    ) -> nn.Module:
        side = nn.Module()
        side.layers = nn.ModuleDict({str(unit_range.index(n)): layer for n, layer in layers.items()})
        bias = RelativeBias(args, parallel, name == "encoder") if args.is_relative and layers else None
        side.add_module("bias", bias)
        self.units.update(layers)
        self.biases.update(dict.fromkeys(layers, bias))
        if has_norm:
            side.final_norm = self.units[unit_range.stop] = make_final_norm(args, parallel, name)
        return side

    def _add_tables(
        self, args: ModelArgs, parallel: ParallelContext, unit_range: range, *, embeddings: tuple[int, ...], head: int
    ) -> None:
        """Add the embedding and the head; a tied head on the same stage shares the embedding's table."""
        local_embeddings = [n for n in embeddings if n in unit_range]
        has_head = head in unit_range
        tied_heads = [head] if has_head and not args.untie_embeddings else []
        if local_embeddings or tied_heads:
            is_t5 = isinstance(args, T5ModelArgs)
            embedding_class: Any = T5Embedding if is_t5 else generation_layers(args.family).embedding
            table_class = embedding_class if local_embeddings else WordEmbedding
            self.embedding = table_class(args, parallel)
            self.units.update(dict.fromkeys((*local_embeddings, *tied_heads), self.embedding))
        if has_head and not tied_heads:
            self.head = self.units[head] = Head(args, parallel)


def stage_bounds(args: ModelArgs, num_stages: int) -> list[int]:
    """Split the model's units (embedding, layers, norm, head) into stages; return the stage bounds as unit indices.

    The stages are balanced by the weights that they read per token. A T5 decoder layer costs a third more than an
    encoder layer, and a layer with one half costs half as much as others. Embeddings and norms cost nothing, because a
    token reads one row of them. The head costs its full table.

    Raises:
        ValueError: fewer layers than stages.
    """
    head = args.vocab_size / (12 * args.hidden_size)
    if isinstance(args, T5ModelArgs):
        costs = [0.0, *[1.0] * args.enc_layers, 0.0, 0.0, *[4 / 3] * args.dec_layers, 0.0, head]
        num_layers = args.enc_layers + args.dec_layers
    else:
        costs = [0.0, *[layer_type.num_halves / 2 for layer_type in layer_types(args)], 0.0, head]
        num_layers = args.num_layers
    if num_stages > num_layers:
        raise ValueError(
            f"--pipe-parallel-size must be at most the {num_layers} layers of the model, got {num_stages}. Lower it"
        )
    return partition_balanced(costs, num_stages)


def build_stage(
    args: ModelArgs, parallel: ParallelContext, pipe: Group, *, dtype: torch.dtype, device: torch.device
) -> ModelStage:
    """Build this rank's part of a model with zero weights, directly in ``dtype`` and on ``device``.

    Raises:
        ValueError: the sizes cannot be sharded this way.
    """
    bounds = stage_bounds(args, pipe.size)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = StageModel(args, parallel, range(bounds[pipe.rank], bounds[pipe.rank + 1]))
    finally:
        torch.set_default_dtype(default_dtype)
    stages = [stage for stage in range(pipe.size) for _ in range(bounds[stage], bounds[stage + 1])]
    return ModelStage(module.eval(), args, parallel, module.units, stages, pipe, module.biases)


# Loading checkpoints of any layout into any layout.

GENERATIVE_TYPES = ("decoder", "encoder-decoder")
"""Model types that generate text."""


def open_model(path: Path, stack: ExitStack, world: Group = SINGLE) -> tuple[Checkpoint | Pretrained, Config]:
    """Open a model and return (checkpoint, configuration of the model and, if present, its tokenizer). Collective.

    Args:
        path: a run folder (its newest checkpoint), a checkpoint, or a Hugging Face folder.
        stack: closes a Hugging Face folder on exit.

    Raises:
        CheckpointError: the path contains no model that this package can load, or the model is damaged.
    """
    if not weights.is_huggingface_folder(path):
        checkpoint = open_folder(path, world)
        return checkpoint, saved_config(checkpoint.metadata)
    pretrained = weights.open_pretrained(path, stack)
    config = pretrained.config
    if has_tokenizer(path):
        config = replace(config, data=replace(config.data, **tokenizer_config_fields(path, path)))
    return pretrained, config


def load(
    checkpoint: Checkpoint | Pretrained,
    config: Config,
    *,
    tensor: Group = SINGLE,
    pipe: Group = SINGLE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ModelStage:
    """Load this rank's part of the model in ``checkpoint``; other parts are not read.

    Args:
        checkpoint: a checkpoint or a Hugging Face folder.
        config: the model's configuration, from ``open_model``.
        tensor, pipe: groups over which the model is sharded and split, independent of the saved layout.
        dtype: dtype of weights and activations.

    Raises:
        ConfigError: the model cannot be sharded this way; raised on every rank.
        CheckpointError: tensors are missing or have other shapes.
    """
    args = _model_args(config)
    try:
        stage = build_stage(args, ParallelContext(tensor), pipe, dtype=dtype, device=torch.device(device))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parameters = named_parameters(stage.module)
    records = [TensorRecord(WEIGHTS + name, parameter, shard_of(parameter)) for name, parameter in parameters]
    if isinstance(checkpoint, Checkpoint):
        _check_all_weights_used(checkpoint, config)
    with torch.no_grad():
        checkpoint.load(records)
    stack_expert_weights(stage.module)
    return stage


def _model_args(config: Config) -> ModelArgs:
    """Return the arguments of the model of ``config`` without dropout and with minimal padding.

    Raises:
        ConfigError: models of this family do not generate text.
    """
    family = registry.FAMILIES[config.family]
    if family.model_type not in GENERATIVE_TYPES:
        raise ConfigError(
            f"a {family.title} does not generate text. Load one of {registry.family_titles(*GENERATIVE_TYPES)}"
        )
    model = replace(config.model, make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0)
    args: ModelArgs = registry.model_parts(config.family).args(replace(config, model=model))
    return args


def _check_all_weights_used(checkpoint: Checkpoint, config: Config) -> None:
    """Check that the model uses all weights of the checkpoint; otherwise it would be a different model.

    Raises:
        CheckpointError: the checkpoint has weights that its configuration does not describe.
    """
    full_model = build_stage(
        _model_args(config), ParallelContext(), SINGLE, dtype=torch.float32, device=torch.device("meta")
    )
    known = {name for name, _ in named_parameters(full_model.module)}
    unused = [name for name in checkpoint.names() if name.startswith(WEIGHTS) and name[len(WEIGHTS) :] not in known]
    if unused:
        programs = ", ".join(
            family.command for family in registry.FAMILIES.values() if family.model_type in GENERATIVE_TYPES
        )
        raise CheckpointError(
            f"{checkpoint.path} contains weights that its configuration does not describe: "
            f"{', '.join(sorted(unused))}. It may be a model of a custom script; only models of {programs} are "
            "supported"
        )
