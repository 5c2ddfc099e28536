"""Dumps of models that are not as ours are: without the note on the loss, with a plain mean as loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.bert import pretrain_bert
from megatron.debug.dump_files import Writer, read, write_manifest
from megatron.debug.hooks import GRAD_INPUT, OUTPUT
from tests.debug.agreement import assert_agree
from tests.helpers import dumps

FACTS = {"layout": {"data": 2}, "family": "gpt2", "micro_batch_size": 1, "world_size": 2, "ranks": [], "dtype": "fp32"}


def unmarked(model: torch.nn.Module) -> None:
    """Leave out what a class says of its loss for the start table."""
    for kind in type(model).__mro__:
        if "loss_weighting" in vars(kind):
            del kind.loss_weighting  # type: ignore[attr-defined]


def of_means(model: Any) -> None:
    """Let the loss be the mean over a micro-batch, one number, in place of a pair (sum, count)."""
    unmarked(model)
    if getattr(model, "loss_fn", None) is not None:
        pair = model.loss_fn
        model.loss_fn = lambda *given: pair(*given).total / pair(*given).count
        return
    plain = model.forward

    def mean(*args: Any, **fields: Any) -> torch.Tensor:
        total, count = plain(*args, **fields)
        return total / count

    model.forward = mean


def test_two_replicas_agree_with_one_process_whatever_the_model_says_of_its_loss(tmp_path: Path) -> None:
    dumps.run(tmp_path / "one", gas=2, plant=unmarked, steps=1)
    dumps.run(tmp_path / "two", (1, 1, 2), gas=2, plant=unmarked, steps=1)
    assert_agree(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("plant", [unmarked, of_means], ids=lambda plant: plant.__name__)
def test_layouts_of_four_ranks_agree_with_one_process(plant: Any, layout: tuple[int, int, int], tmp_path: Path) -> None:
    dumps.run(tmp_path / "one", gas=2, plant=plant, steps=1)
    dumps.run(tmp_path / "four", layout, gas=4, plant=plant, steps=1)
    assert_agree(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1)], ids=str)
def test_bert_agrees_with_a_vocabulary_that_is_padded_and_other_micro_batches(
    layout: tuple[int, int, int], tmp_path: Path
) -> None:
    assert dumps.VOCAB % layout[0]
    dumps.run(tmp_path / "one", gas=2, script=pretrain_bert, steps=1)
    dumps.run(tmp_path / "other", layout, gas=4, script=pretrain_bert, steps=1)
    assert_agree(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("is_weighted, factor", [(True, 1.0), (False, 0.5)])
def test_what_the_last_stage_says_of_the_loss_holds_for_the_gradients_of_all_ranks(
    is_weighted: bool, factor: float, tmp_path: Path
) -> None:
    write_manifest(tmp_path, FACTS)
    for rank in (0, 1):
        writer = Writer(tmp_path, rank, with_tensors=True)
        writer.begin(1)
        if rank == 1:
            writer.note("loss", is_weighted=is_weighted)
        for what in (OUTPUT, GRAD_INPUT):
            writer.add(torch.full((1, 1), 8.0), "a", what)
        writer.close()
    dump = read(tmp_path)
    for record in dump.records:
        wanted = 8.0 * (factor if record.what == GRAD_INPUT else 1.0)
        assert record.statistics.norm == dump.tensor(record).item() == wanted
