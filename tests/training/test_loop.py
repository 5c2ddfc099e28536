"""The loop with an engine that only counts: what it calls, in which order, and what advances when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megatron.config import parse
from megatron.config.batch import Share
from megatron.errors import StopRequest
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.topology import Topology
from megatron.runtime.exit_signals import StopRequests
from megatron.training import Callback, setup
from megatron.training.batch_iterators import TimedBatches
from megatron.training.callbacks import checkpointer
from megatron.training.callbacks.console import Console
from megatron.training.callbacks.evaluator import Evaluator
from megatron.training.callbacks.speed_monitor import SpeedMonitor
from megatron.training.callbacks.stability_guard import StabilityGuard
from megatron.training.run_folder import RunPaths
from megatron.training.step_result import StepResult
from megatron.training.train_progress import TrainProgress
from megatron.training.trainer import Trainer
from megatron.training.world import World
from tests.helpers import runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import traces

CPU = torch.device("cpu")
SIZES = "--data-path none --device cpu --vocab-size 9 --batch-size 2 --gas 3 --lr 0.1 --lr-decay-style linear"


class CountingEngine:
    """Notes each call; the steps in ``skipped`` are told as overflowed."""

    def __init__(self, calls: list[str], skipped: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.calls, self.skipped = calls, skipped
        self.module = torch.nn.Identity()
        self.optimizer: Any = SimpleNamespace(
            param_groups=[{"lr": -1.0}, {"lr": -1.0}],
            store=SimpleNamespace(persistent_storage=lambda parameter: parameter),
        )
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.on_loss = print
        self.rates: list[float] = []
        self.read: list[Any] = []
        self.evaluated: list[Any] = []
        self.micro_batches: list[int] = []

    def train_step(self, data: Any, step: int, share: Share) -> StepResult:
        self.calls.append(f"train {step}")
        self.read.append(data.source)
        self.micro_batches.append(share.num_micro_batches)
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
        self,
        kind: str,
        config: Any,
        world: World,
        samples_consumed: int = 0,
        corpus: str | None = None,
        length: int | None = None,
    ) -> TimedBatches:
        is_cut = length is not None and length < config.batch.seq_length
        return TimedBatches((kind, samples_consumed, *([corpus] if corpus else []), *([length] if is_cut else [])))


class Speed(SpeedMonitor):
    """Measures nothing but waits for data and the bubble."""

    def __init__(self) -> None:
        super().__init__([0])

    def on_train_start(self) -> None:
        self._predicted: Any = lambda number: None
        self._seen = (0, Counter(), 0.0)
        self.rates: Any = SimpleNamespace(
            flops_of_sample=lambda length: 0.0,
            drain=lambda steps, samples, pause, waited, flops: {
                "mfu": None,
                "step_s": 1.0,
                "tokens_per_s": 1.0,
                "flops_per_s": 1.0,
                "data_wait": waited,
            },
        )


class Screen(Console):
    """Notes the lines among the calls of the engine."""

    def __init__(self, total: int, calls: list[str]) -> None:
        super().__init__("plain", total, [0])
        self.calls, self.lines = calls, list[str]()

    def on_train_start(self) -> None:
        self._began, self._says_what_is_fused = 0.0, False
        self.trainer.print_line = self.line

    def line(self, text: str) -> None:
        self.calls.append(f"line {text.split('|')[0].strip()}")
        self.lines.append(text)

    def on_train_end(self) -> None:
        pass


class Records(Callback):
    """Keeps the records of a run: (kind, step, values)."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, dict[str, Any]]] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [values for each, _, values in self.written if each == kind]

    def on_log(self, metrics: dict[str, Any]) -> None:
        self.written.append(("train", self.trainer.progress.step, metrics))

    def on_evaluate_end(self, split: str, values: dict[str, Any]) -> None:
        self.written.append((split, self.trainer.progress.step, values))


class Validator(Evaluator):
    """Leaves out the test split at the end."""

    def on_train_end(self) -> None:
        pass


