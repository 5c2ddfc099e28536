"""A learning rate and an end of the run in samples depend on the samples only, whatever the batch sizes before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.config import parse
from megatron.mpu.groups import single_grid
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.data import num_samples_of_splits
from megatron.training.finished_run import finished_text
from megatron.training.step_result import StepResult
from megatron.training.train_progress import TrainProgress
from megatron.training.trainer import Trainer
from megatron.training.world import World
from tests.helpers import runs

BASE_ARGS = "--data-path none --device cpu --vocab-size 9 --seq-length 16 --lr 1e-3 --lr-decay-style linear"
WORLD = World("cpu", torch.device("cpu"), single_grid(), 0)


class FakeEngine:
    """Counts steps and records (samples consumed before, rate) of each; ``skipped_steps`` make no update."""

    def __init__(self, skipped_steps: Sequence[int]) -> None:
        self.optimizer: Any = SimpleNamespace(param_groups=[{"lr": -1.0}])
        self.on_loss, self.skipped_steps = print, skipped_steps
        self.learning_rates: list[float] = []

    def train_step(self, data: Any, step: int, share: Any) -> StepResult:
        self.learning_rates.append(self.optimizer.param_groups[0]["lr"])
        return StepResult(1.0, 1.0, 1.0, is_skipped=step in self.skipped_steps)


class RunStart(NamedTuple):
    """A start of the run: its global batch, the steps that it takes at most, and its ramp-up."""

    global_batch_size: int
    max_steps: int = 10**6
    rampup_flags: str = ""


def make_trainer(
    extra_args: str, start: RunStart, progress: TrainProgress, skipped_steps: Sequence[int] = ()
) -> Trainer:
    argv = f"{BASE_ARGS} --batch-size 1 --gas {start.global_batch_size} {start.rampup_flags} {extra_args}".split()
    data, engine = SimpleNamespace(order=None), FakeEngine(skipped_steps)
    trainer = Trainer(parse(argv, world_size=1, env={}), WORLD, engine, data, Path("x"))  # type: ignore[arg-type]
    trainer.progress = progress
    return trainer


def run_starts(
    extra_args: str, starts: Sequence[RunStart], skipped_steps: Sequence[int] = ()
) -> tuple[TrainProgress, list[tuple[int, float]]]:
    """Take the steps of all ``starts``; return the last position, and samples of updates and rate of each step."""
    progress, rates = TrainProgress(), list[tuple[int, float]]()
    for start in starts:
        trainer = make_trainer(extra_args, start, progress, skipped_steps)
        last_step = trainer.last_step
        for _ in range(start.max_steps):
            if not trainer.has_steps_left:
                break
            samples_before = progress.samples_updated
            batch_size = trainer.batch_sizes.at(progress.samples_consumed)
            trainer.train_step()
            rates.append((samples_before + batch_size, trainer.engine.learning_rates[-1]))  # type: ignore[attr-defined]
            assert trainer.last_step == last_step, "what is shown as the last step does not move"
        progress = trainer.progress
    return progress, rates


def megatron_learning_rate(consumed: float, warmup_samples: float, decay_samples: float) -> float:
    """Return the rate of Megatron's linear decay from 1e-3 to 0 after so many samples."""
    if consumed <= warmup_samples:
        return 1e-3 * consumed / warmup_samples
    return 1e-3 * max(1 - (consumed - warmup_samples) / (decay_samples - warmup_samples), 0.0)


RAMPUP_FLAGS = st.sampled_from(["", "", "--rampup-batch-size 1 1 50"])
RUN_STARTS = st.lists(st.builds(RunStart, st.integers(2, 24), st.integers(0, 12), RAMPUP_FLAGS), max_size=3)


