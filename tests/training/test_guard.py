"""Steps with bad numbers: what ends a run, what is left out, when a run goes back, and that all ranks do the same."""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME
from megatron.config import parse
from megatron.errors import ConfigError
from megatron.mpu import is_counted_in_norm
from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.shard import set_partial
from megatron.mpu.topology import Topology
from megatron.optim import MixedPrecisionOptimizer
from megatron.optim.grad_scaler import GradScaler
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.callbacks.running_statistics import MIN_SPREAD, RunningStatistics
from megatron.training.callbacks.stability_guard import StabilityGuard
from megatron.training.callbacks.stability_journal import JOURNAL_NAME, EventLog, read_journal
from megatron.training.step_samples import StepSamples
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.training.guarded import GRID_FLAGS, scale_losses, train
from tests.training.test_loss_scale import FP16, allow_fp16_on_cpu

GUARD_FLAGS = "--stability-guard skip --stability-patience 3 --drift-interval 1"  # whose copies agree to the bit
ROLLBACK_FLAGS = "--stability-guard rollback --stability-patience 2 --save-interval 3"


def read_train_records(folder: Path) -> list[tuple[Any, ...]]:
    """Return of each training record what going on must not change, with losses as hexadecimal numbers."""
    train_records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    loss_hexes = [None if r["loss"] is None else float(r["loss"]).hex() for r in train_records]
    return [
        (r["step"], h, r["learning_rate"], r["samples"], r["skipped"])
        for r, h in zip(train_records, loss_hexes, strict=True)
    ]


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=30), st.floats(0.5, 20), st.integers(4, 12))
@settings(max_examples=50, deadline=None)
def test_limit_is_mean_plus_sigma_deviations_of_window(values: list[float], sigma: float, window_size: int) -> None:
    recent = RunningStatistics(window_size, sigma)
    for value in values:
        recent.add(value)
    window = values[-window_size:]
    if len(window) * 2 < window_size:
        assert recent.limit() == math.inf
        return
    spread = max(statistics.pstdev(window), MIN_SPREAD * abs(statistics.fmean(window)))
    assert recent.limit() == pytest.approx(statistics.fmean(window) + sigma * spread, rel=1e-9, abs=1e-6)


def test_nonfinite_value_is_anomalous_and_excluded_from_statistics() -> None:
    recent = RunningStatistics(4, 3.0)
    for value in (1.0, math.nan, math.inf):
        recent.add(value)
    assert list(recent.values) == [1.0]
    assert recent.problem("loss", math.nan) == recent.problem("loss", math.inf) == "the loss is not finite"
    assert recent.problem("loss", 1e9) is None, "too few to judge by"
    recent.add(1.0)
    text = "the loss 1.01 is above 1.003, 3 standard deviations above the mean of the last 2 values"
    assert recent.problem("loss", 1.01) == text
    assert recent.problem("loss", 1.002) is None and recent.problem("loss", -1e9) is None


def test_step_samples_name_samples_of_each_replica() -> None:
    step = StepSamples(7, first=100, num_samples=24, micro_batch_size=3, replicas=2)
    assert step.text == "samples 100-123" and step.num_micro_batches == 4
    assert step.micro_batch_text(0, 0) == "samples 100-102" and step.micro_batch_text(1, 2) == "samples 118-120"
    assert StepSamples(1, 5, 2, 1, 2).micro_batch_text(1, 0) == "sample 6"


@pytest.mark.parametrize(
    ("layout", "num_ranks", "faulty_rank", "sample_text"),
    [pytest.param("", 2, 1, "samples 14-15", marks=pytest.mark.slow), (GRID_FLAGS, 4, 2, "samples 6-7")],
    ids=["replicas", "tensor and pipe"],
)
def test_nonfinite_loss_ends_all_ranks_before_update_with_location(
    layout: str, num_ranks: int, faulty_rank: int, sample_text: str, corpus: Path, tmp_path: Path
) -> None:
    """Row N01: step, rank, micro-batch and samples; the weights are as before."""
    first_sample = 8 if num_ranks == 2 else 4
    results = train(
        num_ranks,
        corpus,
        tmp_path / "run",
        layout,
        scale_losses([first_sample], math.nan, faulty_rank=faulty_rank, faulty_micro_batch=1),
    )
    samples = f"samples {first_sample}-{2 * first_sample - 1}"
    for rank, result in enumerate(results):
        name = "gradient norm" if layout and rank % 2 else "loss"  # of the other tensor rank only gradients are bad
        assert result.error.startswith(f"step 2 ({samples}): the {name} must be finite, got nan. The step did not")
        assert result.digests[-1] == result.digests[-2] != result.digests[0]
        assert result.is_of_this_rank == (rank == faulty_rank or name != "loss")
    assert f"On this rank, the loss of micro-batch 1 ({sample_text}) is not finite." in results[faulty_rank].error