class Run(NamedTuple):
    """A trainer with an engine that counts, and the callbacks that a test looks at."""

    trainer: Trainer
    calls: list[str]
    screen: Screen
    records: Records
    evaluator: Validator
    engine: Any


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    """Return a function from flags to a run; ``kinds``: the callbacks that it has, None for all."""
    calls: list[str] = []

    class NotingSaver:
        def __init__(self, world: Any) -> None:
            pass

        def save(self, root: Path, step: int, retention: Any) -> Path:
            calls.append(f"save {step}")
            return root / str(step)

    monkeypatch.setattr(checkpointer, "capture", lambda progress, **_: progress.step)
    monkeypatch.setattr(checkpointer, "SyncSaver", NotingSaver)

    def build(extra: str, skipped: tuple[int, ...] = (), without: tuple[type[Callback], ...] = ()) -> Run:
        config = parse([*SIZES.split(), *extra.split()], world_size=1)
        here = World("cpu", CPU, single_grid(), 0)
        stop = StopRequests()
        stop.limit(config.run.exit_interval, 0.0, 0.0)
        engine = CountingEngine(calls, set(skipped))
        screen, records = Screen(config.batch.train_iters, calls), Records()
        evaluator = Validator(config.batch.eval_interval if config.batch.eval_iters else 0)
        saver, guard = checkpointer.Checkpointer(RunPaths(tmp_path, None)), StabilityGuard(config.stability)
        every = [each for each in (saver, guard, evaluator, Speed(), screen, records) if not isinstance(each, without)]
        data: Any = NotingData()
        trainer = Trainer(config, here, engine, data, tmp_path, every, stop=stop)  # type: ignore[arg-type]
        return Run(trainer, calls, screen, records, evaluator, engine)

    return build


def test_a_skipped_step_counts_its_samples_but_holds_the_learning_rate(make: Any) -> None:
    this = make("--train-iters 5 --lr-decay-iters 4 --warmup 0", skipped=(1, 2))
    this.trainer.fit()
    assert this.engine.rates == pytest.approx([0.075, 0.05, 0.05, 0.05, 0.025])
    progress = this.trainer.progress
    assert (progress.step, progress.updates, progress.skipped) == (5, 3, 2)
    assert progress.samples_consumed == 5 * 6
    assert this.trainer.last_loss == 4.5


def test_a_run_goes_on_at_the_sample_and_the_rate_where_it_stopped(make: Any) -> None:
    this = make("--train-iters 6 --lr-decay-iters 4 --warmup 0")
    this.trainer.progress = TrainProgress(step=4, updates=2, samples_consumed=24)
    this.trainer.fit()
    assert this.engine.read == [("train", 24)] * 2
    assert this.engine.rates == pytest.approx([0.025, 0.0])
    assert [call for call in this.calls if call.startswith("train")] == ["train 4", "train 5"]


def test_report_then_evaluate_then_save_then_stop(make: Any) -> None:
    flags = "--train-iters 9 --log-interval 2 --eval-interval 2 --eval-iters 2 --save-interval 4 --exit-interval 4"
    this = make(flags)
    with pytest.raises(StopRequest, match="stopped after step 4 of 9: --exit-interval 4.*--load"):
        this.trainer.fit()
    assert this.calls == [
        *("train 0", "bubble", "line step 1/9"),
        *("train 1", "bubble", "line step 2/9", "evaluate", "evaluate", "line step 2"),
        *("train 2", "train 3", "bubble", "line step 4/9", "evaluate", "evaluate", "line step 4", "save 4"),
        "line step 4",
    ]
    assert this.trainer.find(checkpointer.Checkpointer).newest_step == 4
    assert this.engine.read == [("train", 0)] * 4
    assert this.engine.evaluated == [("valid", 0)] * 4, "what is trained on has a stream of its own"


def test_the_first_step_and_the_last_are_told_whatever_the_interval(make: Any) -> None:
    this = make("--train-iters 7 --log-interval 3 --eval-iters 0")
    this.trainer.fit()
    assert [call for call in this.calls if "/7" in call] == [f"line step {step}/7" for step in (1, 3, 6, 7)]
    assert [step for kind, step, _ in this.records.written if kind == "train"] == [1, 3, 6, 7]
    other = make("--train-iters 6 --log-interval 3 --eval-iters 0")
    other.trainer.progress = TrainProgress(step=4, updates=4, samples_consumed=24)
    other.calls.clear()
    other.trainer.fit()
    assert [call for call in other.calls if "/6" in call] == ["line step 6/6"]


