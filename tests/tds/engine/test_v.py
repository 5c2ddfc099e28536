"""An engine in a V: who reads and has the loss, "auto", orders of files, groups of micro-batches, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tds
from tds.deepspeed.module import layer_numbers
from tds.engine.auto_schedule import best, trials
from tds.partition import PartitionError
from tds.pipe import LayerSpec, PipelineModule
from tds.schedule import Costs, Placement, V, schedule_named, write_schedule
from tests.helpers.harness import run_ranks
from tests.helpers.orders import all_stages
from tests.helpers.toys import Dense, Toy, check_equal, make_engine, run_toys, train

IN_A_V = {"chunks": 2, "placement": "v"}
TRIED = trials(("zb-v", "dualpipev"), Placement(2, 2, V))


def _engine(rank: int, toy: Toy) -> Any:
    """Return what the engine is, its loss in an evaluation, and what it has trained."""
    engine = make_engine(toy, 2)
    seen = (engine.is_first_stage(), engine.is_last_stage(), engine._reads_data(), engine._plan.name)
    owners = [engine.module.stage_owner(layer) for layer in range(7)]
    batches = iter(toy.batches()) if engine.is_first_stage() else None
    before = float(engine.eval_batch(batches, bcast_loss=True))
    return seen, owners, before, train(engine, toy)[1]


def test_the_first_stage_reads_and_has_the_loss() -> None:
    toy = Toy("chain", 7, micro_batches=3, options=IN_A_V)
    (first, owners, loss, held), (second, _, other, others) = run_ranks(2, _engine, toy)
    assert first == (True, True, True, "zb-v") and second == (False, False, False, "zb-v")
    assert owners == [0, 1, 1, 1, 1, 0, 0] or owners[0] == owners[-1] == 0
    assert loss == other and not held.keys() & others.keys()


def _auto(rank: int) -> tuple[list[str], str]:
    engine = make_engine(Toy("chain", 7, micro_batches=4, options=IN_A_V, pipeline={"schedule": "auto"}), 2)
    names = []
    for _ in range(len(TRIED) + 1):
        engine.train_batch(iter(Toy("chain", 7, micro_batches=4).batches()) if rank == 0 else None)
        names.append(engine._plan.name)
    return names, engine._monitor._auto.choice


def test_auto_chooses_among_the_schedules_of_a_v() -> None:
    (names, choice), (others, _) = run_ranks(2, _auto)
    assert names == others and tuple(names[: len(TRIED) - 1]) == TRIED[:-1]
    assert names[-1] in ("zb-v", "dualpipev") and "stage 0 chunk 1: " in choice and "stage 1 chunk 1: " in choice


def test_in_a_v_the_price_of_split_backwards_decides() -> None:
    whole, even = Costs((1.0,) * 8, (2.0,) * 8, (0.0,) * 8), Costs.even(8)
    assert best(whole, even, Placement(4, 2, V), 8)[0] == "zb-v"
    assert best(whole, Costs.even(8, B=1.3, W=1.3), Placement(4, 2, V), 32)[0] == "dualpipev"


def test_the_order_of_a_file_equals_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "order.csv")
    write_schedule(path, all_stages(schedule_named("dualpipev", 2, V), 2, 4), Placement(2, 2, V))
    toys = [Toy("many", 7, options=IN_A_V, dtype=torch.float32, pipeline={"schedule_file": path})]
    check_equal(run_ranks(2, _trained, toys[0]), toys[0])


def _trained(rank: int, toy: Toy) -> Any:
    engine = make_engine(toy, 2)
    assert engine._plan.name.endswith("order.csv")
    return train(engine, toy)


def test_a_larger_group_of_micro_batches_equals_one_process() -> None:
    pipeline = {"schedule": "interleaved", "micro_batch_group_size": 4}
    toys = [Toy("chain", 7, micro_batches=7, options={"chunks": 2}, dtype=torch.float32, pipeline=pipeline)]
    results = run_ranks(2, run_toys, toys, 2, {})
    check_equal([each[0] for each in results], toys[0])


def _refusals(rank: int, path: str) -> list[str]:
    found = []
    for options, pipeline in (
        ({"chunks": 2}, {"schedule": "zb-v"}),
        (IN_A_V, {"schedule": "interleaved"}),
        (IN_A_V, {"placement": "loop"}),
        (IN_A_V, {"micro_batch_group_size": 4}),
        ({"chunks": 2}, {"micro_batch_group_size": 1}),
        (IN_A_V, {"schedule": "zb-v", "schedule_file": path}),
        ({"chunks": 1, "placement": "v"}, {}),
    ):
        with pytest.raises(ValueError) as caught:
            make_engine(Toy("chain", 7, options=options, pipeline=pipeline), 2)
        found.append(str(caught.value))
    with pytest.raises(PartitionError) as caught:
        make_engine(Toy("chain", 3, options=IN_A_V), 2)
    return [*found, str(caught.value)]


def test_what_does_not_go_with_a_v_is_refused(tmp_path: Path) -> None:
    for messages in run_ranks(2, _refusals, str(tmp_path / "order.csv")):
        for message, words in zip(
            messages,
            (
                "with the placement v, got 2 with the placement loop",
                "with the placement loop, got 2 with the placement v",
                "equal to placement of PipelineModule, got 'loop' in the JSON and 'v'",
                'needs several chunks per stage and the placement "loop", got 2 chunks and the placement "v"',
                "at least the number of stages, got 1 for 2 stages",
                'excludes "schedule" and "micro_batch_group_size"',
                "v needs 2 or more chunks per stage",
                "each stage must have a layer in each chunk, got none on stage ",
            ),
            strict=True,
        ):
            assert words in message


def _save_or_load(rank: int, folder: str, options: dict[str, Any], loads: bool) -> dict[int, Any]:
    """Return the weights of each layer of this rank, by its number in the whole model."""
    tds.init_distributed("gloo", verbose=False)
    torch.manual_seed(7 if loads else 3)
    module = PipelineModule([LayerSpec(Dense, 10 + i, 6, torch.float64) for i in range(6)], num_stages=2,
                            loss_fn=torch.nn.functional.mse_loss, partition_method="uniform", **options)  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    engine = tds.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)[0]
    if loads:
        for parameter in module.parameters():
            parameter.data.zero_()
        engine.load_checkpoint(folder, load_optimizer_states=False, load_module_only=True)
    else:
        engine.save_checkpoint(folder, tag="one")
    held = zip(layer_numbers(module), module.forward_funcs, strict=True)
    return {number: layer.inner.weight.detach().clone() for number, layer in held}


@pytest.mark.parametrize(("saved", "loaded"), [(IN_A_V, {}), ({"chunks": 2}, IN_A_V)])
def test_a_checkpoint_has_no_placement(tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    one = {n: w for held in run_ranks(2, _save_or_load, str(tmp_path), saved, False) for n, w in held.items()}
    two = {n: w for held in run_ranks(2, _save_or_load, str(tmp_path), loaded, True) for n, w in held.items()}
    assert one.keys() == two.keys() == set(range(6))
    assert all(torch.equal(one[n], two[n]) for n in one)
