"""Small models of every family as their trainings build them, and a micro-batch for each, to be timed.

They are whole: embedding, layers, norm, head and loss, with the optimizer that keeps their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron import device, model
from megatron.config import Config, parse
from megatron.mpu.groups import SINGLE, Group
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from megatron.planner.lines import RECIPE

VOCABULARY = 6144
FLAGS: Mapping[str, str] = {
    "gpt2": "--activation gelu-tanh --max-position-embeddings {length}",
    "t5": "--activation relu",
    "bert": "--attention-dropout 0 --hidden-dropout 0",
}
"""Family -> what its models have beside the recipe; none drops anything."""
PARTS: Mapping[str, Mapping[str, str]] = {"t5": {"encoder": "encoder.layers", "decoder": "decoder.layers"}}
"""Family -> kind of unit -> where its layers lie, if not in one row."""
ROW = {"layer": "layers"}


@dataclass(frozen=True, order=True)
class Shape:
    """Width of the layers and of a head, tokens of a sample, samples of a micro-batch."""

    hidden: int
    head: int
    length: int
    samples: int


def config_of(family: str, dtype: str, shape: Shape) -> Config:
    """Return the configuration of a model of one layer (T5: one on each side)."""
    words = (
        f"--num-layers 1 --hidden-size {shape.hidden} --num-attention-heads {shape.hidden // shape.head} --{dtype} "
        f"--vocab-size {VOCABULARY} --batch-size {shape.samples} --dry-run "
        f"--{'enc-' * (family == 't5')}seq-length {shape.length} "
    )
    words += FLAGS.get(family, "").format(length=shape.length)
    config = parse([*RECIPE[family], *words.split()], world_size=1, env={}, family=family)
    return config.with_vocab(VOCABULARY)


def build(config: Config, place: torch.device, group: Group = SINGLE) -> torch.nn.Module:
    """Return the model with random weights, cut over the ranks of ``group``."""
    family, sizes, cut = config.family, config.model, model.Place(group)
    built: Any = {
        "gpt2": lambda: model.GPT2Model(model.sizes_from(sizes), cut),
        "t5": lambda: model.T5Model(model.t5_sizes_from(sizes, config.own), cut),
        "llama": lambda: model.LlamaModel(model.llama_sizes_from(sizes, config.own), cut),
        "mpt": lambda: model.MptModel(model.mpt_sizes_from(sizes, config.own), cut),
        "bert": lambda: model.BertModel(model.bert_sizes_from(sizes, config.own), cut),
    }[family]()
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

    if config.family == "t5":
        read, written = config.t5.enc_seq_length, config.t5.dec_seq_length
        tokens = {"enc_tokens": words(read), "dec_tokens": words(written)}
    else:
        read = written = config.batch.seq_length
        tokens = {"tokens": words(read)}
    if config.family in ("gpt2", "llama"):
        tokens["position_ids"] = torch.arange(read, device=place).repeat(samples, 1)
    if config.family == "bert":
        nothing = torch.zeros_like(tokens["tokens"])
        tokens |= {"token_types": nothing, "is_random": nothing[:, 0]}
        if config.bert.short_seq_prob > 0:  # samples are padded
            tokens["segments"] = nothing.int()
    ends = {"labels": words(written), "loss_mask": torch.ones(samples, written, device=place)}
    return tokens | ends


def loss_of(output: Any) -> torch.Tensor:
    """Return the sum of the losses that a model gives as (sum, count), or by name."""
    pairs = output.values() if isinstance(output, dict) else [output]
    total: torch.Tensor = sum(pair[0] for pair in pairs)
    return total


def rows_of(family: str) -> Mapping[str, str]:
    """Return kind of unit -> the attribute that holds its layers."""
    return PARTS.get(family, ROW)