def test_the_end_table_has_the_losses_of_all_splits_and_the_speed(make: Any) -> None:
    this = make("--train-iters 2 --log-interval 1 --eval-interval 1 --eval-iters 1")
    this.trainer.fit()
    this.trainer.find(Speed).rates.mean_tokens_per_s = lambda: 1234.4
    this.evaluator.evaluate("test")
    rows = dict(this.screen.end_rows(5.0))
    names = ("last training loss", "validation loss", "test loss")
    assert [rows.get(name) for name in names] == ["1.5000", "2.0000", "2.0000"]
    assert (rows["tokens/s"], rows["time"]) == ("1,234 on average", "0:05 on 1 rank")
    assert "evaluations" not in rows and rows["metrics"].startswith(str(this.trainer.folder / "metrics.jsonl"))


def test_the_bubble_is_measured_on_every_rank_and_written_where_there_is_one(make: Any) -> None:
    this = make("--train-iters 2 --log-interval 2 --eval-iters 0")
    shares = iter([0.125, None])
    this.engine.bubble = lambda: next(shares)
    this.trainer.fit()
    assert ["| bubble 12.5 % |" in line for line in this.screen.lines if "loss" in line] == [True, False]
    assert [values.get("bubble") for values in this.records.of("train")] == [0.125, None]
    other = make("--train-iters 2 --log-interval 1 --eval-iters 0", without=(Screen, Records))  # a rank but the first
    other.trainer.fit()
    assert other.calls.count("bubble") == 2


def test_a_stop_saves_what_no_interval_has_saved_and_the_last_step_is_no_stop(make: Any) -> None:
    this = make("--train-iters 4 --exit-interval 2 --save-interval 3")
    with pytest.raises(StopRequest, match="after step 2"):
        this.trainer.fit()
    assert [call for call in this.calls if call.startswith("save")] == ["save 2"]
    this.trainer.stop_text = ""
    this.trainer.fit()
    assert [call for call in this.calls if call.startswith("save")] == ["save 2", "save 3", "save 4"]


@pytest.mark.parametrize("flags", ["--eval-interval 0 --eval-iters 2", "--eval-interval 1 --eval-iters 0"])
def test_an_interval_or_a_length_of_0_never_evaluates(flags: str, make: Any) -> None:
    this = make(f"--train-iters 3 {flags}")
    this.trainer.fit()
    assert "evaluate" not in this.calls
    assert this.calls[-2:] == ["save 3", "line step 3"]


def test_evaluation_starts_at_the_first_sample_each_time_and_gives_the_mean(make: Any) -> None:
    this = make("--train-iters 1 --eval-iters 4")
    asked: list[Any] = []
    this.engine.evaluate_batch = lambda data: asked.append(data.source) or float(len(asked))
    assert this.evaluator.evaluate("valid") == 2.5
    assert asked == [("valid", 0)] * 4


def test_a_ramp_asks_each_step_for_its_micro_batches_and_counts_its_samples(make: Any) -> None:
    this = make("--train-iters 6 --rampup-batch-size 2 2 8 --log-interval 1")  # 2, 2, 2, 4 and then 6 samples
    this.trainer.fit()
    assert this.engine.micro_batches == [1, 1, 2, 3, 3, 3]
    assert [values["samples"] for values in this.records.of("train")] == [2, 4, 8, 14, 20, 26]
    resumed = make("--train-iters 6 --rampup-batch-size 2 2 8")
    resumed.trainer.progress = TrainProgress(step=2, updates=2, samples_consumed=4)
    resumed.trainer.fit()
    assert resumed.engine.micro_batches == [2, 3, 3, 3] and resumed.trainer.progress.samples_consumed == 26


