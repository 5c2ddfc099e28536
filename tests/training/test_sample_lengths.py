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
from megatron.training.data import samples_wanted
from megatron.training.finished_run import finished_text
from megatron.training.step_result import StepResult
from megatron.training.train_progress import TrainProgress
from megatron.training.trainer import Trainer
from megatron.training.world import World
from tests.helpers import runs

LINE = "--data-path none --device cpu --vocab-size 9 --seq-length 16 --lr 1e-3 --lr-decay-style linear"
WORLD = World("cpu", torch.device("cpu"), single_grid(), 0)


class Engine:
    """Counts the steps; those in ``skipped`` make no update. Keeps (samples consumed before, rate) of each step."""

    def __init__(self, skipped: Sequence[int]) -> None:
        self.optimizer: Any = SimpleNamespace(param_groups=[{"lr": -1.0}])
        self.on_loss, self.skipped = print, skipped
        self.rates: list[float] = []

    def train_step(self, data: Any, step: int, share: Any) -> StepResult:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return StepResult(1.0, 1.0, 1.0, is_skipped=step in self.skipped)


class Start(NamedTuple):
    """A start of the run: its global batch, the steps that it takes at most, and its ramp-up."""

    size: int
    steps: int = 10**6
    ramp: str = ""


def trainer_of(line: str, start: Start, progress: TrainProgress, skipped: Sequence[int] = ()) -> Trainer:
    words = f"{LINE} --batch-size 1 --gas {start.size} {start.ramp} {line}".split()
    data, engine = SimpleNamespace(order=None), Engine(skipped)
    made = Trainer(parse(words, world_size=1, env={}), WORLD, engine, data, Path("x"))  # type: ignore[arg-type]
    made.progress = progress
    return made


def taken(
    line: str, starts: Sequence[Start], skipped: Sequence[int] = ()
) -> tuple[TrainProgress, list[tuple[int, float]]]:
    """Take the steps of all ``starts``; return the last position, and samples of updates and rate of each step."""
    progress, found = TrainProgress(), list[tuple[int, float]]()
    for start in starts:
        trainer = trainer_of(line, start, progress, skipped)
        last = trainer.last_step
        for _ in range(start.steps):
            if not trainer.has_steps_left:
                break
            before = progress.samples_updated
            size = trainer.sizes.at(progress.samples_consumed)
            trainer.train_step()
            found.append((before + size, trainer.engine.rates[-1]))  # type: ignore[attr-defined]
            assert trainer.last_step == last, "what is shown as the last step does not move"
        progress = trainer.progress
    return progress, found


def megatrons(consumed: float, warmup: float, decay: float) -> float:
    """Return the rate of Megatron's linear decay from 1e-3 to 0 after so many samples."""
    if consumed <= warmup:
        return 1e-3 * consumed / warmup
    return 1e-3 * max(1 - (consumed - warmup) / (decay - warmup), 0.0)


RAMPS = st.sampled_from(["", "", "--rampup-batch-size 1 1 50"])
STARTS = st.lists(st.builds(Start, st.integers(2, 24), st.integers(0, 12), RAMPS), max_size=3)


@settings(deadline=None, max_examples=12)
@given(STARTS, st.integers(2, 24), st.integers(24, 400), st.floats(0, 0.9), st.sampled_from(["samples", "tokens"]))
@example([Start(4, 20)], 8, 160, 0.0, "samples")
@example([Start(8, 10)], 4, 160, 0.0, "samples")
@example([Start(4, 20)], 8, 160, 0.1, "tokens")
def test_any_sequence_of_batch_sizes_has_the_rates_and_the_end_of_an_uninterrupted_run(
    starts: list[Start], size: int, samples: int, warmup: float, unit: str
) -> None:
    length = samples * 16 - 5 if unit == "tokens" else samples
    line = f"--train-{unit} {length} --warmup {warmup}"
    progress, found = taken(line, [*starts, Start(size)])
    decay = length / 16 if unit == "tokens" else length
    for consumed, rate in found:
        assert rate == pytest.approx(megatrons(consumed, warmup * decay, decay), rel=1e-9, abs=1e-15)
    assert progress.samples_consumed == found[-1][0]
    if unit == "samples":
        assert samples - 24 < progress.samples_consumed <= samples
        assert progress.samples_consumed + size > samples or progress.samples_consumed == samples
    else:
        assert samples <= progress.samples_consumed < samples + 24
    alone, _ = taken(line, [Start(1)])
    assert alone.samples_consumed == samples


@pytest.mark.parametrize(
    ("starts", "step", "rate", "last"),
    [
        ([Start(8, 10), Start(4)], 11, 4.75e-4, 30),
        ([Start(4, 20), Start(8)], 21, 4.5e-4, 30),
        ([Start(8, 5), Start(4, 10), Start(2)], 16, 1e-3 * (1 - 82 / 160), 55),
    ],
)
def test_the_rates_and_last_steps_of_a_linear_decay_over_160_samples(
    starts: list[Start], step: int, rate: float, last: int
) -> None:
    progress, found = taken("--train-samples 160 --warmup 0", starts)
    assert found[step - 1][1] == pytest.approx(rate, rel=1e-12)
    assert (progress.step, progress.samples_consumed, found[-1][1]) == (last, 160, 0.0)


