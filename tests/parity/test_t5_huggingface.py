"""Hugging Face's T5 with the same weights: loss and every gradient, cut over any tensor and pipeline ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint import named_parameters
from megatron.checkpoint.hf.t5 import from_ours, model_fields, to_ours
from megatron.model.sizes import Place, T5Sizes
from megatron.mpu.groups import build_grid
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import Shard
from megatron.mpu.topology import Topology
from megatron.pipe import T5ModelPipe
from tests.harness import run_ranks
from tests.model.samples import worst_relative
from tests.model.test_t5_against_huggingface import HEADS, batch_of, make_reference, reference_loss
from tests.mpu.whole import fill
from tests.parity.t5_layouts import Parts, Result, train_pipe

VARIANTS = ("T5", "T5 v1.1", "mT5")
SHORT = [(2, 2)]
EVERY = [pytest.param(t, p, marks=() if (t, p) in SHORT else pytest.mark.slow) for t in (1, 2, 4) for p in (1, 2, 3, 4)
         if t * p <= 4]  # fmt: skip


@functools.cache
def reference(variant: str) -> tuple[Any, dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Return configuration, weights, loss and gradients under Hugging Face's names."""
    model = make_reference("fp64", variant, "eager" if variant == "mT5" else "sdpa")
    loss = reference_loss(model, 0)[1]
    loss.backward()
    return model.config, model.state_dict(), loss.item(), {name: p.grad for name, p in model.named_parameters()}


def _rows() -> list[Any]:
    """Return the micro-batches of one row that make up the batch, which has padding on both sides."""
    enc, dec, labels, enc_real, dec_real = batch_of(0)
    inputs = (enc, dec, enc_real.int() - 1, dec_real.int() - 1)
    rows = range(len(enc))
    return [(tuple(x[i : i + 1] for x in inputs), (labels[i : i + 1], dec_real[i : i + 1].float())) for i in rows]


def _ours(rank: int, tensor: int, pipe: int) -> list[Result]:
    grid = build_grid(Topology.of_world(dist.get_world_size(), tensor, pipe), rank)
    results = []
    for variant in VARIANTS:
        config, before, *_ = reference(variant)
        sizes = T5Sizes(**model_fields(config))
        place = Place(grid.tensor, DropoutStreams(5, grid.data, grid.tensor))
        module = T5ModelPipe(sizes, place, grid.topology, partition="uniform", has_segments=True).double()
        weights = to_ours(before, HEADS, is_untied=sizes.untie_embeddings)
        for name, parameter in named_parameters(module):
            parameter.shard = getattr(parameter, "shard", Shard(tuple(parameter.shape)))  # type: ignore[attr-defined]
            fill(parameter, weights[name])
        results.append(train_pipe(module, grid, _rows()))
    return results


def _whole(ranks: list[Parts]) -> dict[str, torch.Tensor]:
    """Return the global tensors that the parts of all stages and tensor ranks make up."""
    pieces: dict[str, dict[int, tuple[Shard, torch.Tensor]]] = {}
    for parts in ranks:
        for name, (shard, part) in parts.items():
            pieces.setdefault(name, {})[shard.start] = (shard, part)
    return {name: _joined([found[start] for start in sorted(found)]) for name, found in pieces.items()}


def _joined(found: list[tuple[Shard, torch.Tensor]]) -> torch.Tensor:
    dim = found[0][0].partition_dim
    return found[0][1] if dim is None else torch.cat([part for _, part in found], dim)


@pytest.mark.parametrize(("tensor", "pipe"), EVERY)
def test_the_same_weights_give_the_same_loss_and_gradients(tensor: int, pipe: int) -> None:
    for variant in VARIANTS:
        reference(variant)  # ahead of the fork, once for all
    for variant, *ranks in zip(VARIANTS, *run_ranks(tensor * pipe, _ours, tensor, pipe), strict=True):
        _, _, loss, gradients = reference(variant)
        found = from_ours(_whole([parts for _, parts, _ in ranks]), HEADS)
        worst, where = worst_relative({name: found[name] for name in gradients}, gradients)
        apart = max(abs(each[0] - loss) / loss for each in ranks)
        print(f"t={tensor} p={pipe} {variant}: loss {apart:.1e} of 1e-12, gradient {worst:.1e} of 1e-11 ({where})")
        assert apart <= 1e-12
        assert worst <= 1e-11, where
