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
from tests.helpers.bert_samples import bert_model_args
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import VOCAB, small_model_args
from tests.helpers.t5_layouts import Case, build_engine, fill_weights, make_pipeline

SHAPE = (2, 12)


def make_pipelines(grid: Grid, chunk: int) -> list[tuple[Any, Any]]:
    """Return (stage of a model, a micro-batch) of each form that the output of a last layer has."""
    overrides = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "loss_chunk_tokens": chunk}
    case = Case(enc_layers=1, dec_layers=1, overrides=(("loss_chunk_tokens", chunk),), num_micro_batches=1)
    parallel, untied_args = ParallelContext(grid.tensor), {"untie_embeddings": True}
    gpt2 = random_batch(VOCAB, SHAPE, ["position_ids"])
    models: list[tuple[Any, Any]] = [
        (DecoderPipe(small_model_args(**overrides), parallel, grid.topology), gpt2),
        (DecoderPipe(small_model_args(**overrides, **untied_args), parallel, grid.topology), gpt2),
        (
            BertModelPipe(bert_model_args(**overrides), parallel, grid.topology),
            bert_batch(bert_model_args(), SHAPE, False),
        ),
    ]
    for model, _ in models:
        fill_weights(model.double())
    return [*models, (make_pipeline(case, grid, parallel.streams), case.make_batch(0))]


def run_outputs(rank: int) -> list[list[Any]]:
    """Return (loss, logits beside it, outputs without a loss) of each pipeline, in chunks and with whole logits."""
    grid = build_grid(Topology.from_world_size(dist.get_world_size(), 1, 2), rank)
    results: list[list[Any]] = []
    for chunk in (5, 0):
        results.append([])
        for model, batch in make_pipelines(grid, chunk):
            engine, _ = build_engine(model, grid, [batch])
            loss, logits = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
            (output_only,) = engine.eval_batch(
                iter([batch]), compute_loss=False, reduce_output=None, num_micro_batches=1
            ) or (None,)
            results[-1].append((loss, logits, output_only))
    return results


@functools.cache
def outputs_by_stage() -> list[list[list[Any]]]:
    return run_ranks(2, run_outputs)


@pytest.mark.parametrize("stage", [0, 1])
def test_eval_outputs_are_bitwise_equal_to_full_logits(stage: int) -> None:
    chunked, full = outputs_by_stage()[stage]
    for (loss, *actual_outputs), (expected_loss, *expected_outputs) in zip(chunked, full, strict=True):
        assert _loss_value(loss) == pytest.approx(_loss_value(expected_loss), rel=1e-13) and _loss_value(loss) != 0.0
        for actual, expected in zip(_flatten(actual_outputs), _flatten(expected_outputs), strict=True):
            assert (actual is expected is None) if stage == 0 else torch.equal(actual, expected)


def _loss_value(loss: Any) -> float:
    return float(loss["loss"] if isinstance(loss, dict) else loss)


def _flatten(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, (list, tuple)) else [value]
