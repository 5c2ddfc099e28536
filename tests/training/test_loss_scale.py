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
from megatron.training.step_result import make_step_result
from tests.helpers import runs, t5_runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import make_flags, trace_one_process, trace_rank

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1)]
LAYOUT_PARAMS = [pytest.param(*layout, marks=() if layout == LAYOUTS[-1] else pytest.mark.slow) for layout in LAYOUTS]
FP16 = "--fp16 --device auto"  # DS_ACCELERATOR makes it the CPU, after the check of flags that refuses fp16 there
SCALING = f"{FP16} --initial-scale-power 20 --loss-scale-window 3 --hysteresis 2"
STEPS, FEW_STEPS = 10, 6  # the scale is halved and grows again within 10; where it does neither, fewer do

StepScales = list[tuple[float, bool]]  # for each step, the loss scale that it ran with and whether it was skipped


def allow_fp16_on_cpu(rank: int) -> None:
    """What a user may not do, for its CPU kernels are slow; the numbers are right."""
    initialize.check_device_fits = lambda *_: None  # type: ignore[assignment]


def train_rank_in_fp16(
    rank: int, argv: list[str], world_size: int, steps: int, overflow_at: tuple[int, int], trace: Any = trace_rank
) -> tuple[Any, StepScales]:
    """Train in fp16; rank ``overflow_at[0]`` writes an infinity into one gradient of step ``overflow_at[1]``."""
    allow_fp16_on_cpu(rank)
    step_scales: StepScales = []
    original_step = MixedPrecisionOptimizer.step

    def watched_step(self: MixedPrecisionOptimizer, closure: None = None) -> None:
        self.raw_norm = None  # of what was there before
        if (rank, len(step_scales)) == overflow_at:
            tensor_rank = self.reducer.tensor_group.rank
            next(g for p, g in self.gradients() if is_counted_in_norm(p, tensor_rank)).view(-1)[0] = torch.inf
        scale = self.loss_scale
        original_step(self)
        step_scales.append((scale, self.overflow))

    MixedPrecisionOptimizer.step = watched_step  # type: ignore[method-assign]
    return trace(rank, argv, world_size, steps, 0), step_scales


@functools.cache
def train_in_fp16(
    tensor: int, pipe: int, data: int, extra: str = SCALING, overflow_at: tuple[int, int] = (-1, -1), steps: int = STEPS
) -> list[Any]:
    """Return (trace, seen) of each rank."""
    num_ranks = tensor * pipe * data
    return run_ranks(
        num_ranks,
        train_rank_in_fp16,
        make_flags(tensor, pipe, micro_batch_size=2, gas=2, extra=extra),
        num_ranks,
        steps,
        overflow_at,
    )


def test_overflowed_and_rejected_steps_are_reported_as_skipped() -> None:
    """The trainer counts an update, and advances the learning rate, unless the result is skipped."""

    def report(**changes: bool) -> tuple[bool, bool, bool]:
        optimizer: Any = SimpleNamespace(**{"overflow": False, "was_rejected": False, "grad_norm": 2.0, **changes})
        result = make_step_result(0.5, {}, 8.0, optimizer)
        return result.is_skipped, result.is_rejected, result.is_overflow

    assert report() == (False, False, False)
    assert report(overflow=True) == (True, False, True)
    assert report(was_rejected=True) == (True, True, False)


@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUT_PARAMS)
def test_layouts_skip_same_steps_with_same_scales_as_one_process(tensor: int, pipe: int, data: int) -> None:
    ((serial_trace, expected),) = train_in_fp16(1, 1, 1)
    assert expected[0] == (2.0**20, True), "the first steps must overflow"
    assert not all(skipped for _, skipped in expected), "and others must not"
    assert [scale for scale, _ in expected[:4]] == [2.0**20, 2.0**20, 2.0**19, 2.0**18], "no hysteresis any more"
    assert any(after > before for (before, _), (after, _) in zip(expected, expected[1:], strict=False)), "grown again"
    for trace, step_scales in train_in_fp16(tensor, pipe, data):
        assert step_scales == expected
        assert trace.losses == pytest.approx(serial_trace.losses, abs=5e-3)


def train_t5_in_fp16(tensor: int, pipe: int) -> list[Any]:
    """Return (trace, seen) of each rank that trains a T5."""
    num_ranks = tensor * pipe
    extra = f"{SCALING.replace('power 20', 'power 17')} {t5_runs.VARIANTS['v1.1']}"
    argv = t5_runs.RUNS.make_flags(tensor, pipe, micro_batch_size=2, gas=2, extra=extra)
    return run_ranks(num_ranks, train_rank_in_fp16, argv, num_ranks, STEPS, (-1, -1), t5_runs.RUNS.trace_rank)


