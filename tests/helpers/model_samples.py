"""Small GPT-2 models with known weights, on any number of tensor ranks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import Shard, shard_of

VOCAB, SEQ, BATCH = 101, 12, 3  # 101 is a prime, so that every tensor size needs padding
SMALL = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": SEQ, "kv_hidden_size": 4, "ff_hidden_size": 64,
}  # fmt: skip

Parts = dict[str, tuple[Shard, torch.Tensor]]


def small_sizes(**changes: Any) -> ModelArgs:
    """Return the args of the small model, with ``changes``."""
    return ModelArgs(**{**SMALL, **changes})


def place_of(group: Group, **streams: Any) -> ParallelContext:
    """Return the parallel context of a rank of this tensor group."""
    return ParallelContext(group, DropoutStreams(5, tensor=group, **streams))


def whole_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random global values of the parameter ``name``, also for norms and biases."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) + (name.endswith("norm.weight"))


def filled(model: DecoderModel) -> DecoderModel:
    """Fill ``model`` with its shards of the known weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = shard_of(parameter)
            shard.unpadded(parameter).copy_(shard.cut(whole_weight(name, shard.global_shape)))
    return model


@dataclass
class Batch:
    """Arguments of ``DecoderModel.forward``."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    segment_ids: torch.Tensor | None = None


def batch_of(*, with_documents: bool = False, seed: int = 0) -> Batch:
    """Return random tokens; with documents, positions restart in each and some tokens are masked."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    batch = Batch(text[:, :-1], positions, text[:, 1:], torch.ones(BATCH, SEQ))
    if with_documents:
        starts = torch.rand(BATCH, SEQ, generator=generator) < 0.25
        starts[:, 0] = True
        batch.segment_ids = starts.long().cumsum(dim=1)
        batch.position_ids = positions - torch.where(starts, positions, 0).cummax(dim=1).values
        batch.loss_mask = (torch.rand(BATCH, SEQ, generator=generator) < 0.7).float()
    return batch


def gradients_of(model: torch.nn.Module) -> Parts:
    """Return (shard, gradient) of each parameter by name, padding included."""
    return {name: (shard_of(p), p.grad) for name, p in model.named_parameters() if p.requires_grad}


def joined(ranks: list[Parts]) -> dict[str, torch.Tensor]:
    """Join the shards of all ranks to global tensors; check that replicated tensors are equal on all ranks."""
    whole = {}
    for name, (shard, first) in ranks[0].items():
        assert all(parts[name][1] is not None for parts in ranks), f"{name} has no gradient"
        if not shard.is_partitioned:
            assert all((parts[name][1] - first).abs().max() <= 1e-12 * first.abs().max() for parts in ranks), name
            whole[name] = first
            continue
        pieces = [parts[name][0].unpadded(parts[name][1]) for parts in ranks]
        whole[name] = torch.cat(pieces, dim=shard.partition_dim)
    return whole


def worst_relative(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error over all names, and its name.

    The relative error is ||found - wanted|| / max(||wanted||, 1e-6 x the norm of all wanted tensors).
    """
    assert sorted(found) == sorted(wanted)
    floor = 1e-6 * torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
    return max(
        (((found[n] - expected).norm() / max(expected.norm(), floor)).item(), n) for n, expected in wanted.items()
    )