@settings(deadline=None, max_examples=12)
@given(RUN_STARTS, st.integers(2, 24), st.integers(24, 400), st.floats(0, 0.9), st.sampled_from(["samples", "tokens"]))
@example([RunStart(4, 20)], 8, 160, 0.0, "samples")
@example([RunStart(8, 10)], 4, 160, 0.0, "samples")
@example([RunStart(4, 20)], 8, 160, 0.1, "tokens")
def test_batch_size_changes_preserve_learning_rates_and_end_of_run(
    starts: list[RunStart], global_batch_size: int, num_samples: int, warmup_fraction: float, unit: str
) -> None:
    train_length = num_samples * 16 - 5 if unit == "tokens" else num_samples
    extra_args = f"--train-{unit} {train_length} --warmup {warmup_fraction}"
    progress, rates = run_starts(extra_args, [*starts, RunStart(global_batch_size)])
    decay_samples = train_length / 16 if unit == "tokens" else train_length
    for consumed, rate in rates:
        assert rate == pytest.approx(
            megatron_learning_rate(consumed, warmup_fraction * decay_samples, decay_samples), rel=1e-9, abs=1e-15
        )
    assert progress.samples_consumed == rates[-1][0]
    if unit == "samples":
        assert num_samples - 24 < progress.samples_consumed <= num_samples
        assert progress.samples_consumed + global_batch_size > num_samples or progress.samples_consumed == num_samples
    else:
        assert num_samples <= progress.samples_consumed < num_samples + 24
    unit_batch_progress, _ = run_starts(extra_args, [RunStart(1)])
    assert unit_batch_progress.samples_consumed == num_samples


@pytest.mark.parametrize(
    ("starts", "step", "rate", "last_step"),
    [
        ([RunStart(8, 10), RunStart(4)], 11, 4.75e-4, 30),
        ([RunStart(4, 20), RunStart(8)], 21, 4.5e-4, 30),
        ([RunStart(8, 5), RunStart(4, 10), RunStart(2)], 16, 1e-3 * (1 - 82 / 160), 55),
    ],
)
def test_linear_decay_over_160_samples_has_expected_rates_and_steps(
    starts: list[RunStart], step: int, rate: float, last_step: int
) -> None:
    progress, rates = run_starts("--train-samples 160 --warmup 0", starts)
    assert rates[step - 1][1] == pytest.approx(rate, rel=1e-12)
    assert (progress.step, progress.samples_consumed, rates[-1][1]) == (last_step, 160, 0.0)


def test_skipped_steps_consume_samples_without_advancing_rate() -> None:
    """Row N05, in samples: the run ends after the same samples, and the rate has missed those of the skipped steps."""
    progress, rates = run_starts(
        "--train-samples 160 --warmup 0", [RunStart(8, 6), RunStart(4)], skipped_steps=[3, 4, 8]
    )
    assert rates[3][1] == rates[4][1] == rates[5][1] == pytest.approx(1e-3 * (1 - 32 / 160))
    assert rates[8][1] == rates[9][1] == pytest.approx(1e-3 * (1 - 44 / 160))
    assert (progress.step, progress.updates, progress.samples_consumed, progress.samples_skipped) == (34, 31, 160, 20)


def test_samples_skipped_by_rollback_do_not_advance_rate() -> None:
    state = TrainProgress(step=10, updates=10, samples_consumed=60, samples_skipped=20)
    trainer = make_trainer("--train-samples 160 --warmup 0", RunStart(4), state)
    assert trainer.last_step == 35
    trainer.train_step()
    assert trainer.learning_rate == pytest.approx(1e-3 * (1 - 44 / 160))


def test_progress_survives_checkpoint_and_seq_length_change() -> None:
    state = TrainProgress(step=10, updates=8, samples_consumed=40, samples_skipped=8)
    saved = {"progress": state.to_metadata(16)}
    assert TrainProgress.from_metadata(saved, 16) == state
    assert TrainProgress.from_metadata(saved, 32) == TrainProgress(10, 8, 20, 4)


@pytest.mark.parametrize("global_batch_size", [4, 7, 64])
def test_dataset_size_follows_train_samples_or_steps(global_batch_size: int) -> None:
    assert (
        num_samples_of_splits(
            make_trainer("--train-samples 162", RunStart(global_batch_size), TrainProgress()).config, WORLD
        )[0]
        == 162
    )
    assert (
        num_samples_of_splits(
            make_trainer("--train-iters 3", RunStart(global_batch_size), TrainProgress()).config, WORLD
        )[0]
        == 3 * global_batch_size
    )