def test_skipped_steps_count_their_samples_and_hold_the_rate() -> None:
    """Row N05, in samples: the run ends after the same samples, and the rate has missed those of the skipped steps."""
    progress, found = taken("--train-samples 160 --warmup 0", [Start(8, 6), Start(4)], skipped=[3, 4, 8])
    assert found[3][1] == found[4][1] == found[5][1] == pytest.approx(1e-3 * (1 - 32 / 160))
    assert found[8][1] == found[9][1] == pytest.approx(1e-3 * (1 - 44 / 160))
    assert (progress.step, progress.updates, progress.samples_consumed, progress.samples_skipped) == (34, 31, 160, 20)


def test_samples_that_a_rollback_leaves_out_are_consumed_and_hold_the_rate() -> None:
    state = TrainProgress(step=10, updates=10, samples_consumed=60, samples_skipped=20)
    trainer = trainer_of("--train-samples 160 --warmup 0", Start(4), state)
    assert trainer.last_step == 35
    trainer.train_step()
    assert trainer.learning_rate == pytest.approx(1e-3 * (1 - 44 / 160))


def test_the_position_survives_a_checkpoint_and_another_length_of_samples() -> None:
    state = TrainProgress(step=10, updates=8, samples_consumed=40, samples_skipped=8)
    saved = {"progress": state.to_metadata(16)}
    assert TrainProgress.from_metadata(saved, 16) == state
    assert TrainProgress.from_metadata(saved, 32) == TrainProgress(10, 8, 20, 4)


@pytest.mark.parametrize("size", [4, 7, 64])
def test_the_data_set_is_asked_for_the_samples_of_the_run_whatever_the_batch_size(size: int) -> None:
    assert samples_wanted(trainer_of("--train-samples 162", Start(size), TrainProgress()).config, WORLD)[0] == 162
    assert samples_wanted(trainer_of("--train-iters 3", Start(size), TrainProgress()).config, WORLD)[0] == 3 * size


def test_a_run_that_is_done_names_its_limit() -> None:
    def text(line: str, state: TrainProgress) -> str:
        trainer = trainer_of(line, Start(4), state)
        assert not trainer.has_steps_left
        return finished_text(trainer)

    done = TrainProgress(30, 30, 158)
    assert text("--train-samples 160", done) == (
        "158 of --train-samples 160 are consumed already, after step 30; the remaining 2 are fewer than a step of 4. "
        "Raise --train-samples to continue"
    )
    assert "the tokens of --train-tokens 2400 are consumed already, after step 30" in text("--train-tokens 2400", done)
    assert text("--train-iters 30", done).startswith("all 30 steps are done already")
    assert text("--train-iters 30 --train-tokens 99999", done).startswith("all 30 steps are done already")


def records_of(folder: Path) -> dict[int, tuple[int, float]]:
    records = read_metrics(folder / "metrics.jsonl")
    return {each["step"]: (each["samples"], each["learning_rate"]) for each in records if each["kind"] == "train"}


def train(ranks: int, corpus: Path, folder: Path, extra: str) -> None:
    argv = runs.flags(corpus, folder, f"--lr 1e-3 --lr-decay-style linear --warmup 0 --eval-iters 0 {extra}")
    place = argv.index("--train-iters")
    assert runs.train_ranks(ranks, [*argv[:place], *argv[place + 2 :]])[0] in ([0] * ranks, [75] * ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "first", "second", "wanted"),
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
def test_a_real_run_goes_on_with_another_batch(
    ranks: int, first: str, second: str, wanted: dict[int, tuple[int, float]], corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(ranks, corpus, folder, f"--train-samples 160 {first}")
    train(1, corpus, folder, f"--train-samples 160 --load {folder} {second}")
    found = records_of(folder)
    assert max(found) == max(wanted)
    for step, (samples, rate) in wanted.items():
        assert found[step] == (samples, pytest.approx(rate, abs=1e-15))


@pytest.mark.slow
def test_a_real_run_in_tokens_goes_on_with_another_batch(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    length = runs.LENGTHS["gpt2"].split()[1]
    tokens = 40 * int(length)
    train(1, corpus, folder, f"--train-tokens {tokens} --exit-interval 5")
    train(1, corpus, folder, f"--train-tokens {tokens} --load {folder} --gas 4")
    found = records_of(folder)
    assert [found[step] for step in (5, 6, 8)] == [
        (20, pytest.approx(5e-4)), (28, pytest.approx(3e-4)), (44, 0.0),
    ]  # fmt: skip
    assert max(found) == 8
