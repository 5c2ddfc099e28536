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
from megatron.training.callbacks.running_statistics import SMALLEST_SPREAD, RunningStatistics
from megatron.training.callbacks.stability_guard import StabilityGuard
from megatron.training.callbacks.stability_journal import NAME, EventLog, read_journal
from megatron.training.step_samples import StepSamples
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.training.guarded import GRID, spoil, train
from tests.training.test_loss_scale import FP16, allow_fp16_on_cpu

GUARDED = "--stability-guard skip --stability-patience 3 --drift-interval 1"  # whose copies agree to the bit
BACK = "--stability-guard rollback --stability-patience 2 --save-interval 3"


def records(folder: Path) -> list[tuple[Any, ...]]:
    """Return of each training record what going on must not change, with losses as hexadecimal numbers."""
    found = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    hexes = [None if r["loss"] is None else float(r["loss"]).hex() for r in found]
    return [(r["step"], h, r["learning_rate"], r["samples"], r["skipped"]) for r, h in zip(found, hexes, strict=True)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=30), st.floats(0.5, 20), st.integers(4, 12))
@settings(max_examples=50, deadline=None)
def test_the_limit_is_the_mean_and_so_many_deviations_of_the_last_values(
    values: list[float], sigma: float, size: int
) -> None:
    recent = RunningStatistics(size, sigma)
    for value in values:
        recent.add(value)
    last = values[-size:]
    if len(last) * 2 < size:
        assert recent.limit() == math.inf
        return
    spread = max(statistics.pstdev(last), SMALLEST_SPREAD * abs(statistics.fmean(last)))
    assert recent.limit() == pytest.approx(statistics.fmean(last) + sigma * spread, rel=1e-9, abs=1e-6)


def test_a_value_that_is_not_finite_is_bad_from_the_start_and_never_counts() -> None:
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


def test_samples_are_named_as_replicas_read_them() -> None:
    step = StepSamples(7, first=100, count=24, micro_batch_size=3, replicas=2)
    assert step.text == "samples 100-123" and step.num_micro_batches == 4
    assert step.of_micro_batch(0, 0) == "samples 100-102" and step.of_micro_batch(1, 2) == "samples 118-120"
    assert StepSamples(1, 5, 2, 1, 2).of_micro_batch(1, 0) == "sample 6"


@pytest.mark.parametrize(
    ("layout", "ranks", "hit", "where"),
    [pytest.param("", 2, 1, "samples 14-15", marks=pytest.mark.slow), (GRID, 4, 2, "samples 6-7")],
    ids=["replicas", "tensor and pipe"],
)
def test_a_loss_that_is_not_finite_ends_all_ranks_before_the_update_and_is_placed(
    layout: str, ranks: int, hit: int, where: str, corpus: Path, tmp_path: Path
) -> None:
    """Row N01: step, rank, micro-batch and samples; the weights are as before."""
    first = 8 if ranks == 2 else 4
    seen = train(ranks, corpus, tmp_path / "run", layout, spoil([first], math.nan, rank_hit=hit, micro_hit=1))
    samples = f"samples {first}-{2 * first - 1}"
    for rank, one in enumerate(seen):
        name = "gradient norm" if layout and rank % 2 else "loss"  # of the other tensor rank only gradients are bad
        assert one.error.startswith(f"step 2 ({samples}): the {name} must be finite, got nan. The step did not")
        assert one.digests[-1] == one.digests[-2] != one.digests[0]
        assert one.is_of_this_rank == (rank == hit or name != "loss")
    assert f"On this rank, the loss of micro-batch 1 ({where}) is not finite." in seen[hit].error


def infinite_gradient(rank: int) -> None:
    """Plant: the second step finds an infinity in one gradient of rank 1, on the last stage."""
    step, taken = MixedPrecisionOptimizer.step, []

    def hit_step(self: MixedPrecisionOptimizer, closure: None = None) -> None:
        taken.append(None)
        self.raw_norm = None  # of what was there before
        if rank == 1 and len(taken) == 2:
            next(g for p, g in self.gradients() if is_counted_in_norm(p, 0)).view(-1)[0] = torch.inf
        step(self)

    MixedPrecisionOptimizer.step = hit_step  # type: ignore[method-assign]