def test_order_of_megatron_needs_no_evaluations(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").touch()
    flags = f"--data-order megatron --data-path {tmp_path / 'x'} --train-iters 3 --eval-interval 0"
    config = make_trainer(flags, RunStart(4), TrainProgress()).config
    assert num_samples_of_splits(config, WORLD)[:2] == [12, 0]


def test_finished_run_names_its_limit() -> None:
    def finished_message(extra_args: str, state: TrainProgress) -> str:
        trainer = make_trainer(extra_args, RunStart(4), state)
        assert not trainer.has_steps_left
        return finished_text(trainer)

    finished = TrainProgress(30, 30, 158)
    assert finished_message("--train-samples 160", finished) == (
        "158 of --train-samples 160 are consumed already, after step 30; the remaining 2 are fewer than a step of 4. "
        "Raise --train-samples to continue"
    )
    assert "the tokens of --train-tokens 2400 are consumed already, after step 30" in finished_message(
        "--train-tokens 2400", finished
    )
    assert finished_message("--train-iters 30", finished).startswith("all 30 steps are done already")
    assert finished_message("--train-iters 30 --train-tokens 99999", finished).startswith(
        "all 30 steps are done already"
    )


def read_records(folder: Path) -> dict[int, tuple[int, float]]:
    records = read_metrics(folder / "metrics.jsonl")
    return {
        record["step"]: (record["samples"], record["learning_rate"]) for record in records if record["kind"] == "train"
    }


def train_run(num_ranks: int, corpus: Path, folder: Path, extra_flags: str) -> None:
    argv = runs.make_flags(corpus, folder, f"--lr 1e-3 --lr-decay-style linear --warmup 0 --eval-iters 0 {extra_flags}")
    flag_idx = argv.index("--train-iters")
    assert runs.train_ranks(num_ranks, [*argv[:flag_idx], *argv[flag_idx + 2 :]])[0] in (
        [0] * num_ranks,
        [75] * num_ranks,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "first_flags", "second_flags", "expected"),
    [
        (2, "--exit-interval 10", "", {10: (80, 5e-4), 11: (84, 4.75e-4), 30: (160, 0.0)}),
        (1, "--exit-interval 20", "--gas 4", {20: (80, 5e-4), 21: (88, 4.5e-4), 30: (160, 0.0)}),
        (
            1, "--exit-interval 12 --gas 4 --rampup-batch-size 2 2 24", "",
            {12: (60, 6.25e-4), 13: (64, 6e-4), 37: (160, 0.0)},
        ),
    ],
    ids=["replicas", "batch", "ramp-up"],
)  # fmt: skip
def test_run_resumes_with_other_batch_size(
    num_ranks: int,
    first_flags: str,
    second_flags: str,
    expected: dict[int, tuple[int, float]],
    corpus: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    train_run(num_ranks, corpus, folder, f"--train-samples 160 {first_flags}")
    train_run(1, corpus, folder, f"--train-samples 160 --load {folder} {second_flags}")
    records = read_records(folder)
    assert max(records) == max(expected)
    for step, (samples, rate) in expected.items():
        assert records[step] == (samples, pytest.approx(rate, abs=1e-15))


@pytest.mark.slow
def test_run_limited_by_tokens_resumes_with_other_batch_size(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    seq_length = runs.LENGTH_FLAGS["gpt2"].split()[1]
    tokens = 40 * int(seq_length)
    train_run(1, corpus, folder, f"--train-tokens {tokens} --exit-interval 5")
    train_run(1, corpus, folder, f"--train-tokens {tokens} --load {folder} --gas 4")
    records = read_records(folder)
    assert [records[step] for step in (5, 6, 8)] == [
        (20, pytest.approx(5e-4)), (28, pytest.approx(3e-4)), (44, 0.0),
    ]  # fmt: skip
    assert max(records) == 8