@pytest.mark.slow  # GPT-2 in every layout, above, is the quick one
def test_t5_skips_same_steps_with_same_scales_as_one_process() -> None:
    ((serial_trace, expected),) = train_t5_in_fp16(1, 1)
    assert expected[:2] == [(2.0**17, True)] * 2 and sum(skipped for _, skipped in expected) < STEPS / 2, expected
    for trace, step_scales in train_t5_in_fp16(1, 2):
        assert step_scales == expected
        assert trace.losses == pytest.approx(serial_trace.losses, abs=5e-3)


@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUT_PARAMS)
def test_fp16_without_skipped_steps_matches_fp32(tensor: int, pipe: int, data: int) -> None:
    fp32_trace = trace_one_process(2, 2, "--fp32", steps=FEW_STEPS)
    for trace, step_scales in train_in_fp16(tensor, pipe, data, f"{FP16} --initial-scale-power 8", steps=FEW_STEPS):
        assert step_scales == [(2.0**8, False)] * FEW_STEPS
        assert trace.losses == pytest.approx(fp32_trace.losses, abs=5e-3)
        assert trace.grad_norms == pytest.approx(fp32_trace.grad_norms, rel=2e-2)


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "rank"),
    [
        pytest.param(1, 2, 1, 1, marks=pytest.mark.slow),
        (2, 2, 1, 3),
        pytest.param(2, 1, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_overflow_on_one_rank_skips_step_on_all_ranks(tensor: int, pipe: int, data: int, rank: int) -> None:
    """On the last stage alone, and on one tensor rank alone."""
    extra = f"{FP16} --initial-scale-power 8 --hysteresis 1"
    for trace, step_scales in train_in_fp16(tensor, pipe, data, extra, (rank, 2), FEW_STEPS):
        assert step_scales == [(2.0**8, False)] * 2 + [(2.0**8, True)] + [(2.0**7, False)] * (FEW_STEPS - 3)
        assert len(set(trace.losses)) == FEW_STEPS


def read_train_records(folder: Path) -> list[tuple[Any, ...]]:
    """Return of each step what resuming must not change, with losses as hexadecimal numbers."""
    fields = ("step", "learning_rate", "loss_scale", "skipped", "grad_norm")
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(float(r["loss"]).hex(), *(r[name] for name in fields)) for r in records]


def train(prefix: Path, folder: Path, extra: str = "") -> list[int]:
    argv = runs.make_flags(prefix, folder, f"--pipe-parallel-size 2 {SCALING} {extra}")
    return runs.train_ranks(2, argv, allow_fp16_on_cpu)[0]


@pytest.fixture(scope="module")
def reference_dir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not stopped."""
    folder = tmp_path_factory.mktemp("fp16") / "run"
    assert train(corpus, folder) == [0, 0]
    return folder


def test_skipped_steps_do_not_advance_learning_rate(reference_dir: Path) -> None:
    records = [r for r in read_metrics(reference_dir / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["skipped"] for r in records[:2]] == [1, 2]
    assert len({r["learning_rate"] for r in records[:3]}) == 1
    assert [r["samples"] for r in records] == [4 * step for step in range(1, 21)]
    rates = {r["step"] - r["skipped"]: r["learning_rate"] for r in records}
    assert len(set(rates.values())) > 8, "it follows the updates that were made"


@pytest.mark.parametrize(
    "exit_step", [3, pytest.param(8, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.slow)]
)
def test_loss_scale_and_counters_survive_resume(
    exit_step: int, reference_dir: Path, corpus: Path, tmp_path: Path
) -> None:
    """At 3 and 13 one of the hysteresis is used up; at 8 part of a window of good steps is over."""
    assert train(corpus, tmp_path / "cut", f"--exit-interval {exit_step}") == [75, 75]
    scaler = open_latest(tmp_path / "cut" / CHECKPOINTS, SINGLE).metadata["scaler"]
    assert scaler["good_steps"] % 3 if exit_step == 8 else scaler["overflows_left"] == 1
    assert train(corpus, tmp_path / "cut", f"--load {tmp_path / 'cut'}") == [0, 0]
    assert read_train_records(tmp_path / "cut") == read_train_records(reference_dir)


PRECISIONS = {
    "bf16": "--bf16",
    "fp32": "--fp32",
    "dynamic": f"{FP16} --initial-scale-power 12 --loss-scale-window 50",
    "fixed": f"{FP16} --loss-scale 128",
}
INITIAL_SCALES = {"bf16": 1.0, "fp32": 1.0, "dynamic": 2.0**12, "fixed": 128.0}


def make_used_scaler(precision: str) -> tuple[GradScaler, Config]:
    """Return the scaler of a run that has had one overflow, and the run's configuration."""
    config = parse(PRECISIONS[precision].split(), world_size=1, env={})
    scaler = make_scaler(config)
    for has_overflow in (True, True, False):
        scaler.update(has_overflow)
    return scaler, config


@pytest.mark.parametrize("is_former_state", [False, True], ids=["present state", "state of 8c23b9e6"])
@pytest.mark.parametrize("current_precision", PRECISIONS)
@pytest.mark.parametrize("saved_precision", PRECISIONS)
def test_loss_scale_is_restored_only_between_dynamic_scalers(
    saved_precision: str, current_precision: str, is_former_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)
    saved_scaler, saved_config = make_used_scaler(saved_precision)
    scaler, config = make_used_scaler(current_precision)
    state = saved_scaler.state()
    if is_former_state:
        state = {name: state[name] for name in ("scale", "good_steps", "overflows_left")}
    restore_scaler(scaler, {"scaler": state, "config": saved_config.to_dict()}, config)
    if saved_precision == current_precision == "dynamic":
        assert (scaler.scale, scaler.good_steps, scaler.overflows_left) == (2.0**11, 1, 1)
    else:
        assert (scaler.scale, scaler.good_steps, scaler.overflows_left) == (INITIAL_SCALES[current_precision], 0, 2)
    scaling_names = {"bf16": "none", "fp32": "none"}
    assert len(lines) == (
        scaling_names.get(saved_precision, saved_precision) != scaling_names.get(current_precision, current_precision)
    )
    for line in lines:
        assert f"{INITIAL_SCALES[current_precision]:g}" in line or "none in" in line
        assert f"{saved_scaler.scale:g}" in line or "the checkpoint has none" in line


@pytest.mark.parametrize(
    ("current_flags", "expected"),
    [("--min-scale 4096", (4096.0, 1)), ("--hysteresis 1", (2.0**11, 1)), ("--hysteresis 4", (2.0**11, 3)),
     ("--loss-scale-window 7", (2.0**11, 1))],
)  # fmt: skip
def test_resumed_dynamic_scale_uses_current_flags(current_flags: str, expected: tuple[float, int]) -> None:
    saved_scaler, saved_config = make_used_scaler("dynamic")
    precision_flags = PRECISIONS["dynamic"].replace("--loss-scale-window 50", "")
    config = parse(f"{precision_flags} {current_flags}".split(), world_size=1, env={})
    scaler = make_scaler(config)
    restore_scaler(scaler, {"scaler": saved_scaler.state(), "config": saved_config.to_dict()}, config)
    assert (scaler.scale, scaler.overflows_left) == expected
    assert (scaler.window, scaler.hysteresis) == (config.precision.loss_scale_window, config.precision.hysteresis)


def test_checkpoint_without_scaler_restarts_loss_scale() -> None:
    """An averaged or imported checkpoint has an empty entry."""
    scaler, config = make_used_scaler("dynamic")
    restore_scaler(scaler, {"scaler": {}, "config": config.to_dict()}, config)
    assert scaler.scale == INITIAL_SCALES["dynamic"]


RESUME_LAYOUTS = [
    pytest.param("", 1),
    pytest.param("--checkpoint-format deepspeed", 1, marks=pytest.mark.slow),
    pytest.param("--pipe-parallel-size 2", 2, marks=pytest.mark.slow),
    pytest.param("--pipe-parallel-size 2 --checkpoint-format deepspeed", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "num_ranks"), RESUME_LAYOUTS)
def test_precision_change_restarts_loss_scale(layout: str, num_ranks: int, corpus: Path, tmp_path: Path) -> None:
    def scales(extra: str) -> list[float]:
        argv = runs.make_flags(corpus, tmp_path / "run", f"{extra} {layout} --eval-iters 0")
        assert runs.train_ranks(num_ranks, argv, allow_fp16_on_cpu)[0] == [0] * num_ranks
        records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
        return [r["loss_scale"] for r in records]

    load_flag = f"--load {tmp_path / 'run'}"
    assert scales("--bf16 --train-iters 1") == [1.0]
    assert scales(f"{PRECISIONS['dynamic']} --train-iters 2 {load_flag}")[1:] == [2.0**12]
    if layout:
        assert scales(f"{PRECISIONS['fixed']} --train-iters 3 {load_flag}")[2:] == [128.0]
        assert scales(f"{PRECISIONS['dynamic']} --train-iters 4 {load_flag}")[3:] == [2.0**12]
        assert scales(f"--fp32 --train-iters 5 {load_flag}")[4:] == [1.0]
