"""A run that changes its ZeRO stage on the way is, bit for bit, one that never did (rows E07 and K18)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training import initialize
from tests.helpers.runs import flags, start_script, train_ranks
from tests.training.test_resume import DROPOUT, assert_same_checkpoint, losses


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world_size"), [("", 2), ("--pipe-parallel-size 2", 4)], ids=["1-1-2", "1-2-2"])
@pytest.mark.parametrize(("first", "then"), [(1, 0), (0, 1)])
def test_a_run_goes_on_with_another_stage(
    layout: str, world_size: int, first: int, then: int, corpus: Path, tmp_path: Path
) -> None:
    whole, cut, extra = tmp_path / "whole", tmp_path / "cut", f"{layout} {DROPOUT}"
    assert train_ranks(world_size, flags(corpus, whole, extra))[0] == [0] * world_size
    argv = flags(corpus, cut, f"{extra} --zero-stage {first} --exit-interval 10")
    assert train_ranks(world_size, argv)[0] == [75] * world_size
    argv = flags(corpus, cut, f"{extra} --zero-stage {then} --load {cut}")
    assert train_ranks(world_size, argv)[0] == [0] * world_size
    assert losses(cut) == losses(whole)
    assert_same_checkpoint(whole, cut)


ONE_SUM = "--clip-grad 0 --gas 1"
"""With one micro-batch a step and without clipping ZeRO 2 and 3 have the bits of the others."""
AWAY = "--offload-optimizer --offload-parameters"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [("3", "0"), ("0", f"3 {AWAY}"), ("2 --offload-optimizer", "3"), (f"3 {AWAY}", "1")]
)
def test_a_run_goes_on_with_parts_of_gradients_and_weights(first: str, then: str, corpus: Path, tmp_path: Path) -> None:
    whole, cut, extra = tmp_path / "whole", tmp_path / "cut", f"{DROPOUT} {ONE_SUM}"
    assert train_ranks(2, flags(corpus, whole, extra))[0] == [0, 0]
    argv = flags(corpus, cut, f"{extra} --zero-stage {first} --exit-interval 10")
    assert train_ranks(2, argv)[0] == [75, 75]
    assert train_ranks(2, flags(corpus, cut, f"{extra} --zero-stage {then} --load {cut}"))[0] == [0, 0]
    assert [row[:2] for row in losses(cut)] == [row[:2] for row in losses(whole)], "the norm is summed in another order"
    assert_same_checkpoint(whole, cut)


@pytest.mark.slow
def test_a_run_with_zero_3_that_stops_and_goes_on_is_one_that_did_not(corpus: Path, tmp_path: Path) -> None:
    whole, cut, extra = tmp_path / "whole", tmp_path / "cut", f"{DROPOUT} --bf16 --zero-stage 3 {AWAY}"
    assert train_ranks(4, flags(corpus, whole, f"{extra} --model-parallel-size 2"))[0] == [0] * 4
    argv = flags(corpus, cut, f"{extra} --model-parallel-size 2")
    assert train_ranks(4, [*argv, "--exit-interval", "10"])[0] == [75] * 4
    assert train_ranks(4, [*argv, "--load", str(cut)])[0] == [0] * 4
    assert losses(cut) == losses(whole)
    assert_same_checkpoint(whole, cut)


def _through_the_host(rank: int) -> None:
    """Let all that lies in the host's memory be sent as what lies on a device is, by copies."""
    from tds.p2p import host_copies

    host_copies.register()
    host_copies.is_host = lambda device: False  # type: ignore[assignment]
    host_copies.log_rank_0 = print  # a test runner takes what is logged
    initialize._backend = lambda *_, **__: host_copies.NAME  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("away", ["", AWAY], ids=["on the device", "offloaded"])
def test_zero_3_through_the_host_has_the_bits_of_gloo(away: str, corpus: Path, tmp_path: Path) -> None:
    """The simulated device, which shows the other stages, cannot give back the memory of a weight."""
    for name, plant in (("plain", None), ("copies", _through_the_host)):
        argv = flags(corpus, tmp_path / name, f"{DROPOUT} --train-iters 5 --zero-stage 3 {away}")
        assert start_script(2, argv, tmp_path / f"{name}.log", plant) == [0, 0], (tmp_path / f"{name}.log").read_text()
    assert "cpu tensors are copied through the host" in (tmp_path / "copies.log").read_text()
    assert losses(tmp_path / "copies") == losses(tmp_path / "plain")
    assert_same_checkpoint(tmp_path / "copies", tmp_path / "plain")
