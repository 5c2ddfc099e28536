"""fp16 on CPU: every rank skips the same steps with the same loss scale, also over a stop (row E18)."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron import log
from megatron.arguments import parse
from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import Config
from megatron.mpu import is_counted_in_norm
from megatron.mpu.groups import SINGLE
from megatron.optim import MixedPrecisionOptimizer
from megatron.optim.grad_scaler import GradScaler
from megatron.training import initialize
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.loss_scale_resume import restore_scaler
from megatron.training.optimizer_setup import make_scaler
from megatron.training.step_result import result_of
from tests.helpers import runs, t5_runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import flags, serial, trace_rank

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1)]
ENDS = [pytest.param(*layout, marks=() if layout == LAYOUTS[-1] else pytest.mark.slow) for layout in LAYOUTS]
FP16 = "--fp16 --device auto"  # DS_ACCELERATOR makes it the CPU, after the check of flags that refuses fp16 there
SCALING = f"{FP16} --initial-scale-power 20 --loss-scale-window 3 --hysteresis 2"
STEPS, FEW = 10, 6  # the scale is halved and grows again within 10; where it does neither, fewer do

Seen = list[tuple[float, bool]]  # for each step, the loss scale that it ran with and whether it was skipped


def allow_fp16_on_cpu(rank: int) -> None:
    """What a user may not do, for its CPU kernels are slow; the numbers are right."""
    initialize.check_device_fits = lambda *_: None  # type: ignore[assignment]


def scaled_rank(
    rank: int, argv: list[str], world_size: int, steps: int, hit: tuple[int, int], trace: Any = trace_rank
) -> tuple[Any, Seen]:
    """Train in fp16; rank ``hit[0]`` writes an infinity into one gradient of step ``hit[1]``."""
    allow_fp16_on_cpu(rank)
    seen: Seen = []
    step = MixedPrecisionOptimizer.step

    def watched_step(self: MixedPrecisionOptimizer, closure: None = None) -> None:
        self.raw_norm = None  # of what was there before
        if (rank, len(seen)) == hit:
            here = self.reducer.tensor_group.rank
            next(g for p, g in self.gradients() if is_counted_in_norm(p, here)).view(-1)[0] = torch.inf
        scale = self.loss_scale
        step(self)
        seen.append((scale, self.overflow))

    MixedPrecisionOptimizer.step = watched_step  # type: ignore[method-assign]
    return trace(rank, argv, world_size, steps, 0), seen


@functools.cache
def scaled(
    tensor: int, pipe: int, data: int, extra: str = SCALING, hit: tuple[int, int] = (-1, -1), steps: int = STEPS
) -> list[Any]:
    """Return (trace, seen) of each rank."""
    size = tensor * pipe * data
    return run_ranks(size, scaled_rank, flags(tensor, pipe, micro=2, gas=2, extra=extra), size, steps, hit)


def test_overflowed_and_refused_steps_are_reported_as_skipped() -> None:
    """The trainer counts an update, and advances the learning rate, unless the result is skipped."""

    def report(**changes: bool) -> tuple[bool, bool, bool]:
        optimizer: Any = SimpleNamespace(**{"overflow": False, "was_refused": False, "grad_norm": 2.0, **changes})
        result = result_of(0.5, {}, 8.0, optimizer)
        return result.is_skipped, result.is_refused, result.is_overflow

    assert report() == (False, False, False)
    assert report(overflow=True) == (True, False, True)
    assert report(was_refused=True) == (True, True, False)


@pytest.mark.parametrize(("tensor", "pipe", "data"), ENDS)
def test_every_layout_skips_the_steps_of_one_process_with_the_same_scales(tensor: int, pipe: int, data: int) -> None:
    ((alone, expected),) = scaled(1, 1, 1)
    assert expected[0] == (2.0**20, True), "the first steps must overflow"
    assert not all(skipped for _, skipped in expected), "and others must not"
    assert [scale for scale, _ in expected[:4]] == [2.0**20, 2.0**20, 2.0**19, 2.0**18], "no hysteresis any more"
    assert any(after > before for (before, _), (after, _) in zip(expected, expected[1:], strict=False)), "grown again"
    for trace, seen in scaled(tensor, pipe, data):
        assert seen == expected
        assert trace.losses == pytest.approx(alone.losses, abs=5e-3)


def scaled_t5(tensor: int, pipe: int) -> list[Any]:
    """Return (trace, seen) of each rank that trains a T5."""
    size = tensor * pipe
    extra = f"{SCALING.replace('power 20', 'power 17')} {t5_runs.VARIANTS['v1.1']}"
    argv = t5_runs.RUNS.flags(tensor, pipe, micro=2, gas=2, extra=extra)
    return run_ranks(size, scaled_rank, argv, size, STEPS, (-1, -1), t5_runs.RUNS.trace_rank)


@pytest.mark.slow  # GPT-2 in every layout, above, is the quick one
def test_t5_skips_the_steps_of_one_process_with_the_same_scales() -> None:
    ((alone, expected),) = scaled_t5(1, 1)
    assert expected[:2] == [(2.0**17, True)] * 2 and sum(skipped for _, skipped in expected) < STEPS / 2, expected
    for trace, seen in scaled_t5(1, 2):
        assert seen == expected
        assert trace.losses == pytest.approx(alone.losses, abs=5e-3)


@pytest.mark.parametrize(("tensor", "pipe", "data"), ENDS)
def test_fp16_that_skips_nothing_trains_as_fp32_does(tensor: int, pipe: int, data: int) -> None:
    wide = serial(2, 2, "--fp32", steps=FEW)
    for trace, seen in scaled(tensor, pipe, data, f"{FP16} --initial-scale-power 8", steps=FEW):
        assert seen == [(2.0**8, False)] * FEW
        assert trace.losses == pytest.approx(wide.losses, abs=5e-3)
        assert trace.grad_norms == pytest.approx(wide.grad_norms, rel=2e-2)


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "rank"),
    [
        pytest.param(1, 2, 1, 1, marks=pytest.mark.slow),
        (2, 2, 1, 3),
        pytest.param(2, 1, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_an_overflow_on_one_rank_is_seen_by_all(tensor: int, pipe: int, data: int, rank: int) -> None:
    """On the last stage alone, and on one tensor rank alone."""
    extra = f"{FP16} --initial-scale-power 8 --hysteresis 1"
    for trace, seen in scaled(tensor, pipe, data, extra, (rank, 2), FEW):
        assert seen == [(2.0**8, False)] * 2 + [(2.0**8, True)] + [(2.0**7, False)] * (FEW - 3)
        assert len(set(trace.losses)) == FEW


def recorded(folder: Path) -> list[tuple[Any, ...]]:
    """Return of each step what resuming must not change, with losses as hexadecimal numbers."""
    names = ("step", "learning_rate", "loss_scale", "skipped", "grad_norm")
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(float(r["loss"]).hex(), *(r[name] for name in names)) for r in records]


def train(prefix: Path, folder: Path, extra: str = "") -> list[int]:
    argv = runs.flags(prefix, folder, f"--pipe-parallel-size 2 {SCALING} {extra}")
    return runs.train_ranks(2, argv, allow_fp16_on_cpu)[0]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not stopped."""
    folder = tmp_path_factory.mktemp("fp16") / "run"
    assert train(corpus, folder) == [0, 0]
    return folder


