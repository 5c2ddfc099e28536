"""What the first stage takes, and sequence lengths that grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from torch.utils._pytree import tree_map

import tds
from tds.device import to_device
from tds.engine.micro_batches import stage_inputs
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, check_equal, make_engine, train_batch

CPU = torch.device("cpu")


def test_stage_inputs_copies_nested_structures() -> None:
    x, ids = torch.ones(2), torch.arange(2)
    inputs = [{"x": x, "more": (ids, [x])}, ids]
    got = stage_inputs(inputs, CPU, needs_grad=True)
    assert isinstance(got, tuple) and isinstance(got[0]["more"][1], tuple)
    assert got[0]["x"].requires_grad and not got[1].requires_grad
    got[0]["x"].data.zero_()
    got[1].zero_()
    assert x.sum() == 2 and ids.sum() == 1
    with pytest.raises(TypeError, match="tuples, lists or dicts of them, got str"):
        stage_inputs(("text",), CPU, needs_grad=False)


class _Named(NamedTuple):
    x: torch.Tensor
    more: Any


def test_namedtuple_type_is_preserved() -> None:
    inputs = _Named(torch.ones(2), [_Named(torch.zeros(1), ())])
    for got in (stage_inputs(inputs, CPU, needs_grad=False), to_device(inputs, CPU)):
        assert type(got) is _Named and type(got.more) is tuple and type(got.more[0]) is _Named
        assert torch.equal(got.x, inputs.x) and torch.equal(got.more[0].x, inputs.more[0].x)


SCHEDULE = {
    "min_difficulty": 2,
    "max_difficulty": 4,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 1},
}


class _ShortSequences(Toy):
    """A toy whose sequences are cut to ``length`` as a program's batch function would."""

    length = 4

    def make_batch(self, idx: int, num_rows: int | None = None) -> tuple[Any, Any]:
        x, (target, mask) = super().make_batch(idx, num_rows)
        return x[:, : self.length], (target[:, : self.length], mask[:, : self.length])


def _train_with_curriculum(rank: int, toy: Toy) -> list[Any]:
    engine = make_engine(toy, 2)
    scheduler = CurriculumScheduler(SCHEDULE)
    length = [0]
    engine.set_batch_fn(lambda batch: tree_map(lambda t: t[:, : length[0]], batch))
    results = []
    for step in (1, 2, 3):
        length[0] = scheduler.update_difficulty(step)
        engine.reset_activation_shape()
        results.append((length[0], train_batch(engine, toy)))
    return results


def test_sequence_length_follows_deepspeed_curriculum() -> None:
    toy = Toy("many", num_micro_batches=2)
    ranks = run_ranks(2, _train_with_curriculum, toy)
    assert [length for length, _ in ranks[0]] == [2, 3, 4]
    for index, (length, _) in enumerate(ranks[0]):
        short = _ShortSequences("many", num_micro_batches=2)
        short.length = length
        check_equal([results[index][1] for results in ranks], short, tolerance=1e-12)


class _RowDataset(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((4, 6), float(index))
        return x, x


def _train_with_data_efficiency(rank: int, folder: Path, num_stages: int) -> Any:
    metric = {
        "index_to_sample_path": "none", "index_to_metric_path": "none", "difficulty_type": "value",
        "clustering_type": "single_cluster", **SCHEDULE,
    }  # fmt: skip
    learning = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": {"seqlen": metric}}
    sampling = {"enabled": True, "num_workers": 0, "curriculum_learning": learning}
    config = {"data_efficiency": {"enabled": True, "seed": 1, "data_sampling": sampling}}
    toy = Toy(dtype=torch.float32, num_micro_batches=2, config=config)
    toy.loss_fn = lambda output, labels: ((output - labels) ** 2).mean()  # type: ignore[method-assign]
    engine = make_engine(toy, num_stages, lambda **kwargs: tds.initialize(**kwargs, training_data=_RowDataset()))
    lengths: list[int] = []

    def truncate(data: Any, state: dict[str, Any]) -> Any:
        lengths.append(state["current_difficulties"]["seqlen"])
        return [tensor[:, : lengths[-1]] for tensor in data]

    engine.set_data_post_process_func(truncate)
    losses = [float(engine.train_batch()) for _ in range(3)]
    return lengths, losses, engine.training_dataloader.data_sampler.state_dict()["consumed_samples"]


def test_curriculum_sampler_works_on_one_stage_and_rejects_two(tmp_path: Path) -> None:
    lengths, losses, consumed = run_ranks(1, _train_with_data_efficiency, tmp_path, 1)[0]
    assert lengths == [2, 2, 3, 3, 4, 4] and len(set(losses)) == 3 and consumed >= 15
    with pytest.raises(AssertionError, match=r"needs one stage, got 2 stages: .*\. Pass an iterator"):
        run_ranks(2, _train_with_data_efficiency, tmp_path, 2)
