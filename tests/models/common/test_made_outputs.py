"""Who asks an evaluation for outputs gets logits, though the loss of the same pipeline has made them in chunks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.models import BertModelPipe, DecoderPipe
from megatron.models.bert.pipeline import random_batch as bert_batch
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.pipeline import random_batch
from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.topology import Topology
from tests.helpers.bert_samples import bert_sizes
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import VOCAB, small_sizes
from tests.helpers.t5_layouts import Case, build, fill, make_pipe

SHAPE = (2, 12)


def pipelines(grid: Grid, chunk: int) -> list[tuple[Any, Any]]:
    """Return (stage of a model, a micro-batch) of each form that the output of a last layer has."""
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "loss_chunk_tokens": chunk}
    case = Case(enc_layers=1, dec_layers=1, sizes=(("loss_chunk_tokens", chunk),), micro_batches=1)
    place, untied = ParallelContext(grid.tensor), {"untie_embeddings": True}
    gpt2 = random_batch(VOCAB, SHAPE, ["position_ids"])
    models: list[tuple[Any, Any]] = [
        (DecoderPipe(small_sizes(**off), place, grid.topology), gpt2),
        (DecoderPipe(small_sizes(**off, **untied), place, grid.topology), gpt2),
        (BertModelPipe(bert_sizes(**off), place, grid.topology), bert_batch(bert_sizes(), SHAPE, False)),
    ]
    for model, _ in models:
        fill(model.double())
    return [*models, (make_pipe(case, grid, place.streams), case.batch(0))]


def outputs(rank: int) -> list[list[Any]]:
    """Return (loss, logits beside it, outputs without a loss) of each pipeline, in chunks and with whole logits."""
    grid = build_grid(Topology.of_world(dist.get_world_size(), 1, 2), rank)
    found: list[list[Any]] = []
    for chunk in (5, 0):
        found.append([])
        for model, batch in pipelines(grid, chunk):
            engine, _ = build(model, grid, [batch])
            loss, beside = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
            (alone,) = engine.eval_batch(
                iter([batch]), compute_loss=False, reduce_output=None, num_micro_batches=1
            ) or (None,)
            found[-1].append((loss, beside, alone))
    return found


@functools.cache
def outputs_of_stages() -> list[list[list[Any]]]:
    return run_ranks(2, outputs)


@pytest.mark.parametrize("stage", [0, 1])
def test_outputs_are_logits_to_the_bit(stage: int) -> None:
    chunked, whole = outputs_of_stages()[stage]
    for (loss, *one), (wanted, *two) in zip(chunked, whole, strict=True):
        assert _number(loss) == pytest.approx(_number(wanted), rel=1e-13) and _number(loss) != 0.0
        for seen, expected in zip(_flat(one), _flat(two), strict=True):
            assert (seen is expected is None) if stage == 0 else torch.equal(seen, expected)


def _number(loss: Any) -> float:
    return float(loss["loss"] if isinstance(loss, dict) else loss)


def _flat(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, (list, tuple)) else [value]
