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
from tests.helpers.model_samples import worst_relative_error
from tests.helpers.t5_layouts import Result, ShardedTensors, build_engine, train_one_batch
from tests.helpers.whole import fill_shard
from tests.models.t5.test_against_huggingface import (
    ALLOWED,
    DTYPES,
    HEADS,
    VOCAB,
    make_batch,
    make_reference,
    reference_loss,
)

CASES = [(dtype, variant) for dtype in ("fp64", "fp32") for variant in ("T5", "T5 v1.1", "mT5")]
QUICK_CASES = [("fp64", "T5"), ("fp64", "T5 v1.1"), ("fp32", "mT5")]
QUICK_LAYOUTS = [(2, 2)]
LAYOUTS = [
    pytest.param(tensor, pipe, marks=() if (tensor, pipe) in QUICK_LAYOUTS else pytest.mark.slow)
    for tensor in (1, 2, 4)
    for pipe in (1, 2, 3, 4)
    if tensor * pipe <= 4
]


@functools.cache
def reference(dtype: str, variant: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, float, Any]:
    """Return configuration, weights, logits, loss and gradients under Hugging Face's names."""
    model = make_reference(dtype, variant, "eager" if variant == "mT5" else "sdpa")
    logits, loss = reference_loss(model, 0)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return model.config, model.state_dict(), logits.detach(), loss.item(), gradients


def _single_row_batches() -> list[Any]:
    """Return the micro-batches of one row that make up the batch, which has padding on both sides."""
    enc, dec, labels, enc_real, dec_real = make_batch(0)
    inputs = (enc, dec, enc_real.int() - 1, dec_real.int() - 1)
    rows = range(len(enc))
    return [(tuple(x[i : i + 1] for x in inputs), (labels[i : i + 1], dec_real[i : i + 1].float())) for i in rows]


def _run_model(
    rank: int, tensor: int, pipe: int, cases: list[tuple[str, str]]
) -> list[tuple[list[torch.Tensor | None], Result]]:
    """Return for each kind each row's logits [s_d, 1, v/t], None but on the last stage, and what training gives."""
    grid = build_grid(Topology.from_world_size(dist.get_world_size(), tensor, pipe), rank)
    results, rows = [], _single_row_batches()
    for case in cases:
        engine, toy = build_engine(_make_model(case, grid), grid, rows)
        logits = [engine.eval_batch(iter([row]), return_logits=True, num_micro_batches=1)[1] for row in rows]
        results.append((logits, train_one_batch(engine, toy, rows)))
    return results


def _make_model(case: tuple[str, str], grid: Grid) -> T5ModelPipe:
    """Return this rank's part of our model with Hugging Face's weights."""
    config, hf_weights, *_ = reference(*case)
    args = T5ModelArgs(**model_fields(config))
    ctx = ParallelContext(grid.tensor, DropoutStreams(5, grid.data, grid.tensor))
    module = T5ModelPipe(args, ctx, grid.topology, partition="uniform", has_segments=True).to(DTYPES[case[0]])
    weights = to_ours(hf_weights, HEADS, is_untied=args.untie_embeddings)
    for name, parameter in named_parameters(module):
        set_shard(parameter, shard_of(parameter))
        fill_shard(parameter, weights[name])
    return module


def _join_ranks(ranks: list[ShardedTensors]) -> dict[str, torch.Tensor]:
    """Return the global tensors that the parts of all stages and tensor ranks make up."""
    slices_by_name: dict[str, dict[int, tuple[Shard, torch.Tensor]]] = {}
    for rank_tensors in ranks:
        for name, (shard, local_tensor) in rank_tensors.items():
            slices_by_name.setdefault(name, {})[shard.start] = (shard, local_tensor)
    return {name: _join_slices([slices[start] for start in sorted(slices)]) for name, slices in slices_by_name.items()}


def _join_slices(slices: list[tuple[Shard, torch.Tensor]]) -> torch.Tensor:
    dim = slices[0][0].partition_dim
    return slices[0][1] if dim is None else torch.cat([local_tensor for _, local_tensor in slices], dim)


@pytest.mark.slow  # two tensor ranks equal Hugging Face's in tests/models/t5/test_against_huggingface.py
@pytest.mark.parametrize(("tensor", "pipe"), LAYOUTS)
def test_logits_loss_and_gradients_match_huggingface(tensor: int, pipe: int, pytestconfig: pytest.Config) -> None:
    """The short run has a few kinds."""
    cases = CASES if pytestconfig.getoption("--all") else QUICK_CASES
    for case in cases:
        reference(*case)  # ahead of the fork, once for all
    is_real = make_batch(0)[4]
    for case, *ranks in zip(cases, *run_ranks(tensor * pipe, _run_model, tensor, pipe, cases), strict=True):
        _, _, expected, loss, gradients = reference(*case)
        rows = [torch.cat(shards, dim=-1) for shards in zip(*(r for r, _ in ranks if r[0] is not None), strict=True)]
        logits = torch.cat(rows, dim=1)[..., :VOCAB].transpose(0, 1)
        actual = from_ours(_join_ranks([shards for _, (_, shards, _) in ranks]), HEADS)
        worst, worst_name = worst_relative_error({name: actual[name] for name in gradients}, gradients)
        observed = [((logits - expected)[is_real].abs().max() / expected[is_real].abs().max()).item()]
        observed += [max(abs(result[0] - loss) / loss for _, result in ranks), worst]
        print(f"t={tensor} p={pipe} {case}: {[f'{v:.1e}' for v in observed]} of {ALLOWED[case[0]]} ({worst_name})")
        for quantity, value, tolerance in zip(("logits", "loss", worst_name), observed, ALLOWED[case[0]], strict=False):
            assert value <= tolerance, (case, quantity)