def test_a_length_that_grows_is_told_and_losses_are_evaluated_at_that_of_the_step_to_come(make: Any) -> None:
    """A step is 6 samples of 8 tokens: the switches are ahead of the third step and of the fourth."""
    this = make("--train-iters 4 --seq-length 8 --seq-length-schedule 0:2;96:4;97:8 --eval-interval 1 --log-interval 1")
    lengths: list[int] = []
    monitor = this.trainer.find(SpeedMonitor)
    monitor_start = monitor.on_train_start

    def on_train_start() -> None:
        monitor_start()
        monitor.rates.flops_of_sample = lambda length: lengths.append(length) or 1.0

    monitor.on_train_start = on_train_start
    this.trainer.fit()
    assert lengths == [2, 2, 4, 8] and this.trainer.samples_taken == {2: 12, 4: 6, 8: 6}
    assert [values["seq_length"] for values in this.records.of("train")] == [2, 2, 4, 8]
    assert [line.split("| sequence ")[1].split(" ")[0] for line in this.screen.lines if "loss scale" in line] == [
        "2", "2", "4", "8"
    ]  # fmt: skip
    assert this.engine.evaluated == [("valid", 0, 2)] * 10 + [("valid", 0, 4)] * 10 + [("valid", 0)] * 20
    plain = make("--train-iters 1 --seq-length 8 --seq-length-schedule 0:8 --log-interval 1")
    plain.trainer.fit()
    assert "seq_length" not in plain.records.of("train")[0]


def test_several_corpora_are_evaluated_one_by_one_and_weighed(make: Any) -> None:
    this = make("--train-iters 1 --eval-iters 2")
    this.screen.on_train_start()
    this.trainer.data.corpora = {"valid": {"a": 0.75, "b": 0.25, "c": 0.0}}
    losses = {"a": 1.0, "b": 3.0, "c": float("inf")}
    this.engine.evaluate_batch = lambda data: losses[data.source[2]]
    assert this.evaluator.evaluate("valid") == 1.5
    assert this.screen.lines == ["step 0 | validation loss 1.5000 | perplexity 4.48 | a 1.0000, b 3.0000, c inf"]
    assert this.records.of("valid")[0]["losses"] == losses
    this.engine.evaluate_batch = lambda data: float(len(data.source))
    assert this.evaluator.evaluate("test") == 2.0
    assert "losses" not in this.records.of("test")[0], "of one corpus nothing more is said"


def test_the_longest_wait_for_data_is_told_as_a_share(make: Any) -> None:
    this = make("--train-iters 2 --log-interval 1 --eval-iters 0")
    this.engine.train_step = lambda data, step, number: (
        setattr(data, "_waited_s", 0.125 * (step + 1)) or StepResult(1.0, 1.0, 1.0, False)
    )
    this.trainer.fit()
    shares = [line.split("| data wait ")[1].split(" |")[0] for line in this.screen.lines if "loss" in line]
    assert shares == ["12.5 %", "25.0 %"], "each since the one before"


def ask(rank: int, asked: list[int], late: list[int]) -> tuple[str, bool]:
    grid = build_grid(Topology.of_world(4, tensor=2, pipe=2), rank)
    stop = StopRequests()
    if rank in asked:
        stop.signal_name = "SIGTERM"
    world, progress = World("cpu", CPU, grid, rank), TrainProgress(step=1)
    this: Any = SimpleNamespace(stop=stop, progress=progress, world=world, _save_is_wanted=rank in late)
    return Trainer.agree(this)


def test_all_ranks_stop_together_or_none() -> None:
    assert run_ranks(4, ask, [], [3]) == [("", True)] * 4, "the wish of one to save is of all"
    reasons = run_ranks(4, ask, [2], [])
    assert reasons[2] == ("received SIGTERM", False)
    assert {reasons[rank] for rank in (0, 1, 3)} == {("another rank was asked to stop", False)}


def test_a_run_draws_dropout_by_seed_replica_and_tensor_rank(corpus: Path, tmp_path: Path) -> None:
    def note_streams(rank: int) -> None:
        streams_of = setup.make_streams

        def noted(*args: Any, **kwargs: Any) -> Any:
            made = streams_of(*args, **kwargs)
            (tmp_path / str(rank)).write_text(f"{made.seed} {made.data_rank} {made.tensor_rank}")
            return made

        setup.make_streams = noted  # type: ignore[assignment]

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
