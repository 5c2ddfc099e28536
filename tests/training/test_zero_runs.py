"""A run that resumes with another ZeRO stage is bitwise equal to a run that does not (rows E07 and K18)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training import initialize
from tests.helpers.runs import launch_script, make_flags, train_ranks
from tests.training.test_resume import DROPOUT_FLAGS, assert_equal_checkpoints, read_losses


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world_size"), [("", 2), ("--pipe-parallel-size 2", 4)], ids=["1-1-2", "1-2-2"])
@pytest.mark.parametrize(("first_stage", "second_stage"), [(1, 0), (0, 1)])
def test_run_resumes_bitwise_with_other_zero_stage(
    layout: str, world_size: int, first_stage: int, second_stage: int, corpus: Path, tmp_path: Path
) -> None:
    uninterrupted, resumed, extra_flags = tmp_path / "whole", tmp_path / "cut", f"{layout} {DROPOUT_FLAGS}"
    assert train_ranks(world_size, make_flags(corpus, uninterrupted, extra_flags))[0] == [0] * world_size
    argv = make_flags(corpus, resumed, f"{extra_flags} --zero-stage {first_stage} --exit-interval 10")
    assert train_ranks(world_size, argv)[0] == [75] * world_size
    argv = make_flags(corpus, resumed, f"{extra_flags} --zero-stage {second_stage} --load {resumed}")
    assert train_ranks(world_size, argv)[0] == [0] * world_size
    assert read_losses(resumed) == read_losses(uninterrupted)
    assert_equal_checkpoints(uninterrupted, resumed)


SINGLE_MICRO_BATCH_FLAGS = "--clip-grad 0 --gas 1"
"""With one micro-batch per step and without clipping, ZeRO 2 and 3 are bitwise equal to the other stages."""
OFFLOAD_FLAGS = "--offload-optimizer --offload-parameters"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_stage", "second_stage"),
    [("3", "0"), ("0", f"3 {OFFLOAD_FLAGS}"), ("2 --offload-optimizer", "3"), (f"3 {OFFLOAD_FLAGS}", "1")],
)
def test_run_resumes_with_sharded_gradients_or_weights(
    first_stage: str, second_stage: str, corpus: Path, tmp_path: Path
) -> None:
    uninterrupted, resumed, extra_flags = (
        tmp_path / "whole",
        tmp_path / "cut",
        f"{DROPOUT_FLAGS} {SINGLE_MICRO_BATCH_FLAGS}",
    )
    assert train_ranks(2, make_flags(corpus, uninterrupted, extra_flags))[0] == [0, 0]
    argv = make_flags(corpus, resumed, f"{extra_flags} --zero-stage {first_stage} --exit-interval 10")
    assert train_ranks(2, argv)[0] == [75, 75]
    assert train_ranks(2, make_flags(corpus, resumed, f"{extra_flags} --zero-stage {second_stage} --load {resumed}"))[
        0
    ] == [0, 0]
    assert [row[:2] for row in read_losses(resumed)] == [row[:2] for row in read_losses(uninterrupted)], (
        "the norm is summed in another order"
    )
    assert_equal_checkpoints(uninterrupted, resumed)


@pytest.mark.slow
def test_zero_3_run_resumes_bitwise(corpus: Path, tmp_path: Path) -> None:
    uninterrupted, resumed, extra_flags = (
        tmp_path / "whole",
        tmp_path / "cut",
        f"{DROPOUT_FLAGS} --bf16 --zero-stage 3 {OFFLOAD_FLAGS}",
    )
    assert train_ranks(4, make_flags(corpus, uninterrupted, f"{extra_flags} --model-parallel-size 2"))[0] == [0] * 4
    argv = make_flags(corpus, resumed, f"{extra_flags} --model-parallel-size 2")
    assert train_ranks(4, [*argv, "--exit-interval", "10"])[0] == [75] * 4
    assert train_ranks(4, [*argv, "--load", str(resumed)])[0] == [0] * 4
    assert read_losses(resumed) == read_losses(uninterrupted)
    assert_equal_checkpoints(uninterrupted, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["--pipeline-schedule zb-h1", "--pipeline-chunks 2", "--pipeline-schedule zb-v --bf16"]
)
@pytest.mark.parametrize("zero_flags", ["--zero-stage 2", f"--zero-stage 3 {OFFLOAD_FLAGS}", "--zero-stage 3"])
def test_zero_2_and_3_in_pipeline_resume_bitwise(zero_flags: str, schedule: str, corpus: Path, tmp_path: Path) -> None:
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "cut"
    extra_flags = f"{DROPOUT_FLAGS} --pipe-parallel-size 2 --num-layers 4 {schedule} {zero_flags}"
    assert train_ranks(4, make_flags(corpus, uninterrupted, extra_flags))[0] == [0] * 4
    argv = make_flags(corpus, resumed, extra_flags)
    assert train_ranks(4, [*argv, "--exit-interval", "10"])[0] == [75] * 4
    assert train_ranks(4, [*argv, "--load", str(resumed)])[0] == [0] * 4
    assert read_losses(resumed) == read_losses(uninterrupted)
    assert_equal_checkpoints(uninterrupted, resumed)


def _use_host_copies(rank: int) -> None:
    """Send tensors in host memory by copies, as tensors on a device are."""
    from tds.p2p import host_copies

    host_copies.register()
    host_copies.is_host = lambda device: False  # type: ignore[assignment]
    host_copies.log_rank_0 = print  # the test reads the log from stdout
    initialize._backend = lambda *_, **__: host_copies.NAME  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("offload_flags", ["", OFFLOAD_FLAGS], ids=["on the device", "offloaded"])
def test_zero_3_over_host_copies_equals_gloo_bitwise(offload_flags: str, corpus: Path, tmp_path: Path) -> None:
    """Other stages are tested on the simulated device, which cannot free the memory of a weight."""
    for name, inject_fault in (("plain", None), ("copies", _use_host_copies)):
        argv = make_flags(corpus, tmp_path / name, f"{DROPOUT_FLAGS} --train-iters 5 --zero-stage 3 {offload_flags}")
        assert launch_script(2, argv, tmp_path / f"{name}.log", inject_fault) == [0, 0], (
            tmp_path / f"{name}.log"
        ).read_text()
    assert "cpu tensors are copied through the host" in (tmp_path / "copies.log").read_text()
    assert read_losses(tmp_path / "copies") == read_losses(tmp_path / "plain")
    assert_equal_checkpoints(tmp_path / "copies", tmp_path / "plain")
