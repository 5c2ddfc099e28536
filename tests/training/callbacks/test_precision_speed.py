"""The warning about slow 16-bit products on a CPU, with a timer that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron import log
from megatron.config import Config, parse
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.topology import Topology
from megatron.training.callbacks import precision_speed
from megatron.training.callbacks.precision_speed import MAX_ROUNDS, PrecisionSpeedWarning, Slowdown, product_slowdown
from megatron.training.world import World
from tests.helpers.harness import run_ranks

CPU = torch.device("cpu")


class FakeClock:
    """Returns times from a table by type, one for each of the three products; counts the calls."""

    def __init__(self, times: dict[torch.dtype, Sequence[float]]) -> None:
        self.times, self.calls = times, 0

    def __call__(self, product: Callable[[], torch.Tensor]) -> float:
        times = self.times[product().dtype]
        self.calls += 1
        return times[(self.calls - 1) % 3]


def make_config(flags: str, dtype: str = "", json: dict[str, Any] | None = None) -> Config:
    """Return the config of a run; fp16 is set afterwards, since flags that ask for it on a CPU are rejected."""
    config = parse(f"--data-path none --vocab-size 9 --device cpu {flags}".split(), world_size=1, env={})
    precision = replace(config.precision, dtype=dtype or config.precision.dtype)
    return replace(config, precision=precision, deepspeed=json or {})


def test_slowdown_covers_forward_and_both_backward_products() -> None:
    clock = FakeClock({torch.float32: (1e-3, 2e-3, 3e-3), torch.bfloat16: (6e-3, 2e-1, 5e-2)})
    assert product_slowdown(torch.bfloat16, clock) == pytest.approx(Slowdown(6.0, 50.0))
    assert clock.calls == 2 * 2 * 3, "0.2 s in a round: two rounds, since the first one contains set-up costs"
    fast_clock = FakeClock({torch.float32: (1e-3, 2e-3, 3e-3), torch.bfloat16: (5e-4, 1e-3, 1.5e-3)})
    assert product_slowdown(torch.bfloat16, fast_clock) == pytest.approx(Slowdown(0.5, 0.5))
    assert fast_clock.calls == MAX_ROUNDS * 2 * 3


def test_disturbed_round_is_ignored() -> None:
    """Every product takes 1 ms in fp32 and in bf16, and 9 ms more in one round of bf16."""
    calls = 0

    def clock(product: Callable[[], torch.Tensor]) -> float:
        nonlocal calls
        calls += 1
        is_disturbed = product().dtype == torch.bfloat16 and calls <= 6
        return 1e-3 + 9e-3 * is_disturbed

    assert product_slowdown(torch.bfloat16, clock) == Slowdown(1.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "json", "setting", "fix"),
    [
        ("--bf16", {}, "--bf16 ", "Leave --bf16 out"),
        ("", {"bf16": {"enabled": True}}, '"bf16": {"enabled": true} of the DeepSpeed JSON', "bf16.enabled to false"),
        ("--bf16", {"bf16": {"enabled": True}}, "--bf16 ", "Leave --bf16 out"),
    ],
)  # fmt: skip
def test_warning_names_setting_and_slowdowns(flags: str, json: dict[str, Any], setting: str, fix: str) -> None:
    text = precision_speed.slowdown_message(Slowdown(6.04, 49.96), make_config(flags, "bf16", json))
    assert text.startswith(setting) and fix in text
    assert "6.0 times" in text and "50.0 times" in text


@pytest.mark.parametrize(
    ("dtype", "device_type", "slowdown", "should_warn"),
    [
        ("bf16", "cpu", Slowdown(1.2, 2.1), True),
        ("fp16", "cpu", Slowdown(2.5, 1.0), True),
        ("bf16", "cpu", Slowdown(0.4, 1.9), False),
        ("fp32", "cpu", None, False),
        ("fp64", "cpu", None, False),
        ("bf16", "cuda", None, False),
    ],
)
def test_cpu_run_warns_if_either_pass_is_slow(
    dtype: str, device_type: str, slowdown: Slowdown | None, should_warn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_product_slowdown(dtype: torch.dtype) -> Slowdown:
        assert slowdown is not None, "nothing is timed"
        return slowdown

    warnings: list[str] = []
    monkeypatch.setattr(precision_speed, "product_slowdown", fake_product_slowdown)
    monkeypatch.setattr(log, "warning", warnings.append)
    callback = PrecisionSpeedWarning()
    callback.trainer = SimpleNamespace(config=make_config("", dtype), world=World(device_type, CPU, single_grid(), 0))  # type: ignore[assignment]
    callback.on_train_start()
    assert bool(warnings) is should_warn


def run_callback_on_rank(rank: int) -> tuple[int, list[str]]:
    """Run the callback on one of 4 ranks of 2 nodes, of which the second is slow; return the timings and warnings."""
    num_timings, warnings = [0], list[str]()

    def fake_product_slowdown(dtype: torch.dtype) -> Slowdown:
        num_timings[0] += 1
        return Slowdown(1.0, 30.0 if rank == 2 else 1.0)

    precision_speed.product_slowdown = fake_product_slowdown  # type: ignore[assignment]
    log.warning = warnings.append  # type: ignore[assignment]
    world = World("cpu", CPU, build_grid(Topology(pipe=2, data=1, tensor=2), rank), rank % 2)
    callback = PrecisionSpeedWarning()
    callback.trainer = SimpleNamespace(config=make_config("--bf16"), world=world)  # type: ignore[assignment]
    callback.on_train_start()
    return num_timings[0], warnings


def test_one_rank_per_node_times_products_and_rank_0_warns() -> None:
    results = run_ranks(4, run_callback_on_rank)
    assert [num_timings for num_timings, _ in results] == [1, 0, 1, 0]
    assert [len(warnings) for _, warnings in results] == [1, 0, 0, 0]
    assert "30.0 times in the backward pass" in results[0][1][0]


def test_measured_slowdown_is_positive_and_finite() -> None:
    assert all(0.0 < ratio < 1e4 for ratio in product_slowdown(torch.bfloat16))
