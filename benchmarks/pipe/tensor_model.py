"""The model of the tensor-parallel case: the layers of ``megatron.models``, cut over a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.pipe.case import Case
from benchmarks.pipe.model import SEED, STD, Model
from megatron.models.common.model_args import ModelArgs, ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.models.common.pipeline import layer_specs
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import SINGLE


def make_tensor_model(case: Case, group: Any) -> Model:
    """Return the model over ``group`` (``megatron.mpu``'s; None for one process)."""
    place = ParallelContext(SINGLE if group is None else group)
    given = case.sizes
    sizes = ModelArgs(
        num_layers=given.num_layers,
        hidden_size=given.hidden_size,
        num_attention_heads=given.num_attention_heads,
        vocab_size=given.vocab_size,
        max_position_embeddings=given.seq_length,
        kv_hidden_size=given.hidden_size // given.num_attention_heads,
        ff_hidden_size=4 * given.hidden_size,
        activation="gelu-tanh",
        untie_embeddings=True,
    )

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = vocab_parallel_cross_entropy(
            logits, labels.t().contiguous(), vocab_size=sizes.vocab_size, group=place.group
        )
        return each.mean()

    def finish(module: nn.Module) -> None:
        initialize(module.named_parameters(), seed=SEED, rule=gpt2_rule(STD, sizes.num_layers))

    def inputs_of(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens, torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()

    return Model(layer_specs(sizes, place), loss_fn, finish, inputs_of)
