"""Dumps of models that are not as ours are: without the note on the loss, with a plain mean as loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.bert import pretrain_bert
from megatron.debug.dump_files import DumpWriter, read_dump, write_manifest
from megatron.debug.hooks import GRAD_INPUT, OUTPUT
from tests.debug.agreement import assert_dumps_agree
from tests.helpers import dumps

MANIFEST = {
    "layout": {"data": 2},
    "family": "gpt2",
    "micro_batch_size": 1,
    "world_size": 2,
    "ranks": [],
    "dtype": "fp32",
}


def remove_loss_weighting(model: torch.nn.Module) -> None:
    """Leave out what a class says of its loss for the start table."""
    for model_class in type(model).__mro__:
        if "loss_weighting" in vars(model_class):
            del model_class.loss_weighting  # type: ignore[attr-defined]


def use_mean_loss(model: Any) -> None:
    """Let the loss be the mean over a micro-batch, one number, in place of a pair (sum, count)."""
    remove_loss_weighting(model)
    if getattr(model, "loss_fn", None) is not None:
        original_loss = model.loss_fn
        model.loss_fn = lambda *args: original_loss(*args).total / original_loss(*args).count
        return
    original_forward = model.forward

    def mean_loss(*args: Any, **fields: Any) -> torch.Tensor:
        total, count = original_forward(*args, **fields)
        return total / count

    model.forward = mean_loss


def test_two_replicas_agree_with_single_process_for_unmarked_loss(tmp_path: Path) -> None:
    dumps.train_with_dumps(tmp_path / "one", gas=2, inject_fault=remove_loss_weighting, steps=1)
    dumps.train_with_dumps(tmp_path / "two", (1, 1, 2), gas=2, inject_fault=remove_loss_weighting, steps=1)
    assert_dumps_agree(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("plant", [remove_loss_weighting, use_mean_loss], ids=lambda plant: plant.__name__)
def test_four_rank_layouts_agree_with_single_process(plant: Any, layout: tuple[int, int, int], tmp_path: Path) -> None:
    dumps.train_with_dumps(tmp_path / "one", gas=2, inject_fault=plant, steps=1)
    dumps.train_with_dumps(tmp_path / "four", layout, gas=4, inject_fault=plant, steps=1)
    assert_dumps_agree(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1)], ids=str)
def test_bert_agrees_with_padded_vocabulary_and_other_micro_batches(
    layout: tuple[int, int, int], tmp_path: Path
) -> None:
    assert dumps.VOCAB % layout[0]
    dumps.train_with_dumps(tmp_path / "one", gas=2, script=pretrain_bert, steps=1)
    dumps.train_with_dumps(tmp_path / "other", layout, gas=4, script=pretrain_bert, steps=1)
    assert_dumps_agree(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("is_weighted, factor", [(True, 1.0), (False, 0.5)])
def test_loss_weighting_of_last_stage_applies_to_all_gradients(
    is_weighted: bool, factor: float, tmp_path: Path
) -> None:
    write_manifest(tmp_path, MANIFEST)
    for rank in (0, 1):
        writer = DumpWriter(tmp_path, rank, with_tensors=True)
        writer.begin(1)
        if rank == 1:
            writer.note("loss", is_weighted=is_weighted)
        for tensor_type in (OUTPUT, GRAD_INPUT):
            writer.add(torch.full((1, 1), 8.0), "a", tensor_type)
        writer.close()
    dump = read_dump(tmp_path)
    for record in dump.records:
        expected = 8.0 * (factor if record.what == GRAD_INPUT else 1.0)
        assert record.statistics.norm == dump.tensor(record).item() == expected
