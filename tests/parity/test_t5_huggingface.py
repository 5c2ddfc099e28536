"""Hugging Face's T5 with the same weights: logits, loss and gradients, cut over any tensor and pipeline ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint import named_parameters
from megatron.models import T5ModelPipe
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.t5.huggingface import from_ours, model_fields, to_ours
from megatron.models.t5.layers import T5ModelArgs
from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import worst_relative
from tests.helpers.t5_layouts import Parts, Result, build, train_on
from tests.helpers.whole import fill
from tests.models.t5.test_against_huggingface import (
    ALLOWED,
    DTYPES,
    HEADS,
    VOCAB,
    batch_of,
    make_reference,
    reference_loss,
)

KINDS = [(dtype, variant) for dtype in ("fp64", "fp32") for variant in ("T5", "T5 v1.1", "mT5")]
FEW = [("fp64", "T5"), ("fp64", "T5 v1.1"), ("fp32", "mT5")]
SHORT = [(2, 2)]
EVERY = [pytest.param(t, p, marks=() if (t, p) in SHORT else pytest.mark.slow) for t in (1, 2, 4) for p in (1, 2, 3, 4)
         if t * p <= 4]  # fmt: skip


@functools.cache
def reference(dtype: str, variant: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, float, Any]:
    """Return configuration, weights, logits, loss and gradients under Hugging Face's names."""
    model = make_reference(dtype, variant, "eager" if variant == "mT5" else "sdpa")
    logits, loss = reference_loss(model, 0)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return model.config, model.state_dict(), logits.detach(), loss.item(), gradients


def _rows() -> list[Any]:
    """Return the micro-batches of one row that make up the batch, which has padding on both sides."""
    enc, dec, labels, enc_real, dec_real = batch_of(0)
    inputs = (enc, dec, enc_real.int() - 1, dec_real.int() - 1)
    rows = range(len(enc))
    return [(tuple(x[i : i + 1] for x in inputs), (labels[i : i + 1], dec_real[i : i + 1].float())) for i in rows]


def _ours(
    rank: int, tensor: int, pipe: int, kinds: list[tuple[str, str]]
) -> list[tuple[list[torch.Tensor | None], Result]]:
    """Return for each kind each row's logits [s_d, 1, v/t], None but on the last stage, and what training gives."""
    grid = build_grid(Topology.of_world(dist.get_world_size(), tensor, pipe), rank)
    results, rows = [], _rows()
    for kind in kinds:
        engine, toy = build(_filled(kind, grid), grid, rows)
        logits = [engine.eval_batch(iter([row]), return_logits=True, num_micro_batches=1)[1] for row in rows]
        results.append((logits, train_on(engine, toy, rows)))
    return results


def _filled(kind: tuple[str, str], grid: Grid) -> T5ModelPipe:
    """Return this rank's part of our model with Hugging Face's weights."""
    config, before, *_ = reference(*kind)
    sizes = T5ModelArgs(**model_fields(config))
    place = ParallelContext(grid.tensor, DropoutStreams(5, grid.data, grid.tensor))
    module = T5ModelPipe(sizes, place, grid.topology, partition="uniform", has_segments=True).to(DTYPES[kind[0]])
    weights = to_ours(before, HEADS, is_untied=sizes.untie_embeddings)
    for name, parameter in named_parameters(module):
        set_shard(parameter, shard_of(parameter))
        fill(parameter, weights[name])
    return module


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


@pytest.mark.slow  # two tensor ranks equal Hugging Face's in tests/models/t5/test_against_huggingface.py
@pytest.mark.parametrize(("tensor", "pipe"), EVERY)
def test_the_same_weights_give_the_same_logits_loss_and_gradients(
    tensor: int, pipe: int, pytestconfig: pytest.Config
) -> None:
    """The short run has a few kinds."""
    kinds = KINDS if pytestconfig.getoption("--all") else FEW
    for kind in kinds:
        reference(*kind)  # ahead of the fork, once for all
    real = batch_of(0)[4]
    for kind, *ranks in zip(kinds, *run_ranks(tensor * pipe, _ours, tensor, pipe, kinds), strict=True):
        _, _, wanted, loss, gradients = reference(*kind)
        rows = [torch.cat(parts, dim=-1) for parts in zip(*(r for r, _ in ranks if r[0] is not None), strict=True)]
        logits = torch.cat(rows, dim=1)[..., :VOCAB].transpose(0, 1)
        found = from_ours(_whole([parts for _, (_, parts, _) in ranks]), HEADS)
        worst, where = worst_relative({name: found[name] for name in gradients}, gradients)
        observed = [((logits - wanted)[real].abs().max() / wanted[real].abs().max()).item()]
        observed += [max(abs(result[0] - loss) / loss for _, result in ranks), worst]
        print(f"t={tensor} p={pipe} {kind}: {[f'{v:.1e}' for v in observed]} of {ALLOWED[kind[0]]} ({where})")
        for what, value, allowed in zip(("logits", "loss", where), observed, ALLOWED[kind[0]], strict=False):
            assert value <= allowed, (kind, what)
