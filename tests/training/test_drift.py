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
from megatron.training.callbacks.straggler import Straggler, StragglerDetector, find_straggler
from megatron.training.trainer import Trainer
from tests.helpers.runs import inject_after_update
from tests.training.guarded import GRID_FLAGS, train

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@given(st.sampled_from(DTYPES), st.integers(1, 9000), st.data())
@settings(max_examples=60, deadline=None)
def test_flipped_bit_changes_checksum(dtype: torch.dtype, numel: int, data: Any) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    before = checksum(tensor)
    assert before == checksum(tensor.clone())
    num_bits = 8 * tensor.element_size()
    element_idx, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, num_bits - 1))
    int_view = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    int_view[element_idx] ^= -(2**bit) if bit == num_bits - 1 else 2**bit
    assert checksum(tensor) != before


def test_checksum_detects_row_swap_and_accepts_any_shape() -> None:
    tensor = torch.arange(3 * 8192, dtype=torch.float32).view(3, 8192)
    assert checksum(tensor) != checksum(tensor[[1, 0, 2]])
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    bf16_values = torch.arange(9.0).bfloat16()
    assert checksum(bf16_values[1:]) == checksum(bf16_values[1:].clone()) != checksum(bf16_values[:-1])
    assert checksum(torch.tensor(1.5)) != checksum(torch.tensor(2.5)) and checksum(torch.zeros(0, 3)) == 0


def make_bit_flip(name: str, ranks: list[int], step: int) -> Any:
    """Plant: the lowest bit of the first element of a weight flips on ``ranks`` after so many steps."""

    def flip_once(rank: int, run: Trainer) -> None:
        if run.progress.step == step and rank in ranks:
            weight = run.engine.optimizer.store.persistent_storage(dict(named_parameters(run.engine.module))[name])
            weight.detach().view(torch.int32).view(-1)[0] ^= 1

    return inject_after_update(flip_once)


DRIFT_FLAGS = "--train-iters 12 --drift-interval 4 --save-interval 3"


@pytest.mark.parametrize(
    ("layout", "num_ranks", "name", "flipped_ranks", "message", "reporting_rank"),
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
        pytest.param(
            GRID_FLAGS, 4, "layers.1.input_norm.weight", [3], "differs among ranks 2, 3", 2, marks=pytest.mark.slow
        ),
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
def test_flipped_bit_ends_run_naming_parameter_and_ranks(
    layout: str,
    num_ranks: int,
    name: str,
    flipped_ranks: list[int],
    message: str,
    reporting_rank: int,
    corpus: Path,
    tmp_path: Path,
) -> None:
    """Row N07."""
    results = train(
        num_ranks, corpus, tmp_path / "run", f"{layout} {DRIFT_FLAGS}", make_bit_flip(name, flipped_ranks, 6)
    )
    for result in results:
        assert result.error.startswith("all copies of a weight must be bitwise equal, but at step 8: ")
        assert "has occurred since step 4. Resume from a checkpoint of that step or an older one" in result.error
    assert f"{name} {message}" in results[reporting_rank].error and results[reporting_rank].is_of_this_rank
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*")) == [
        "step-00000003", "step-00000006",
    ], "nothing is saved once a difference is found"  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        "--pipe-parallel-size 2 --bf16 --zero-stage 1",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                GRID_FLAGS,
                "--model-parallel-size 2",
                "--bf16",
                "--model-parallel-size 2 --bf16 --zero-stage 3",
            )
        ),
    ],
)
def test_weight_copies_of_healthy_run_are_bitwise_equal(layout: str, corpus: Path, tmp_path: Path) -> None:
    flags = f"{layout} --train-iters 3 --drift-interval 1 --hidden-dropout 0.1"
    assert not any(result.error for result in train(4, corpus, tmp_path / "run", flags))


REPLICAS = Topology(pipe=1, data=4, tensor=1)
STAGES = Topology(pipe=2, data=2, tensor=2)


@pytest.mark.parametrize(
    ("compute_s", "waited_s", "topology", "message"),
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
def test_straggler_is_named_only_if_clearly_slower(
    compute_s: list[float], waited_s: list[float], topology: Topology, message: str | None
) -> None:
    straggler = find_straggler(compute_s, waited_s, topology)
    text = None if straggler is None else straggler.text
    assert text is None if message is None else text is not None and message in text


def test_only_repeated_straggler_is_named() -> None:
    """Small log intervals are noisy: ranks alternate there, and the ranks of a tensor group do anyway."""
    detector, a, b = StragglerDetector(), Straggler((0, 0), "a"), Straggler((1, 0), "b")
    assert not any(detector.update(straggler) for straggler in (a, b, a, b, None, None, None, a, a, None, a, a, b))
    assert [detector.update(straggler) for straggler in (b, Straggler((1, 0), "c"), b, b, b)] == [
        None,
        "c",
        None,
        None,
        "b",
    ]


@pytest.mark.parametrize(
    "layout", ["", pytest.param("--pipe-parallel-size 2", marks=pytest.mark.slow)], ids=["replicas", "stages"]
)
def test_straggler_is_logged_once_per_three_log_intervals(
    layout: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Row A20: the run goes on. Replicas agree within their first backward on an order of sums: it is slow for all."""

    def slow_down_rank(rank: int) -> None:
        if rank == 1:
            engine_module = pipeline_engine if layout else single_stage_engine
            original_key = engine_module.DropoutKey

            def slow_key(*args: int) -> Any:
                time.sleep(0.1)
                return original_key(*args)

            engine_module.DropoutKey = slow_key  # type: ignore[attr-defined]

    results = train(2, corpus, tmp_path / "run", f"{layout} --train-iters 4", slow_down_rank)
    assert not any(result.error for result in results)
    lines = [line for line in capfd.readouterr().out.splitlines() if "slowest" in line]
    coordinates = f"(stage {int(bool(layout))}, data {int(not layout)})"
    expected_step = 3 if layout else 4
    assert [line.split(" with ")[0] for line in lines] == [f"step {expected_step} | slowest: rank 1 {coordinates}"]
