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

ShardedTensors = dict[str, tuple[Shard, torch.Tensor]]


def small_model_args(**overrides: Any) -> ModelArgs:
    """Return the args of the small model, with ``overrides``."""
    return ModelArgs(**{**SMALL, **overrides})


def make_parallel_context(group: Group, **streams: Any) -> ParallelContext:
    """Return the parallel context of a rank of this tensor group."""
    return ParallelContext(group, DropoutStreams(5, tensor=group, **streams))


def make_full_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random global values of the parameter ``name``, also for norms, biases and sinks, which are about 3."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    mean = 3.0 if name.endswith("sinks.weight") else float(name.endswith("norm.weight"))
    return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) + mean


def fill_weights(model: DecoderModel) -> DecoderModel:
    """Fill ``model`` with its shards of the known weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = shard_of(parameter)
            shard.unpadded(parameter).copy_(shard.narrow(make_full_weight(name, shard.global_shape)))
    return model


@dataclass
class Batch:
    """Arguments of ``DecoderModel.forward``."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    segment_ids: torch.Tensor | None = None


def make_batch(*, with_documents: bool = False, seed: int = 0) -> Batch:
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


def get_sharded_grads(model: torch.nn.Module) -> ShardedTensors:
    """Return (shard, gradient) of each parameter by name, padding included."""
    return {name: (shard_of(p), p.grad) for name, p in model.named_parameters() if p.requires_grad}


def join_shards(ranks: list[ShardedTensors]) -> dict[str, torch.Tensor]:
    """Join the shards of all ranks to global tensors; check that replicated tensors are equal on all ranks."""
    full_tensors = {}
    for name, (shard, first_tensor) in ranks[0].items():
        assert all(rank_tensors[name][1] is not None for rank_tensors in ranks), f"{name} has no gradient"
        if not shard.is_partitioned:
            assert all(
                (rank_tensors[name][1] - first_tensor).abs().max() <= 1e-12 * first_tensor.abs().max()
                for rank_tensors in ranks
            ), name
            full_tensors[name] = first_tensor
            continue
        shards = [rank_tensors[name][0].unpadded(rank_tensors[name][1]) for rank_tensors in ranks]
        full_tensors[name] = torch.cat(shards, dim=shard.partition_dim)
    return full_tensors


def worst_relative_error(actual: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error over all names, and its name.

    The relative error is ||found - wanted|| / max(||wanted||, 1e-6 x the norm of all wanted tensors).
    """
    assert sorted(actual) == sorted(reference)
    floor = 1e-6 * torch.stack([tensor.norm() for tensor in reference.values()]).norm()
    return max(
        (((actual[name] - expected).norm() / max(expected.norm(), floor)).item(), name)
        for name, expected in reference.items()
    )
