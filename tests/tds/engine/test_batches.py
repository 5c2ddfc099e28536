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
from tests.helpers.toys import Toy, check_equal, make_engine, train

CPU = torch.device("cpu")


def test_inputs_of_any_structure_are_copied() -> None:
    x, ids = torch.ones(2), torch.arange(2)
    given = [{"x": x, "more": (ids, [x])}, ids]
    got = stage_inputs(given, CPU, needs_grad=True)
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


def test_a_namedtuple_keeps_its_names() -> None:
    given = _Named(torch.ones(2), [_Named(torch.zeros(1), ())])
    for got in (stage_inputs(given, CPU, needs_grad=False), to_device(given, CPU)):
        assert type(got) is _Named and type(got.more) is tuple and type(got.more[0]) is _Named
        assert torch.equal(got.x, given.x) and torch.equal(got.more[0].x, given.more[0].x)


SCHEDULE = {
    "min_difficulty": 2,
    "max_difficulty": 4,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 1},
}


class _Short(Toy):
    """A toy whose sequences are cut to ``length`` as a program's batch function would."""

    length = 4

    def batch(self, index: int, wide_rows: int | None = None) -> tuple[Any, Any]:
        x, (target, mask) = super().batch(index, wide_rows)
        return x[:, : self.length], (target[:, : self.length], mask[:, : self.length])


def _curriculum(rank: int, toy: Toy) -> list[Any]:
    engine = make_engine(toy, 2)
    scheduler = CurriculumScheduler(SCHEDULE)
    length = [0]
    engine.set_batch_fn(lambda batch: tree_map(lambda t: t[:, : length[0]], batch))
    results = []
    for step in (1, 2, 3):
        length[0] = scheduler.update_difficulty(step)
        engine.reset_activation_shape()
        results.append((length[0], train(engine, toy)))
    return results


def test_sequences_may_grow_from_step_to_step_as_deepspeeds_curriculum_says() -> None:
    toy = Toy("many", micro_batches=2)
    ranks = run_ranks(2, _curriculum, toy)
    assert [length for length, _ in ranks[0]] == [2, 3, 4]
    for index, (length, _) in enumerate(ranks[0]):
        short = _Short("many", micro_batches=2)
        short.length = length
        check_equal([results[index][1] for results in ranks], short, tolerance=1e-12)


class _Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((4, 6), float(index))
        return x, x


def _efficient(rank: int, folder: Path, num_stages: int) -> Any:
    metric = {
        "index_to_sample_path": "none", "index_to_metric_path": "none", "difficulty_type": "value",
        "clustering_type": "single_cluster", **SCHEDULE,
    }  # fmt: skip
    learning = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": {"seqlen": metric}}
    sampling = {"enabled": True, "num_workers": 0, "curriculum_learning": learning}
    config = {"data_efficiency": {"enabled": True, "seed": 1, "data_sampling": sampling}}
    toy = Toy(dtype=torch.float32, micro_batches=2, config=config)
    toy.loss_fn = lambda output, labels: ((output - labels) ** 2).mean()  # type: ignore[method-assign]
    engine = make_engine(toy, num_stages, lambda **given: tds.initialize(**given, training_data=_Rows()))
    lengths: list[int] = []

    def cut(data: Any, state: dict[str, Any]) -> Any:
        lengths.append(state["current_difficulties"]["seqlen"])
        return [each[:, : lengths[-1]] for each in data]

    engine.set_data_post_process_func(cut)
    losses = [float(engine.train_batch()) for _ in range(3)]
    return lengths, losses, engine.training_dataloader.data_sampler.state_dict()["consumed_samples"]


def test_deepspeeds_curriculum_sampler_acts_on_one_stage_and_is_refused_on_two(tmp_path: Path) -> None:
    lengths, losses, consumed = run_ranks(1, _efficient, tmp_path, 1)[0]
    assert lengths == [2, 2, 3, 3, 4, 4] and len(set(losses)) == 3 and consumed >= 15
    with pytest.raises(
        AssertionError, match=r"needs one stage, got 2 stages: .*\. Pass an iterator"
    ):
        run_ranks(2, _efficient, tmp_path, 2)