def test_a_gradient_that_is_not_finite_on_one_rank_ends_all_before_the_update(corpus: Path, tmp_path: Path) -> None:
    """Row N02."""
    seen = train(2, corpus, tmp_path / "run", "--pipe-parallel-size 2", infinite_gradient)
    assert [one.is_of_this_rank for one in seen] == [False, True]
    for one in seen:
        assert one.error.startswith("step 2 (samples 4-7): the gradient norm must be finite, got ")
        assert one.digests[-1] == one.digests[-2]
    assert "On this rank, the gradient of layers.1.attention.query_key_value.weight is not finite." in seen[1].error


def test_without_the_guard_a_spike_is_told_with_its_samples_and_trained_on(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Row N06."""
    (seen,) = train(1, corpus, tmp_path / "run", "--train-iters 6", spoil([16], 1e3))
    lines = [line for line in capfd.readouterr().out.splitlines() if "| spike: " in line]
    assert len(lines) == 1 and lines[0].startswith("step 5 | spike: the loss ") and lines[0].endswith("| samples 16-19")
    assert len(set(seen.digests)) == 6, "every step moved the weights"
    assert not (tmp_path / "run" / NAME).exists()


@pytest.mark.parametrize(
    ("layout", "ranks", "factor"),
    [
        pytest.param("", 2, math.nan, marks=pytest.mark.slow),
        pytest.param(GRID, 4, 1e3, marks=pytest.mark.slow),
        pytest.param("", 2, 1e3, marks=pytest.mark.slow),
        (GRID, 4, math.nan),
    ],
    ids=["replicas no number", "grid spike", "replicas spike", "grid no number"],
)
def test_a_bad_step_is_left_out_on_all_ranks(
    layout: str, ranks: int, factor: float, corpus: Path, tmp_path: Path
) -> None:
    """Rows N05 and E18: weights and moments stand still, samples count, the learning rate waits."""
    count = 8 if ranks == 2 else 4
    plant = spoil([4 * count], factor, rank_hit=ranks - 1)
    seen = train(ranks, corpus, tmp_path / "run", f"{layout} {GUARDED} --train-iters 7 --log-layer-norms", plant)
    for one in seen:
        assert one.firsts == [count * step for step in range(7)] and not one.error
        assert one.digests[4] == one.digests[5] and len(set(one.digests)) == 6
        assert one.rates[4] == one.rates[5] != one.rates[6]
    assert [record[4] for record in records(tmp_path / "run")] == [0] * 4 + [1] * 3
    (record,) = read_journal(tmp_path / "run" / NAME)
    assert (record["event"], record["step"]) == ("skipped", 5)
    assert (record["first_sample"], record["last_sample"]) == (4 * count, 5 * count - 1)
    assert ("not finite" in record["reason"]) == (record["loss"] is None) == math.isnan(factor)
    assert (record["grad_norm"] is None) == math.isnan(factor), "its gradients were thrown away"
    steps = [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "layer_norms" in r]
    assert steps == [step for step in range(1, 8) if step != 5 or not math.isnan(factor)]


def attach(guard: StabilityGuard, optimizer: Any, grid: Grid) -> None:
    """Let ``guard`` judge the steps of ``optimizer``."""
    world = World("cpu", torch.device("cpu"), grid, 0)
    engine, progress = SimpleNamespace(optimizer=optimizer), TrainProgress()
    folder = Path(tempfile.mkdtemp())
    made: Any = SimpleNamespace(engine=engine, world=world, progress=progress, folder=folder, find=lambda kind: None)
    guard.trainer = made
    guard.on_train_start()


def judge_alone(rank: int) -> list[Any]:
    guard = StabilityGuard(parse(GUARDED.split(), world_size=1).stability)
    guard.losses, guard.norms = RunningStatistics(4, 3.0, [1.0] * 4), RunningStatistics(4, 3.0, [1.0] * 4)
    thrown_away: list[None] = []
    optimizer: Any = SimpleNamespace(policy=SimpleNamespace(), zero_grad=lambda: thrown_away.append(None))
    attach(guard, optimizer, build_grid(Topology.of_world(2, tensor=1, pipe=1), rank))
    allowed = []
    for loss, norm in ((1.0, 1.0), (1.0, 1.0 + rank), (9.0 - 8.0 * rank, 1.0), (math.nan if rank else 1.0, 1.0)):
        guard.on_before_update(loss)
        allowed.append(optimizer.policy.accepts_step(norm))
    return [*allowed, len(thrown_away)]


def test_what_one_rank_finds_bad_is_bad_for_all() -> None:
    assert run_ranks(2, judge_alone) == [[True, False, False, False, 1]] * 2


def step_alone(rank: int, is_fp16: bool) -> tuple[bool, bool, list[float], float]:
    """Take a step whose loss is no number on tensor rank 1 alone."""
    grid = build_grid(Topology.of_world(2, tensor=2, pipe=1), rank)
    weights = [torch.nn.Parameter(torch.ones(2)), set_partial(torch.nn.Parameter(torch.ones(2)))]
    optimizer = MixedPrecisionOptimizer(
        [{"params": weights}], lambda groups: torch.optim.SGD(groups, lr=1.0), model=grid.model, tensor=grid.tensor,
        scaler=GradScaler(64.0, is_dynamic=True, window=1, hysteresis=1) if is_fp16 else None,
    )  # fmt: skip
    guard = StabilityGuard(parse(GUARDED.split(), world_size=1).stability)
    attach(guard, optimizer, grid)
    for weight in weights:
        weight.grad = torch.full((2,), math.nan if rank else 1.0)
    optimizer.raw_norm = optimizer.norm_of_sums().item()
    guard.on_before_update(math.nan if rank else 1.0)
    optimizer.step()
    return optimizer.was_refused, optimizer.overflow, torch.cat(weights).tolist(), optimizer.loss_scale


@pytest.mark.parametrize("is_fp16", [False, True], ids=["fp32", "fp16"])
def test_a_loss_that_is_no_number_on_one_tensor_rank_is_left_out_on_all(is_fp16: bool) -> None:
    assert run_ranks(2, step_alone, is_fp16) == [(True, False, [1.0] * 4, 64.0 if is_fp16 else 1.0)] * 2


def test_too_many_bad_steps_in_a_row_end_the_run_with_advice(corpus: Path, tmp_path: Path) -> None:
    seen = train(1, corpus, tmp_path / "run", GUARDED, spoil([4, 12, 16, 20], math.nan))
    assert seen[0].steps == [0, 1, 2, 3, 4, 5], "a good one in between starts the count anew"
    for one in seen:
        assert one.error.startswith(
            "fewer than --stability-patience 3 consecutive steps may be anomalous, got that many up to step 6"
        )
        assert "(samples 20-23): the loss is not finite." in one.error and not one.is_of_this_rank
        assert "--stability-guard rollback returns" in one.error
    assert [record["step"] for record in read_journal(tmp_path / "run" / NAME)] == [2, 4, 5, 6]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("--pipe-parallel-size 2", 2),
        pytest.param("--async-save", 1, marks=pytest.mark.slow),
        pytest.param(f"--async-save {GRID}", 4, marks=pytest.mark.slow),
        pytest.param(GRID, 4, marks=pytest.mark.slow),
    ],
    ids=["pipe", "async", "async, tensor and pipe", "tensor and pipe"],
)
def test_bad_steps_lead_back_to_a_good_checkpoint_and_behind_their_data(
    layout: str, ranks: int, corpus: Path, tmp_path: Path
) -> None:
    """Going back from step 8 to 6: samples 24-31 are left out, and steps 7 and on come again with other data."""
    seen = train(ranks, corpus, tmp_path / "run", f"{layout} {BACK}", spoil([24, 28], math.nan))
    for one in seen:
        assert one.steps == [0, 1, 2, 3, 4, 5, 6, 7, *range(6, 12)]
        assert one.firsts == [4 * n for n in (*range(8), *range(8, 14))]
        assert one.digests[6] == one.digests[7] == one.digests[8] and one.rates[6] == one.rates[8]
    assert [record[0] for record in records(tmp_path / "run")] == list(range(1, 13)), "no step is told twice"
    journal = read_journal(tmp_path / "run" / NAME)
    assert [(r["number"], r["event"], r["step"]) for r in journal] == [
        (1, "skipped", 7), (2, "skipped", 8), (3, "went back", 8),
    ]  # fmt: skip
    assert (journal[2]["to_step"], journal[2]["first_sample"], journal[2]["last_sample"]) == (6, 24, 31)


@pytest.mark.parametrize("stop", [pytest.param(4, marks=pytest.mark.slow), 8], ids=["ahead", "in between"])
def test_a_stopped_run_goes_back_where_an_undisturbed_one_does(stop: int, corpus: Path, tmp_path: Path) -> None:
    """The window, the count of bad steps and the journal are part of a checkpoint; the way back is not deleted."""
    plant, back = spoil([28, 32], 1e3), f"{BACK} --save-interval 4 --keep-last 1"
    train(1, corpus, tmp_path / "whole", back, plant)
    whole = read_journal(tmp_path / "whole" / NAME)
    assert [r["event"] for r in whole] == ["skipped", "skipped", "went back"] and whole[2]["to_step"] == 4
    cut = tmp_path / "cut"
    assert train(1, corpus, cut, f"{back} --exit-interval {stop}", plant)[0].was_stopped
    train(1, corpus, cut, f"{back} --load {cut}", plant)
    assert read_journal(cut / NAME) == whole
    assert records(cut) == records(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rank-00000.safetensors", MANIFEST_NAME])
def test_the_way_back_leads_past_a_damaged_newest_checkpoint_twice(file: str, corpus: Path, tmp_path: Path) -> None:
    """Both checkpoints of step 6 are damaged before the run goes back to them: it goes back to step 3 each time.

    All samples since step 3 are left out then, those of good steps too.
    """
    bad, folder = spoil([24, 28, 44, 48], math.nan), tmp_path / "run"

    def plant(rank: int) -> None:
        bad(rank)
        roll_back = Checkpointer.roll_back

        def damaged_first(self: Checkpointer, up_to_step: int) -> Path:
            newest = max((folder / CHECKPOINTS).glob("step-00000006*"))
            content = (newest / file).read_bytes()
            (newest / file).write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
            return roll_back(self, up_to_step)

        Checkpointer.roll_back = damaged_first  # type: ignore[method-assign]

    (seen,) = train(1, corpus, folder, BACK, plant)
    assert not seen.error
    assert seen.steps == [*range(8), *range(3, 8), *range(3, 12)]
    assert seen.firsts == [4 * n for n in range(8 + 5 + 9)]
    assert seen.digests[3] == seen.digests[8] == seen.digests[13]
    journal = read_journal(folder / NAME)
    assert [r["number"] for r in journal] == [1, 2, 3, 4, 5, 6]
    back = [r for r in journal if r["event"] == "went back"]
    assert [(r["step"], r["to_step"], r["first_sample"], r["last_sample"]) for r in back] == [
        (8, 3, 12, 31), (8, 3, 12, 51),
    ]  # fmt: skip
    assert [record[0] for record in records(folder)] == list(range(1, 13)), "no step is told twice"


def test_the_way_back_may_lead_to_where_the_run_came_from(corpus: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert train(1, corpus, one, f"{BACK} --exit-interval 6")[0].was_stopped
    (seen,) = train(1, corpus, other, f"{BACK} --save-interval 99 --load {one}", spoil([24, 28], math.nan))
    assert seen.steps == [6, 7, *range(6, 12)] and not seen.error
    assert read_journal(other / NAME)[2]["to_step"] == 6


def test_a_way_back_that_does_not_help_ends(corpus: Path, tmp_path: Path) -> None:
    (one,) = train(1, corpus, tmp_path / "run", f"{BACK} --train-iters 99", spoil(range(16, 999), math.nan))
    assert "The run has already rolled back to " in one.error and "3 times without success" in one.error
    assert one.steps == [0, 1, 2, 3, 4, 5, *[3, 4] * 3]


def test_no_checkpoint_to_go_back_to_is_said(corpus: Path, tmp_path: Path) -> None:
    seen = train(1, corpus, tmp_path / "run", f"{BACK} --save-interval 9", spoil([8, 12], math.nan))
    assert all("There is no checkpoint to roll back to: " in one.error for one in seen)


def test_a_bad_loss_is_no_overflow_and_leaves_the_loss_scale_alone(corpus: Path, tmp_path: Path) -> None:
    def plant(rank: int) -> None:
        allow_fp16_on_cpu(rank)
        spoil([8], math.nan)(rank)

    flags = f"{FP16} --initial-scale-power 6 --hysteresis 1 --pipe-parallel-size 2 --train-iters 4 {GUARDED}"
    for one in train(2, corpus, tmp_path / "run", flags, plant):
        assert one.scales == [64.0] * 4 and one.digests[2] == one.digests[3] != one.digests[1]
    assert [r["step"] for r in read_journal(tmp_path / "run" / NAME)] == [3]


def test_overflows_without_an_end_end_with_advice(corpus: Path, tmp_path: Path) -> None:
    """Row N04: as many steps as the loss scale can be halved, and hysteresis grants."""

    def plant(rank: int) -> None:
        allow_fp16_on_cpu(rank)
        step = MixedPrecisionOptimizer.step

        def overflowing(self: MixedPrecisionOptimizer, closure: None = None) -> None:
            self.raw_norm = None  # of what was there before
            next(g for p, g in self.gradients() if is_counted_in_norm(p, 0)).view(-1)[0] = torch.inf
            step(self)

        MixedPrecisionOptimizer.step = overflowing  # type: ignore[method-assign]

    flags = f"{FP16} --initial-scale-power 3 --hysteresis 2 --train-iters 99"
    for one in train(1, corpus, tmp_path / "run", flags, plant):
        assert one.scales == [8.0, 8.0, 4.0, 2.0, 1.0]
        assert "step 5 (samples 16-19): overflow at the smallest loss scale (1)" in one.error
        assert "lower --lr or use bf16" in one.error


@pytest.mark.parametrize("clip", [0.0, 1.0, math.inf])
def test_gradients_of_zero_stay_numbers(clip: float) -> None:
    """Row N09."""
    weight = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [weight]}]
    optimizer = MixedPrecisionOptimizer(groups, lambda g: torch.optim.SGD(g, lr=1.0), clip_grad=clip)
    for gradient, expected in ((0.0, 1.0), (0.25, 0.75)):
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
        assert torch.equal(weight, torch.full((3,), expected)) and not optimizer.overflow


def test_the_journal_keeps_what_belongs_to_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = EventLog(tmp_path)
    assert not journal.path.exists()
    for number in (1, 2, 3):
        journal.add({"number": number, "event": "skipped"})
    assert [r["number"] for r in read_journal(journal.path)] == [1, 2, 3]
    again = EventLog(tmp_path, known=1)
    assert read_journal(journal.path) == [{"number": 1, "event": "skipped"}]
    monkeypatch.setattr("megatron.files.replace_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    again.add({"number": 2, "event": "skipped"})
    monkeypatch.undo()
    again.add({"number": 3, "event": "skipped"})
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
def test_a_flag_that_cannot_act_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags.split(), world_size=1)