def test_the_learning_rate_waits_while_steps_are_skipped(whole: Path) -> None:
    records = [r for r in read_metrics(whole / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["skipped"] for r in records[:2]] == [1, 2]
    assert len({r["learning_rate"] for r in records[:3]}) == 1
    assert [r["samples"] for r in records] == [4 * step for step in range(1, 21)]
    rates = {r["step"] - r["skipped"]: r["learning_rate"] for r in records}
    assert len(set(rates.values())) > 8, "it follows the updates that were made"


@pytest.mark.parametrize("stop", [3, pytest.param(8, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.slow)])
def test_loss_scale_and_counters_survive_a_stop(stop: int, whole: Path, corpus: Path, tmp_path: Path) -> None:
    """At 3 and 13 one of the hysteresis is used up; at 8 part of a window of good steps is over."""
    assert train(corpus, tmp_path / "cut", f"--exit-interval {stop}") == [75, 75]
    scaler = open_latest(tmp_path / "cut" / CHECKPOINTS, SINGLE).metadata["scaler"]
    assert scaler["good_steps"] % 3 if stop == 8 else scaler["overflows_left"] == 1
    assert train(corpus, tmp_path / "cut", f"--load {tmp_path / 'cut'}") == [0, 0]
    assert recorded(tmp_path / "cut") == recorded(whole)


PRECISIONS = {
    "bf16": "--bf16",
    "fp32": "--fp32",
    "dynamic": f"{FP16} --initial-scale-power 12 --loss-scale-window 50",
    "fixed": f"{FP16} --loss-scale 128",
}
NEW_RUN = {"bf16": 1.0, "fp32": 1.0, "dynamic": 2.0**12, "fixed": 128.0}


def used_scaler(precision: str) -> tuple[GradScaler, Config]:
    """Return the scaler of a run that has had one overflow, and the run's configuration."""
    config = parse(PRECISIONS[precision].split(), world_size=1, env={})
    scaler = make_scaler(config)
    for has_overflow in (True, True, False):
        scaler.update(has_overflow)
    return scaler, config


@pytest.mark.parametrize("is_former", [False, True], ids=["present state", "state of 8c23b9e6"])
@pytest.mark.parametrize("now", PRECISIONS)
@pytest.mark.parametrize("saved", PRECISIONS)
def test_a_loss_scale_is_resumed_only_by_a_dynamic_scaler_from_a_dynamic_scaler(
    saved: str, now: str, is_former: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)
    before, saved_config = used_scaler(saved)
    scaler, config = used_scaler(now)
    state = before.state()
    if is_former:
        state = {name: state[name] for name in ("scale", "good_steps", "overflows_left")}
    restore_scaler(scaler, {"scaler": state, "config": saved_config.to_dict()}, config)
    if saved == now == "dynamic":
        assert (scaler.scale, scaler.good_steps, scaler.overflows_left) == (2.0**11, 1, 1)
    else:
        assert (scaler.scale, scaler.good_steps, scaler.overflows_left) == (NEW_RUN[now], 0, 2)
    changes = {"bf16": "none", "fp32": "none"}
    assert len(lines) == (changes.get(saved, saved) != changes.get(now, now))
    for line in lines:
        assert f"{NEW_RUN[now]:g}" in line or "none in" in line
        assert f"{before.scale:g}" in line or "the checkpoint has none" in line


@pytest.mark.parametrize(
    ("flags_now", "expected"),
    [("--min-scale 4096", (4096.0, 1)), ("--hysteresis 1", (2.0**11, 1)), ("--hysteresis 4", (2.0**11, 3)),
     ("--loss-scale-window 7", (2.0**11, 1))],
)  # fmt: skip
def test_a_resumed_dynamic_scale_follows_the_present_flags(flags_now: str, expected: tuple[float, int]) -> None:
    before, saved_config = used_scaler("dynamic")
    config = parse(f"{PRECISIONS['dynamic'].replace('--loss-scale-window 50', '')} {flags_now}".split(), world_size=1,
                   env={})  # fmt: skip
    scaler = make_scaler(config)
    restore_scaler(scaler, {"scaler": before.state(), "config": saved_config.to_dict()}, config)
    assert (scaler.scale, scaler.overflows_left) == expected
    assert (scaler.window, scaler.hysteresis) == (config.precision.loss_scale_window, config.precision.hysteresis)


def test_a_checkpoint_without_a_scaler_restarts_the_scale() -> None:
    """An averaged or imported checkpoint has an empty entry."""
    scaler, config = used_scaler("dynamic")
    restore_scaler(scaler, {"scaler": {}, "config": config.to_dict()}, config)
    assert scaler.scale == NEW_RUN["dynamic"]


LAYOUT_OF_RESUME = [
    pytest.param("", 1),
    pytest.param("--checkpoint-format deepspeed", 1, marks=pytest.mark.slow),
    pytest.param("--pipe-parallel-size 2", 2, marks=pytest.mark.slow),
    pytest.param("--pipe-parallel-size 2 --checkpoint-format deepspeed", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "ranks"), LAYOUT_OF_RESUME)
def test_runs_that_change_their_precision_have_the_scale_of_a_new_run(
    layout: str, ranks: int, corpus: Path, tmp_path: Path
) -> None:
    def scales(extra: str) -> list[float]:
        argv = runs.flags(corpus, tmp_path / "run", f"{extra} {layout} --eval-iters 0")
        assert runs.train_ranks(ranks, argv, allow_fp16_on_cpu)[0] == [0] * ranks
        records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
        return [r["loss_scale"] for r in records]

    again = f"--load {tmp_path / 'run'}"
    assert scales("--bf16 --train-iters 1") == [1.0]
    assert scales(f"{PRECISIONS['dynamic']} --train-iters 2 {again}")[1:] == [2.0**12]
    if layout:
        assert scales(f"{PRECISIONS['fixed']} --train-iters 3 {again}")[2:] == [128.0]
        assert scales(f"{PRECISIONS['dynamic']} --train-iters 4 {again}")[3:] == [2.0**12]
        assert scales(f"--fp32 --train-iters 5 {again}")[4:] == [1.0]
