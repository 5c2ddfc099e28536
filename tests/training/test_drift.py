"""Copies of weights that no longer agree, and ranks that hold the others up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import named_parameters
from megatron.mpu.topology import Topology
from megatron.training import pipeline_engine, single_stage_engine
from megatron.training.callbacks.replica_check import checksum
from megatron.training.callbacks.straggler import Straggler, StragglerDetector, slowest
from megatron.training.trainer import Trainer
from tests.helpers.runs import after_update
from tests.training.guarded import GRID, train

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@given(st.sampled_from(TYPES), st.integers(1, 9000), st.data())
@settings(max_examples=60, deadline=None)
def test_every_flipped_bit_changes_the_checksum(dtype: torch.dtype, size: int, data: Any) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = checksum(tensor)
    assert before == checksum(tensor.clone())
    bits = 8 * tensor.element_size()
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, bits - 1))
    words = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    words[place] ^= -(2**bit) if bit == bits - 1 else 2**bit
    assert checksum(tensor) != before


def test_the_checksum_sees_an_exchange_of_rows_and_takes_any_shape() -> None:
    tensor = torch.arange(3 * 8192, dtype=torch.float32).view(3, 8192)
    assert checksum(tensor) != checksum(tensor[[1, 0, 2]])
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    halves = torch.arange(9.0).bfloat16()
    assert checksum(halves[1:]) == checksum(halves[1:].clone()) != checksum(halves[:-1])
    assert checksum(torch.tensor(1.5)) != checksum(torch.tensor(2.5)) and checksum(torch.zeros(0, 3)) == 0


def flip(name: str, ranks: list[int], step: int) -> Any:
    """Plant: the lowest bit of the first element of a weight flips on ``ranks`` after so many steps."""

    def flip_once(rank: int, run: Trainer) -> None:
        if run.progress.step == step and rank in ranks:
            weight = run.engine.optimizer.store.persistent_storage(dict(named_parameters(run.engine.module))[name])
            weight.detach().view(torch.int32).view(-1)[0] ^= 1

    return after_update(flip_once)


EVERY_4 = "--train-iters 12 --drift-interval 4 --save-interval 3"


@pytest.mark.parametrize(
    ("layout", "ranks", "name", "hit", "message", "teller"),
    [
        pytest.param("", 2, "layers.1.mlp.up.weight", [1], "differs among ranks 0, 1", 0, marks=pytest.mark.slow),
        pytest.param(
            "", 3, "layers.1.mlp.up.weight", [1], "on rank 1 differs from ranks 0, 2", 0, marks=pytest.mark.slow
        ),
        pytest.param(
            "--model-parallel-size 2",
            4,
            "layers.0.input_norm.weight",
            [2],
            "differs among ranks 0, 2",
            0,
            marks=pytest.mark.slow,
        ),
        pytest.param(GRID, 4, "layers.1.input_norm.weight", [3], "differs among ranks 2, 3", 2, marks=pytest.mark.slow),
        pytest.param(
            "--model-parallel-size 2 --zero-stage 3",
            4,
            "layers.1.input_norm.weight",
            [3],
            "differs among ranks 2, 3",
            2,
            marks=pytest.mark.slow,
        ),
        ("--pipe-parallel-size 2", 2, "embedding.word.weight", [1], "differs among ranks 0, 1", 0),
    ],
    ids=["replicas", "three replicas", "replicas and tensor", "tensor", "parts", "tied"],
)
def test_one_flipped_bit_ends_the_run_with_parameter_and_ranks(
    layout: str, ranks: int, name: str, hit: list[int], message: str, teller: int, corpus: Path, tmp_path: Path
) -> None:
    """Row N07."""
    seen = train(ranks, corpus, tmp_path / "run", f"{layout} {EVERY_4}", flip(name, hit, 6))
    for one in seen:
        assert one.error.startswith("all copies of a weight must be bitwise equal, but at step 8: ")
        assert "has occurred since step 4. Resume from a checkpoint of that step or an older one" in one.error
    assert f"{name} {message}" in seen[teller].error and seen[teller].is_of_this_rank
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*")) == [
        "step-00000003", "step-00000006",
    ], "nothing is saved once a difference is found"  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        "--pipe-parallel-size 2 --bf16 --zero-stage 1",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (GRID, "--model-parallel-size 2", "--bf16", "--model-parallel-size 2 --bf16 --zero-stage 3")
        ),
    ],
)
def test_copies_of_a_sound_run_agree_to_the_bit(layout: str, corpus: Path, tmp_path: Path) -> None:
    flags = f"{layout} --train-iters 3 --drift-interval 1 --hidden-dropout 0.1"
    assert not any(one.error for one in train(4, corpus, tmp_path / "run", flags))


REPLICAS = Topology(pipe=1, data=4, tensor=1)
STAGES = Topology(pipe=2, data=2, tensor=2)


@pytest.mark.parametrize(
    ("own_s", "waited_s", "topology", "message"),
    [
        ([0.10, 0.10, 0.20, 0.11], [0.0] * 4, REPLICAS, "slowest: rank 2 (stage 0, data 2) with 0.200 s of compute"),
        (
            [0.10, 0.10, 0.20, 0.11],
            [0, 0, 0.09, 0],
            REPLICAS,
            "per step, 0.090 s of it waiting for data; its peers need 0.1",
        ),
        ([0.10, 0.10, 0.13, 0.11], [0.0] * 4, REPLICAS, None),
        ([0.001, 0.001, 0.02, 0.001], [0.0] * 4, REPLICAS, None),
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.29], [0.0] * 8, STAGES, "slowest: ranks 6, 7 (stage 1, data 1)"),
        ([0.1, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3], [0.0] * 8, STAGES, None),
        ([0.1, 0.19], [0.0] * 2, Topology(2, 1, 1), None),
        ([0.1, 0.25], [0.0] * 2, Topology(2, 1, 1), "slowest: rank 1 (stage 1, data 0)"),
        ([0.3, 0.1], [0.0] * 2, Topology(1, 1, 2), None),
        ([0.3], [0.0], Topology(1, 1, 1), None),
    ],
)
def test_the_slowest_is_named_where_it_is_clearly_slower(
    own_s: list[float], waited_s: list[float], topology: Topology, message: str | None
) -> None:
    found = slowest(own_s, waited_s, topology)
    text = None if found is None else found.text
    assert text is None if message is None else text is not None and message in text


def test_only_who_is_the_slowest_again_and_again_is_named() -> None:
    """Small log intervals are noisy: ranks alternate there, and the ranks of a tensor group do anyway."""
    suspect, a, b = StragglerDetector(), Straggler((0, 0), "a"), Straggler((1, 0), "b")
    assert not any(suspect.judge(one) for one in (a, b, a, b, None, None, None, a, a, None, a, a, b))
    assert [suspect.judge(one) for one in (b, Straggler((1, 0), "c"), b, b, b)] == [None, "c", None, None, "b"]


@pytest.mark.parametrize(
    "layout", ["", pytest.param("--pipe-parallel-size 2", marks=pytest.mark.slow)], ids=["replicas", "stages"]
)
def test_a_straggler_is_named_once_in_three_log_intervals(
    layout: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Row A20: the run goes on. Replicas agree within their first backward on an order of sums: it is slow for all."""

    def plant(rank: int) -> None:
        if rank == 1:
            engine_module = pipeline_engine if layout else single_stage_engine
            plain = engine_module.DropoutKey

            def slow(*facts: int) -> Any:
                time.sleep(0.1)
                return plain(*facts)

            engine_module.DropoutKey = slow  # type: ignore[attr-defined]

    seen = train(2, corpus, tmp_path / "run", f"{layout} --train-iters 4", plant)
    assert not any(one.error for one in seen)
    lines = [line for line in capfd.readouterr().out.splitlines() if "slowest" in line]
    place = f"(stage {int(bool(layout))}, data {int(not layout)})"
    third = 3 if layout else 4
    assert [line.split(" with ")[0] for line in lines] == [f"step {third} | slowest: rank 1 {place}"]
