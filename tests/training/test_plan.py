"""The rows of the start table that tell how a pipeline is laid out."""

from __future__ import annotations

import pytest

from megatron import cost
from megatron.config import Config, parse
from megatron.mpu.topology import Topology
from megatron.training.forecast import simulated_bubble
from megatron.training.plan import plan_rows

SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 101 --gas 8"


def rows(
    flags: str, pipe: int = 2, counted: list[int] | None = None, bounds: list[int] | None = None
) -> dict[str, str]:
    config: Config = parse([*SIZES.split(), *flags.split(), "--pipe-parallel-size", str(pipe)], world_size=pipe)
    config = config.with_vocab(101)
    topology = Topology.of_world(pipe, 1, pipe)
    bounds = bounds or cost.stage_bounds(config.model, 32, pipe, config.parallel.chunks)
    return dict(plan_rows(config, topology, bounds, "fp32", counted, simulated_bubble if counted else None))


def test_stages_of_several_chunks_show_all_their_layers_and_what_they_keep() -> None:
    shown = rows("--pipeline-chunks 2")
    assert shown["stage 0"].startswith("layers 0-2 and 5-6 of 11, ")
    assert shown["stage 1"].startswith("layers 3-4 and 7-10 of 11, ")
    assert shown["stage 0"].endswith("; keeps the activations of 5 of 8 x 2 forwards")
    assert shown["stage 1"].endswith("; keeps the activations of 3 of 8 x 2 forwards")
    assert shown["pipeline"] == "schedule interleaved, 2 chunks on each stage"
    assert shown["pipeline bubble"].endswith(" % expected, 5.9 % with equal stages")


def test_parameters_of_stages_add_up_whatever_the_chunks() -> None:
    for chunks in (1, 2, 4):
        model = parse(SIZES.split(), world_size=1).with_vocab(101).model
        bounds = cost.stage_bounds(model, 32, 2, chunks)
        assert sum(cost.stage_parameters(model, bounds, stages=2)) == cost.num_parameters(model) + 101 * 64


@pytest.mark.parametrize(
    ("schedule", "kept", "bubble"), [("1f1b", (2, 1), 11.1), ("gpipe", (8, 8), 11.1), ("zb-h1", (2, 2), 4.0)]
)
def test_each_schedule_has_its_bubble_and_its_memory(schedule: str, kept: tuple[int, int], bubble: float) -> None:
    shown = rows(f"--pipeline-schedule {schedule}")
    assert shown["pipeline"] == f"schedule {schedule}"
    assert f"{bubble} % with equal stages" in shown["pipeline bubble"]
    for stage, number in enumerate(kept):
        assert f"keeps the activations of {number} of 8 micro-batches" in shown[f"stage {stage}"]


def test_auto_shows_what_it_chooses_from() -> None:
    told = rows("--pipeline-schedule auto")["pipeline bubble"]
    assert [part.split(":")[0] for part in told.split("; ")] == ["1f1b", "gpipe", "zb-h1"]


def test_a_model_that_is_built_is_simulated_and_one_of_ones_own_has_equal_stages() -> None:
    model = parse(SIZES.split(), world_size=1).with_vocab(101).model
    built = rows("", counted=[cost.num_parameters(model), 0, 0])
    assert built["pipeline bubble"] == rows("")["pipeline bubble"].removeprefix("about ")
    own = rows("", counted=[1000, 600, 400], bounds=[0, 2, 3, 5, 7])
    kept = "keeps the activations of 5 of 8 x 2 forwards"
    assert own["stage 0"] == f"layers 0-1 and 3-4, 600 parameters on each rank; {kept}"
    assert own["stage 1"].startswith("layers 2 and 5-6, 400 parameters")
    assert own["pipeline bubble"] == "5.9 % with equal stages"


def test_a_plan_says_where_the_cut_is_made_only_at_the_start() -> None:
    assert "--partition-method uniform cuts at the start" in rows("--partition-method uniform")["partition"]
    assert "partition" not in rows("")


def test_few_micro_batches_are_told() -> None:
    assert rows("--gas 2", pipe=4)["pipeline bubble"].endswith("(fewer micro-batches than stages: raise --gas)")
