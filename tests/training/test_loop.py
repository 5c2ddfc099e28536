"""The loop with an engine that only counts: what it calls, in which order, and what advances when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.errors import StopRequest
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.topology import Topology
from megatron.training import checkpointing, evaluate, trainer
from megatron.training.data import TimedBatches
from megatron.training.exit_signals import StopRequests
from megatron.training.initialize import World
from megatron.training.setup import make_learning_rate
from megatron.training.train_state import TrainState
from megatron.training.train_step import StepResult
from megatron.training.trainer import StepDecision, vote
from megatron.training.training_log import end_rows
from tests.harness import run_ranks
from tests.parity.layouts import traces
from tests.training import runs

CPU = torch.device("cpu")
SIZES = "--data-path none --device cpu --vocab-size 9 --batch-size 2 --gas 3 --lr 0.1 --lr-decay-style linear"


class CountingEngine:
    """Notes each call; the steps in ``skipped`` are told as overflowed."""

    def __init__(self, calls: list[str], skipped: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.calls, self.skipped = calls, skipped
        self.module = torch.nn.Identity()
        self.optimizer: Any = SimpleNamespace(
            param_groups=[{"lr": -1.0}, {"lr": -1.0}], kept=lambda parameter: parameter
        )
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.rates: list[float] = []
        self.read: list[Any] = []
        self.evaluated: list[Any] = []
        self.micro_batches: list[int] = []

    def train_step(self, data: Any, step: int, num_micro_batches: int) -> StepResult:
        self.calls.append(f"train {step}")
        self.read.append(data.source)
        self.micro_batches.append(num_micro_batches)
        first, second = (group["lr"] for group in self.optimizer.param_groups)
        assert first == second
        self.rates.append(first)
        return StepResult(loss=step + 0.5, grad_norm=1.0, loss_scale=8.0, is_skipped=step in self.skipped)

    def evaluate_batch(self, data: Any) -> float:
        self.calls.append("evaluate")
        self.evaluated.append(data.source)
        return 2.0

    def bubble(self) -> None:
        self.calls.append("bubble")

    def busy(self) -> tuple[float, int]:
        return 0.0, 0


class NotingData:
    """Tells from which sample an iterator was asked to start."""

    fingerprint = order = None
    has_training = True
    corpora: dict[str, dict[str, float]] = {}

    def batches(
        self, kind: str, config: Any, world: World, samples_consumed: int = 0, corpus: str | None = None
    ) -> TimedBatches:
        return TimedBatches((kind, samples_consumed, *([corpus] if corpus else [])))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[trainer.Run, list[str]]]:
    """Return a function from flags to a run and the list of what it calls."""
    calls: list[str] = []

    def note_save(folder: Path, progress: Any, **_: Any) -> Path:
        calls.append(f"save {progress.step}")
        return folder / str(progress.step)

    monkeypatch.setattr(checkpointing, "save_state", note_save)

    def build(extra: str, skipped: tuple[int, ...] = ()) -> tuple[trainer.Run, list[str]]:
        config = parse([*SIZES.split(), *extra.split()], world_size=1)
        here = World("cpu", CPU, single_grid(), 0)
        stop = StopRequests()
        stop.limit(config.run.exit_interval, 0.0, 0.0)
        engine = CountingEngine(calls, set(skipped))
        screen = SimpleNamespace(line=lambda text: calls.append(f"line {text.split('|')[0].strip()}"), advance=print)
        rates = SimpleNamespace(
            count_step=lambda samples: None,
            drain=lambda pause, waited: {
                "mfu": None,
                "step_s": 1.0,
                "tokens_per_s": 1.0,
                "flops_per_s": 1.0,
                "data_wait": waited,
            },
        )
        parts: Any = {"data": NotingData(), "screen": screen, "rates": rates}
        rate = make_learning_rate(config)
        made = trainer.Run(config, here, engine, learning_rate=rate, folder=tmp_path, stop=stop, **parts)
        return made, calls

    return build


def test_a_skipped_step_counts_its_samples_but_holds_the_learning_rate(make: Any) -> None:
    this, _ = make("--train-iters 5 --lr-decay-iters 4", skipped=(1, 2))
    trainer.train(this)
    assert this.engine.rates == pytest.approx([0.075, 0.05, 0.05, 0.05, 0.025])
    assert (this.progress.step, this.progress.updates, this.progress.skipped) == (5, 3, 2)
    assert this.progress.samples_consumed == 5 * 6
    assert this.last_loss == 4.5


def test_a_run_goes_on_at_the_sample_and_the_rate_where_it_stopped(make: Any) -> None:
    this, calls = make("--train-iters 6 --lr-decay-iters 4")
    this.progress = TrainState(step=4, updates=2, samples_consumed=24)
    trainer.train(this)
    assert this.engine.read == [("train", 24)] * 2
    assert this.engine.rates == pytest.approx([0.025, 0.0])
    assert [call for call in calls if call.startswith("train")] == ["train 4", "train 5"]


def test_report_then_evaluate_then_save_then_stop(make: Any) -> None:
    flags = "--train-iters 9 --log-interval 2 --eval-interval 2 --eval-iters 2 --save-interval 4 --exit-interval 4"
    this, calls = make(flags)
    with pytest.raises(StopRequest, match="stopped after step 4 of 9: --exit-interval 4.*--load"):
        trainer.train(this)
    assert calls == [
        *("train 0", "bubble", "line step 1/9"),
        *("train 1", "bubble", "line step 2/9", "evaluate", "evaluate", "line step 2"),
        *("train 2", "train 3", "bubble", "line step 4/9", "evaluate", "evaluate", "line step 4", "save 4"),
        "line step 4",
    ]
    assert this.saved_step == 4
    assert this.engine.read == [("train", 0)] * 4
    assert this.engine.evaluated == [("valid", 0)] * 4, "what is trained on has a stream of its own"


def test_the_first_step_and_the_last_are_told_whatever_the_interval(make: Any) -> None:
    this, calls = make("--train-iters 7 --log-interval 3 --eval-iters 0")
    this.metrics = SimpleNamespace(write=lambda kind, step, values: calls.append(f"{kind} record {step}"))
    trainer.train(this)
    assert [call for call in calls if "/7" in call] == [f"line step {step}/7" for step in (1, 3, 6, 7)]
    assert [call for call in calls if "train record" in call] == [f"train record {step}" for step in (1, 3, 6, 7)]
    other, calls = make("--train-iters 6 --log-interval 3 --eval-iters 0")
    other.progress = TrainState(step=4, updates=4, samples_consumed=24)
    calls.clear()
    trainer.train(other)
    assert [call for call in calls if "/6" in call] == ["line step 6/6"]


def test_the_end_table_has_the_losses_of_all_splits_and_the_speed(make: Any) -> None:
    this, _ = make("--train-iters 2 --log-interval 1 --eval-interval 1 --eval-iters 1")
    this.rates.mean_tokens_per_s = lambda: 1234.4
    trainer.train(this)
    trainer.evaluate(this, "test")
    rows = dict(end_rows(this, 5.0))
    names = ("last training loss", "validation loss", "test loss")
    assert [rows.get(name) for name in names] == ["1.5000", "2.0000", "2.0000"]
    assert (rows["tokens/s"], rows["time"]) == ("1,234 on the mean", "0:05 on 1 rank")
    assert "evaluations" not in rows and rows["metrics"].startswith(str(this.folder / "metrics.jsonl"))


def test_the_bubble_is_measured_on_every_rank_and_written_where_there_is_one(make: Any) -> None:
    this, calls = make("--train-iters 2 --log-interval 2 --eval-iters 0")
    lines: list[str] = []
    written: list[dict[str, Any]] = []
    this.screen.line = lines.append
    this.metrics = SimpleNamespace(write=lambda kind, step, values: kind == "train" and written.append(values))
    shares = iter([0.125, None])
    this.engine.bubble = lambda: next(shares)
    trainer.train(this)
    assert ["| bubble 12.5 % |" in line for line in lines if "loss" in line] == [True, False]
    assert [values.get("bubble") for values in written] == [0.125, None]
    other, calls = make("--train-iters 2 --log-interval 1 --eval-iters 0")
    other.screen = other.rates = None  # as on every rank but the first
    trainer.train(other)
    assert calls.count("bubble") == 2


def test_a_stop_saves_what_no_interval_has_saved_and_the_last_step_is_no_stop(make: Any) -> None:
    this, calls = make("--train-iters 4 --exit-interval 2 --save-interval 3")
    with pytest.raises(StopRequest, match="after step 2"):
        trainer.train(this)
    assert [call for call in calls if call.startswith("save")] == ["save 2"]
    trainer.train(this)
    assert [call for call in calls if call.startswith("save")] == ["save 2", "save 3", "save 4"]


@pytest.mark.parametrize("flags", ["--eval-interval 0 --eval-iters 2", "--eval-interval 1 --eval-iters 0"])
def test_an_interval_or_a_length_of_0_never_evaluates(flags: str, make: Any) -> None:
    this, calls = make(f"--train-iters 3 {flags}")
    trainer.train(this)
    assert "evaluate" not in calls
    assert calls[-2:] == ["save 3", "line step 3"]


def test_evaluation_starts_at_the_first_sample_each_time_and_gives_the_mean(make: Any) -> None:
    this, _ = make("--train-iters 1 --eval-iters 4")
    asked: list[Any] = []
    this.engine.evaluate_batch = lambda data: asked.append(data.source) or float(len(asked))
    assert evaluate.evaluate(this, "valid") == 2.5
    assert asked == [("valid", 0)] * 4


def test_a_ramp_asks_each_step_for_its_micro_batches_and_counts_its_samples(make: Any) -> None:
    this, _ = make("--train-iters 6 --rampup-batch-size 2 2 8 --log-interval 1")  # 2, 2, 2, 4 and then 6 samples
    written: list[dict[str, Any]] = []
    this.metrics = SimpleNamespace(write=lambda kind, step, values: kind == "train" and written.append(values))
    trainer.train(this)
    assert this.engine.micro_batches == [1, 1, 2, 3, 3, 3]
    assert [values["samples"] for values in written] == [2, 4, 8, 14, 20, 26]
    resumed, _ = make("--train-iters 6 --rampup-batch-size 2 2 8")
    resumed.progress = TrainState(step=2, updates=2, samples_consumed=4)
    trainer.train(resumed)
    assert resumed.engine.micro_batches == [2, 3, 3, 3] and resumed.progress.samples_consumed == 26


def test_several_corpora_are_evaluated_one_by_one_and_weighed(make: Any) -> None:
    this, calls = make("--train-iters 1 --eval-iters 2")
    this.data.corpora = {"valid": {"a": 0.75, "b": 0.25, "c": 0.0}}
    lines, written = [], []
    this.screen.line, this.metrics = lines.append, SimpleNamespace(write=lambda *told: written.append(told))
    losses = {"a": 1.0, "b": 3.0, "c": float("inf")}
    this.engine.evaluate_batch = lambda data: losses[data.source[2]]
    assert evaluate.evaluate(this, "valid") == 1.5
    assert lines == ["step 0 | validation loss 1.5000 | perplexity 4.48 | a 1.0000, b 3.0000, c inf"]
    assert written[0][0] == "valid" and written[0][2]["losses"] == losses
    this.engine.evaluate_batch = lambda data: float(len(data.source))
    assert evaluate.evaluate(this, "test") == 2.0 and "losses" not in written[1][2], (
        "of one corpus nothing more is said"
    )


def test_an_ordinary_step_neither_logs_nor_asks_what_follows_a_bad_one(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, _ = make("--train-iters 7 --log-interval 3 --eval-iters 0")
    logged: list[int] = []
    training_log = trainer.training_log
    monkeypatch.setattr(
        trainer, "training_log", lambda run, *rest: logged.append(run.progress.step) or training_log(run, *rest)
    )
    monkeypatch.setattr(trainer, "after_bad_step", lambda *_: pytest.fail("no step was bad"))
    trainer.train(this)
    assert logged == [1, 3, 6, 7]


def test_the_longest_wait_for_data_is_told_as_a_share(make: Any) -> None:
    this, _ = make("--train-iters 2 --log-interval 1 --eval-iters 0")
    lines: list[str] = []
    this.screen.line = lines.append
    this.engine.train_step = lambda data, step, number: (
        setattr(data, "_waited_s", 0.125 * (step + 1)) or StepResult(1.0, 1.0, 1.0, False)
    )
    trainer.train(this)
    shares = [line.split("| data wait ")[1].split(" |")[0] for line in lines if "loss" in line]
    assert shares == ["12.5 %", "25.0 %"], "each since the one before"


def ask(rank: int, asked: list[int], late: list[int]) -> StepDecision:
    grid = build_grid(Topology.of_world(4, tensor=2, pipe=2), rank)
    stop = StopRequests()
    if rank in asked:
        stop.signal_name = "SIGTERM"
    trainer.wants_by_time = lambda run: rank in late  # type: ignore[assignment]
    this: Any = SimpleNamespace(stop=stop, progress=TrainState(step=1), world=World("cpu", CPU, grid, rank))
    return vote(this, has_drift=rank == 1)


def test_all_ranks_stop_together_or_none() -> None:
    assert run_ranks(4, ask, [], [3]) == [(None, True, True)] * 4, "the wish of one to save, and its drift, are of all"
    told = run_ranks(4, ask, [2], [])
    assert told[2] == ("received SIGTERM", False, True)
    assert {told[rank] for rank in (0, 1, 3)} == {("another rank was asked to stop", False, True)}


def test_a_run_draws_dropout_by_seed_replica_and_tensor_rank(corpus: Path, tmp_path: Path) -> None:
    def note_streams(rank: int) -> None:
        streams_of = trainer.make_streams

        def noted(*args: Any, **kwargs: Any) -> Any:
            made = streams_of(*args, **kwargs)
            (tmp_path / str(rank)).write_text(f"{made.seed} {made.data_rank} {made.tensor_rank}")
            return made

        trainer.make_streams = noted  # type: ignore[assignment, misc]

    argv = runs.flags(corpus, tmp_path / "run", "--model-parallel-size 2 --train-iters 1 --eval-iters 0 --seed 9")
    assert runs.train_ranks(4, argv, note_streams)[0] == [0] * 4
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["9 0 0", "9 0 1", "9 1 0", "9 1 1"]


@pytest.mark.parametrize("pipe", [1, 2])
def test_evaluation_drops_nothing(pipe: int) -> None:
    """With weights that stand still, dropout changes the training loss and not the evaluated one."""
    still = "--fp32 --optimizer sgd --lr 1e-30"
    plain = traces(1, pipe, 1, 2, 2, still, steps=1, eval_every=1)[0]
    dropped = traces(1, pipe, 1, 2, 2, f"{still} --hidden-dropout 0.1 --attention-dropout 0.1", steps=1, eval_every=1)[
        0
    ]
    assert dropped.losses != plain.losses
    assert dropped.eval_losses == plain.eval_losses
