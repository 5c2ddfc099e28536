"""An engine in a V: who reads and has the loss, "auto", orders of files, groups of micro-batches, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tds
from tds.deepspeed.module import layer_indices
from tds.engine.auto_schedule import fastest_schedule, trial_schedules
from tds.partition import PartitionError
from tds.pipe import LayerSpec, PipelineModule
from tds.schedule import Costs, Placement, V, schedule_named, write_schedule
from tests.helpers.harness import run_ranks
from tests.helpers.orders import actions_by_stage
from tests.helpers.toys import Dense, Toy, check_equal, make_engine, run_toys, train_batch

V_OPTIONS = {"chunks": 2, "placement": "v"}
TRIALS = trial_schedules(("zb-v", "dualpipev"), Placement(2, 2, V))


def _describe_and_train(rank: int, toy: Toy) -> Any:
    """Return what the engine is, its loss in an evaluation, and what it has trained."""
    engine = make_engine(toy, 2)
    roles = (engine.is_first_stage(), engine.is_last_stage(), engine._reads_data(), engine._plan.name)
    owners = [engine.module.stage_owner(layer) for layer in range(7)]
    batches = iter(toy.make_batches()) if engine.is_first_stage() else None
    eval_loss = float(engine.eval_batch(batches, bcast_loss=True))
    return roles, owners, eval_loss, train_batch(engine, toy)[1]


def test_v_first_stage_reads_data_and_computes_loss() -> None:
    toy = Toy("chain", 7, num_micro_batches=3, options=V_OPTIONS)
    (first, owners, loss, gradients), (second, _, other_loss, other_gradients) = run_ranks(2, _describe_and_train, toy)
    assert first == (True, True, True, "zb-v") and second == (False, False, False, "zb-v")
    assert owners == [0, 1, 1, 1, 1, 0, 0] or owners[0] == owners[-1] == 0
    assert loss == other_loss and not gradients.keys() & other_gradients.keys()


def _train_with_auto(rank: int) -> tuple[list[str], str]:
    engine = make_engine(Toy("chain", 7, num_micro_batches=4, options=V_OPTIONS, pipeline={"schedule": "auto"}), 2)
    names = []
    for _ in range(len(TRIALS) + 1):
        engine.train_batch(iter(Toy("chain", 7, num_micro_batches=4).make_batches()) if rank == 0 else None)
        names.append(engine._plan.name)
    return names, engine._monitor._auto.choice


def test_auto_tries_v_schedules() -> None:
    (names, choice), (other_names, _) = run_ranks(2, _train_with_auto)
    assert names == other_names and tuple(names[: len(TRIALS) - 1]) == TRIALS[:-1]
    assert names[-1] in ("zb-v", "dualpipev") and "stage 0 chunk 1: " in choice and "stage 1 chunk 1: " in choice


def test_split_cost_decides_between_v_schedules() -> None:
    full_costs, even_costs = Costs((1.0,) * 8, (2.0,) * 8, (0.0,) * 8), Costs.even(8)
    assert fastest_schedule(full_costs, even_costs, Placement(4, 2, V), 8)[0] == "zb-v"
    assert fastest_schedule(full_costs, Costs.even(8, B=1.3, W=1.3), Placement(4, 2, V), 32)[0] == "dualpipev"


def test_schedule_file_equals_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "order.csv")
    write_schedule(path, actions_by_stage(schedule_named("dualpipev", 2, V), 2, 4), Placement(2, 2, V))
    toys = [Toy("many", 7, options=V_OPTIONS, dtype=torch.float32, pipeline={"schedule_file": path})]
    check_equal(run_ranks(2, _train_with_file, toys[0]), toys[0])


def _train_with_file(rank: int, toy: Toy) -> Any:
    engine = make_engine(toy, 2)
    assert engine._plan.name.endswith("order.csv")
    return train_batch(engine, toy)


def test_larger_micro_batch_group_equals_one_process() -> None:
    pipeline = {"schedule": "interleaved", "micro_batch_group_size": 4}
    toys = [Toy("chain", 7, num_micro_batches=7, options={"chunks": 2}, dtype=torch.float32, pipeline=pipeline)]
    results = run_ranks(2, run_toys, toys, 2, {})
    check_equal([result[0] for result in results], toys[0])


def _collect_errors(rank: int, path: str) -> list[str]:
    messages = []
    for options, pipeline in (
        ({"chunks": 2}, {"schedule": "zb-v"}),
        (V_OPTIONS, {"schedule": "interleaved"}),
        (V_OPTIONS, {"placement": "loop"}),
        (V_OPTIONS, {"micro_batch_group_size": 4}),
        ({"chunks": 2}, {"micro_batch_group_size": 1}),
        (V_OPTIONS, {"schedule": "zb-v", "schedule_file": path}),
        ({"chunks": 1, "placement": "v"}, {}),
    ):
        with pytest.raises(ValueError) as caught:
            make_engine(Toy("chain", 7, options=options, pipeline=pipeline), 2)
        messages.append(str(caught.value))
    with pytest.raises(PartitionError) as caught:
        make_engine(Toy("chain", 3, options=V_OPTIONS), 2)
    return [*messages, str(caught.value)]


def test_options_incompatible_with_v_are_rejected(tmp_path: Path) -> None:
    for messages in run_ranks(2, _collect_errors, str(tmp_path / "order.csv")):
        for message, fragment in zip(
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
            assert fragment in message


def _save_or_load(rank: int, folder: str, options: dict[str, Any], is_loading: bool) -> dict[int, Any]:
    """Return the weights of each layer of this rank, by its number in the whole model."""
    tds.init_distributed("gloo", verbose=False)
    torch.manual_seed(7 if is_loading else 3)
    module = PipelineModule([LayerSpec(Dense, 10 + i, 6, torch.float64) for i in range(6)], num_stages=2,
                            loss_fn=torch.nn.functional.mse_loss, partition_method="uniform", **options)  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    engine = tds.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)[0]
    if is_loading:
        for parameter in module.parameters():
            parameter.data.zero_()
        engine.load_checkpoint(folder, load_optimizer_states=False, load_module_only=True)
    else:
        engine.save_checkpoint(folder, tag="one")
    layers = zip(layer_indices(module), module.forward_funcs, strict=True)
    return {layer_idx: layer.inner.weight.detach().clone() for layer_idx, layer in layers}


@pytest.mark.parametrize(("save_options", "load_options"), [(V_OPTIONS, {}), ({"chunks": 2}, V_OPTIONS)])
def test_checkpoint_is_independent_of_placement(
    tmp_path: Path, save_options: dict[str, Any], load_options: dict[str, Any]
) -> None:
    saved_weights = {
        n: w for weights in run_ranks(2, _save_or_load, str(tmp_path), save_options, False) for n, w in weights.items()
    }
    loaded_weights = {
        n: w for weights in run_ranks(2, _save_or_load, str(tmp_path), load_options, True) for n, w in weights.items()
    }
    assert saved_weights.keys() == loaded_weights.keys() == set(range(6))
    assert all(torch.equal(saved_weights[n], loaded_weights[n]) for n in saved_weights)
