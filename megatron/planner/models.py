"""Small models of every family as their trainings build them, and a micro-batch for each, to be timed.

They are whole: embedding, layers, norm, head and loss, with the optimizer that keeps their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron import device
from megatron.arguments import parse
from megatron.config import Config
from megatron.model import Place
from megatron.models.registry import FAMILIES, build_model, load
from megatron.mpu.groups import SINGLE, Group
from megatron.optim import MixedPrecisionOptimizer, build_optimizer

VOCABULARY = 6144


@dataclass(frozen=True, order=True)
class Shape:
    """Width of the layers and of a head, tokens of a sample, samples of a micro-batch."""

    hidden: int
    head: int
    length: int
    samples: int


def config_of(family: str, dtype: str, shape: Shape) -> Config:
    """Return the configuration of a model of one layer (T5: one on each side)."""
    known = FAMILIES[family]
    words = (
        f"--num-layers 1 --hidden-size {shape.hidden} --num-attention-heads {shape.hidden // shape.head} --{dtype} "
        f"--vocab-size {VOCABULARY} --batch-size {shape.samples} --dry-run "
        f"--{'enc-' * (known.kind == 'encoder-decoder')}seq-length {shape.length} "
    )
    words += known.benchmark_flags.format(length=shape.length)
    config = parse([*known.recipe, *words.split()], world_size=1, env={}, family=family)
    return config.with_vocab(VOCABULARY)


def build(config: Config, place: torch.device, group: Group = SINGLE) -> torch.nn.Module:
    """Return the model with random weights, cut over the ranks of ``group``."""
    built = build_model(config, Place(group))
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    module: torch.nn.Module = built.to(place)
    return module


def optimizer_of(module: torch.nn.Module, dtype: str) -> MixedPrecisionOptimizer:
    """Return an AdamW over the model's weights, which take ``dtype``."""
    return build_optimizer(module.parameters(), dtype=device.DTYPES[dtype], clip_grad=1.0)


def micro_batch(config: Config, place: torch.device) -> dict[str, torch.Tensor]:
    """Return what the model takes to give its loss: random tokens that fill their rows."""
    samples = config.batch.batch_size

    def words(length: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (samples, length), device=place)

    inputs: dict[str, torch.Tensor] = load(config.family, "model").example_inputs(config, words)
    written = config.loss_tokens_per_sample
    ends = {"labels": words(written), "loss_mask": torch.ones(samples, written, device=place)}
    return inputs | ends


def loss_of(output: Any) -> torch.Tensor:
    """Return the sum of the losses that a model gives as (sum, count), or by name."""
    pairs = output.values() if isinstance(output, dict) else [output]
    total: torch.Tensor = sum(pair[0] for pair in pairs)
    return total


def rows_of(family: str) -> Mapping[str, str]:
    """Return kind of unit -> the attribute that holds its layers."""
    return FAMILIES[family].layer_lists