def inject_inf_gradient(rank: int) -> None:
    """Plant: the second step finds an infinity in one gradient of rank 1, on the last stage."""
    original_step, calls = MixedPrecisionOptimizer.step, []

    def faulty_step(self: MixedPrecisionOptimizer, closure: None = None) -> None:
        calls.append(None)
        self.raw_norm = None  # of what was there before
        if rank == 1 and len(calls) == 2:
            next(g for p, g in self.gradients() if is_counted_in_norm(p, 0)).view(-1)[0] = torch.inf
        original_step(self)

    MixedPrecisionOptimizer.step = faulty_step  # type: ignore[method-assign]


def test_nonfinite_gradient_on_one_rank_ends_all_before_update(corpus: Path, tmp_path: Path) -> None:
    """Row N02."""
    results = train(2, corpus, tmp_path / "run", "--pipe-parallel-size 2", inject_inf_gradient)
    assert [result.is_of_this_rank for result in results] == [False, True]
    for result in results:
        assert result.error.startswith("step 2 (samples 4-7): the gradient norm must be finite, got ")
        assert result.digests[-1] == result.digests[-2]
    assert "On this rank, the gradient of layers.1.attention.query_key_value.weight is not finite." in results[1].error


def test_spike_without_guard_is_logged_with_samples(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Row N06."""
    (result,) = train(1, corpus, tmp_path / "run", "--train-iters 6", scale_losses([16], 1e3))
    lines = [line for line in capfd.readouterr().out.splitlines() if "| spike: " in line]
    assert len(lines) == 1 and lines[0].startswith("step 5 | spike: the loss ") and lines[0].endswith("| samples 16-19")
    assert len(set(result.digests)) == 6, "every step moved the weights"
    assert not (tmp_path / "run" / JOURNAL_NAME).exists()


@pytest.mark.parametrize(
    ("layout", "num_ranks", "factor"),
    [
        pytest.param("", 2, math.nan, marks=pytest.mark.slow),
        pytest.param(GRID_FLAGS, 4, 1e3, marks=pytest.mark.slow),
        pytest.param("", 2, 1e3, marks=pytest.mark.slow),
        (GRID_FLAGS, 4, math.nan),
        *(
            pytest.param(f"--pipe-parallel-size 2 {zero_flags}", 4, factor, marks=pytest.mark.slow)
            for zero_flags, factor in (("--zero-stage 2", math.nan), ("--zero-stage 3 --drift-interval 0", 1e3))
        ),
    ],
    ids=["replicas no number", "grid spike", "replicas spike", "grid no number", "ZeRO 2 no number", "ZeRO 3 spike"],
)
def test_anomalous_step_is_skipped_on_all_ranks(
    layout: str, num_ranks: int, factor: float, corpus: Path, tmp_path: Path
) -> None:
    """Rows N05 and E18: weights and moments stand still, samples count, the learning rate waits."""
    samples_per_step = 4 if layout == GRID_FLAGS else 8
    fault = scale_losses([4 * samples_per_step], factor, faulty_rank=num_ranks - 1)
    results = train(
        num_ranks, corpus, tmp_path / "run", f"{GUARD_FLAGS} {layout} --train-iters 7 --log-layer-norms", fault
    )
    for result in results:
        assert result.first_samples == [samples_per_step * step for step in range(7)] and not result.error
        assert result.digests[4] == result.digests[5] and len(set(result.digests)) == 6
        assert result.learning_rates[4] == result.learning_rates[5] != result.learning_rates[6]
    assert [record[4] for record in read_train_records(tmp_path / "run")] == [0] * 4 + [1] * 3
    (record,) = read_journal(tmp_path / "run" / JOURNAL_NAME)
    assert (record["event"], record["step"]) == ("skipped", 5)
    assert (record["first_sample"], record["last_sample"]) == (4 * samples_per_step, 5 * samples_per_step - 1)
    assert ("not finite" in record["reason"]) == (record["loss"] is None) == math.isnan(factor)
    assert (record["grad_norm"] is None) == math.isnan(factor), "its gradients were thrown away"
    steps = [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "layer_norms" in r]
    assert steps == [step for step in range(1, 8) if step != 5 or not math.isnan(factor)]


def attach_guard(guard: StabilityGuard, optimizer: Any, grid: Grid) -> None:
    """Let ``guard`` judge the steps of ``optimizer``."""
    world = World("cpu", torch.device("cpu"), grid, 0)
    engine, progress = SimpleNamespace(optimizer=optimizer), TrainProgress()
    folder = Path(tempfile.mkdtemp())
    trainer: Any = SimpleNamespace(
        engine=engine, world=world, progress=progress, folder=folder, find=lambda callback_type: None
    )
    guard.trainer = trainer
    guard.on_train_start()


def judge_steps_on_rank(rank: int) -> list[Any]:
    guard = StabilityGuard(parse(GUARD_FLAGS.split(), world_size=1).stability)
    guard.losses, guard.norms = RunningStatistics(4, 3.0, [1.0] * 4), RunningStatistics(4, 3.0, [1.0] * 4)
    discarded: list[None] = []
    optimizer: Any = SimpleNamespace(policy=SimpleNamespace(), zero_grad=lambda: discarded.append(None))
    attach_guard(guard, optimizer, build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank))
    accepted = []
    for loss, norm in ((1.0, 1.0), (1.0, 1.0 + rank), (9.0 - 8.0 * rank, 1.0), (math.nan if rank else 1.0, 1.0)):
        guard.on_before_update(loss)
        accepted.append(optimizer.policy.accepts_step(norm))
    return [*accepted, len(discarded)]


def test_anomaly_on_one_rank_is_anomaly_on_all_ranks() -> None:
    assert run_ranks(2, judge_steps_on_rank) == [[True, False, False, False, 1]] * 2


def step_on_rank(rank: int, is_fp16: bool) -> tuple[bool, bool, list[float], float]:
    """Take a step whose loss is no number on tensor rank 1 alone."""
    grid = build_grid(Topology.from_world_size(2, tensor=2, pipe=1), rank)
    weights = [torch.nn.Parameter(torch.ones(2)), set_partial(torch.nn.Parameter(torch.ones(2)))]
    optimizer = MixedPrecisionOptimizer(
        [{"params": weights}], lambda groups: torch.optim.SGD(groups, lr=1.0), model=grid.model, tensor=grid.tensor,
        scaler=GradScaler(64.0, is_dynamic=True, window=1, hysteresis=1) if is_fp16 else None,
    )  # fmt: skip
    guard = StabilityGuard(parse(GUARD_FLAGS.split(), world_size=1).stability)
    attach_guard(guard, optimizer, grid)
    for weight in weights:
        weight.grad = torch.full((2,), math.nan if rank else 1.0)
    optimizer.raw_norm = optimizer.norm_of_sums().item()
    guard.on_before_update(math.nan if rank else 1.0)
    optimizer.step()
    return optimizer.was_rejected, optimizer.overflow, torch.cat(weights).tolist(), optimizer.loss_scale


@pytest.mark.parametrize("is_fp16", [False, True], ids=["fp32", "fp16"])
def test_nan_loss_on_one_tensor_rank_is_skipped_on_all_ranks(is_fp16: bool) -> None:
    assert run_ranks(2, step_on_rank, is_fp16) == [(True, False, [1.0] * 4, 64.0 if is_fp16 else 1.0)] * 2


def test_too_many_consecutive_anomalous_steps_end_run_with_advice(corpus: Path, tmp_path: Path) -> None:
    results = train(1, corpus, tmp_path / "run", GUARD_FLAGS, scale_losses([4, 12, 16, 20], math.nan))
    assert results[0].steps == [0, 1, 2, 3, 4, 5], "a good one in between starts the count anew"
    for result in results:
        assert result.error.startswith(
            "fewer than --stability-patience 3 consecutive steps may be anomalous, got that many up to step 6"
        )
        assert "(samples 20-23): the loss is not finite." in result.error and not result.is_of_this_rank
        assert "--stability-guard rollback returns" in result.error
    assert [record["step"] for record in read_journal(tmp_path / "run" / JOURNAL_NAME)] == [2, 4, 5, 6]


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        ("--pipe-parallel-size 2", 2),
        pytest.param("--async-save", 1, marks=pytest.mark.slow),
        pytest.param(f"--async-save {GRID_FLAGS}", 4, marks=pytest.mark.slow),
        pytest.param(GRID_FLAGS, 4, marks=pytest.mark.slow),
    ],
    ids=["pipe", "async", "async, tensor and pipe", "tensor and pipe"],
)
def test_anomalous_steps_roll_back_and_skip_their_samples(
    layout: str, num_ranks: int, corpus: Path, tmp_path: Path
) -> None:
    """Going back from step 8 to 6: samples 24-31 are left out, and steps 7 and on come again with other data."""
    results = train(num_ranks, corpus, tmp_path / "run", f"{layout} {ROLLBACK_FLAGS}", scale_losses([24, 28], math.nan))
    for result in results:
        assert result.steps == [0, 1, 2, 3, 4, 5, 6, 7, *range(6, 12)]
        assert result.first_samples == [4 * n for n in (*range(8), *range(8, 14))]
        assert (
            result.digests[6] == result.digests[7] == result.digests[8]
            and result.learning_rates[6] == result.learning_rates[8]
        )
    assert [record[0] for record in read_train_records(tmp_path / "run")] == list(range(1, 13)), "no step is told twice"
    journal = read_journal(tmp_path / "run" / JOURNAL_NAME)
    assert [(r["number"], r["event"], r["step"]) for r in journal] == [
        (1, "skipped", 7), (2, "skipped", 8), (3, "went back", 8),
    ]  # fmt: skip
    assert (journal[2]["to_step"], journal[2]["first_sample"], journal[2]["last_sample"]) == (6, 24, 31)


@pytest.mark.parametrize("exit_step", [pytest.param(4, marks=pytest.mark.slow), 8], ids=["ahead", "in between"])
def test_resumed_run_rolls_back_like_uninterrupted_run(exit_step: int, corpus: Path, tmp_path: Path) -> None:
    """The window, the count of bad steps and the journal are part of a checkpoint; the way back is not deleted."""
    fault, rollback_flags = scale_losses([28, 32], 1e3), f"{ROLLBACK_FLAGS} --save-interval 4 --keep-last 1"
    train(1, corpus, tmp_path / "whole", rollback_flags, fault)
    reference_journal = read_journal(tmp_path / "whole" / JOURNAL_NAME)
    assert [r["event"] for r in reference_journal] == ["skipped", "skipped", "went back"] and reference_journal[2][
        "to_step"
    ] == 4
    resumed_dir = tmp_path / "cut"
    assert train(1, corpus, resumed_dir, f"{rollback_flags} --exit-interval {exit_step}", fault)[0].was_stopped
    train(1, corpus, resumed_dir, f"{rollback_flags} --load {resumed_dir}", fault)
    assert read_journal(resumed_dir / JOURNAL_NAME) == reference_journal
    assert read_train_records(resumed_dir) == read_train_records(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("file_name", ["rank-00000.safetensors", MANIFEST_NAME])
def test_rollback_skips_damaged_newest_checkpoint_twice(file_name: str, corpus: Path, tmp_path: Path) -> None:
    """Both checkpoints of step 6 are damaged before the run goes back to them: it goes back to step 3 each time.

    All samples since step 3 are left out then, those of good steps too.
    """
    inject_nan, folder = scale_losses([24, 28, 44, 48], math.nan), tmp_path / "run"

    def patch_rank(rank: int) -> None:
        inject_nan(rank)
        original_roll_back = Checkpointer.roll_back

        def damage_and_roll_back(self: Checkpointer, up_to_step: int) -> Path:
            newest = max((folder / CHECKPOINTS).glob("step-00000006*"))
            content = (newest / file_name).read_bytes()
            (newest / file_name).write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
            return original_roll_back(self, up_to_step)

        Checkpointer.roll_back = damage_and_roll_back  # type: ignore[method-assign]

    (result,) = train(1, corpus, folder, ROLLBACK_FLAGS, patch_rank)
    assert not result.error
    assert result.steps == [*range(8), *range(3, 8), *range(3, 12)]
    assert result.first_samples == [4 * n for n in range(8 + 5 + 9)]
    assert result.digests[3] == result.digests[8] == result.digests[13]
    journal = read_journal(folder / JOURNAL_NAME)
    assert [r["number"] for r in journal] == [1, 2, 3, 4, 5, 6]
    rollbacks = [r for r in journal if r["event"] == "went back"]
    assert [(r["step"], r["to_step"], r["first_sample"], r["last_sample"]) for r in rollbacks] == [
        (8, 3, 12, 31), (8, 3, 12, 51),
    ]  # fmt: skip
    assert [record[0] for record in read_train_records(folder)] == list(range(1, 13)), "no step is told twice"


def test_rollback_may_load_checkpoint_of_source_run(corpus: Path, tmp_path: Path) -> None:
    source_dir, run_dir = tmp_path / "one", tmp_path / "other"
    assert train(1, corpus, source_dir, f"{ROLLBACK_FLAGS} --exit-interval 6")[0].was_stopped
    (result,) = train(
        1, corpus, run_dir, f"{ROLLBACK_FLAGS} --save-interval 99 --load {source_dir}", scale_losses([24, 28], math.nan)
    )
    assert result.steps == [6, 7, *range(6, 12)] and not result.error
    assert read_journal(run_dir / JOURNAL_NAME)[2]["to_step"] == 6


def test_repeated_unsuccessful_rollbacks_end_run(corpus: Path, tmp_path: Path) -> None:
    (result,) = train(
        1, corpus, tmp_path / "run", f"{ROLLBACK_FLAGS} --train-iters 99", scale_losses(range(16, 999), math.nan)
    )
    assert "The run has already rolled back to " in result.error and "3 times without success" in result.error
    assert result.steps == [0, 1, 2, 3, 4, 5, *[3, 4] * 3]


def test_missing_rollback_checkpoint_is_reported(corpus: Path, tmp_path: Path) -> None:
    results = train(1, corpus, tmp_path / "run", f"{ROLLBACK_FLAGS} --save-interval 9", scale_losses([8, 12], math.nan))
    assert all("There is no checkpoint to roll back to: " in result.error for result in results)


def test_nan_loss_is_not_overflow_and_preserves_loss_scale(corpus: Path, tmp_path: Path) -> None:
    def patch_rank(rank: int) -> None:
        allow_fp16_on_cpu(rank)
        scale_losses([8], math.nan)(rank)

    flags = f"{FP16} --initial-scale-power 6 --hysteresis 1 --pipe-parallel-size 2 --train-iters 4 {GUARD_FLAGS}"
    for result in train(2, corpus, tmp_path / "run", flags, patch_rank):
        assert result.loss_scales == [64.0] * 4 and result.digests[2] == result.digests[3] != result.digests[1]
    assert [r["step"] for r in read_journal(tmp_path / "run" / JOURNAL_NAME)] == [3]


def test_persistent_overflows_end_run_with_advice(corpus: Path, tmp_path: Path) -> None:
    """Row N04: as many steps as the loss scale can be halved, and hysteresis grants."""

    def patch_rank(rank: int) -> None:
        allow_fp16_on_cpu(rank)
        original_step = MixedPrecisionOptimizer.step

        def overflowing_step(self: MixedPrecisionOptimizer, closure: None = None) -> None:
            self.raw_norm = None  # of what was there before
            next(g for p, g in self.gradients() if is_counted_in_norm(p, 0)).view(-1)[0] = torch.inf
            original_step(self)

        MixedPrecisionOptimizer.step = overflowing_step  # type: ignore[method-assign]

    flags = f"{FP16} --initial-scale-power 3 --hysteresis 2 --train-iters 99"
    for result in train(1, corpus, tmp_path / "run", flags, patch_rank):
        assert result.loss_scales == [8.0, 8.0, 4.0, 2.0, 1.0]
        assert "step 5 (samples 16-19): overflow at the smallest loss scale (1)" in result.error
        assert "Lower --lr or use bf16" in result.error


@pytest.mark.parametrize("clip", [0.0, 1.0, math.inf])
def test_zero_gradients_produce_finite_updates(clip: float) -> None:
    """Row N09."""
    weight = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [weight]}]
    optimizer = MixedPrecisionOptimizer(groups, lambda g: torch.optim.SGD(g, lr=1.0), clip_grad=clip)
    for gradient, expected in ((0.0, 1.0), (0.25, 0.75)):
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
        assert torch.equal(weight, torch.full((3,), expected)) and not optimizer.overflow


def test_journal_is_truncated_to_checkpoint_and_retries_failed_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = EventLog(tmp_path)
    assert not journal.path.exists()
    for event_idx in (1, 2, 3):
        journal.add({"number": event_idx, "event": "skipped"})
    assert [r["number"] for r in read_journal(journal.path)] == [1, 2, 3]
    resumed_journal = EventLog(tmp_path, num_known=1)
    assert read_journal(journal.path) == [{"number": 1, "event": "skipped"}]
    monkeypatch.setattr("megatron.files.replace_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    resumed_journal.add({"number": 2, "event": "skipped"})
    monkeypatch.undo()
    resumed_journal.add({"number": 3, "event": "skipped"})
    assert [r["number"] for r in read_journal(journal.path)] == [1, 2, 3], "the disk had room again"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stability-patience 3", "has no effect without --stability-guard skip or rollback"),
        ("--stability-guard rollback --save-interval-minutes 0", "needs a checkpoint of this run"),
        ("--stability-guard maybe", "one of off, skip, rollback"),
        ("--stability-window 2", "--stability-window must be an integer of at least 4"),
        ("--eval-only --load x --drift-interval 5", "applies to training only"),
    ],
)
def test_flag_without_effect_is_rejected(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags.split(), world_size=1)
