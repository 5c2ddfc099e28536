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
from tests.helpers.layouts import trace_layout

CPU = torch.device("cpu")
BASE_ARGS = "--data-path none --device cpu --vocab-size 9 --batch-size 2 --gas 3 --lr 0.1 --lr-decay-style linear"


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


class RecordingData:
    """Tells from which sample an iterator was asked to start."""

    fingerprint = order = exclusion = None
    has_training = True
    corpora: dict[str, dict[str, float]] = {}

    def batches(
        self,
        split: str,
        config: Any,
        world: World,
        samples_consumed: int = 0,
        corpus: str | None = None,
        length: int | None = None,
        steps_taken: int = 0,
    ) -> TimedBatches:
        is_shortened = length is not None and length < config.batch.seq_length
        return TimedBatches(
            (split, samples_consumed, *([corpus] if corpus else []), *([length] if is_shortened else []))
        )


class FakeSpeedMonitor(SpeedMonitor):
    """Measures nothing but waits for data and the bubble."""

    def __init__(self) -> None:
        super().__init__([0])

    def on_train_start(self) -> None:
        self._predict_bubble: Any = lambda step: None
        self._last_totals = (0, Counter(), 0.0)
        self.rates: Any = SimpleNamespace(
            flops_of_sample=lambda length: 0.0,
            drain=lambda steps, samples, pause, waited, flops, dropped: {
                "mfu": None,
                "step_s": 1.0,
                "tokens_per_s": 1.0,
                "flops_per_s": 1.0,
                "data_wait": waited,
            },
        )


class RecordingConsole(Console):
    """Notes the lines among the calls of the engine."""

    def __init__(self, total: int, calls: list[str]) -> None:
        super().__init__("plain", total, [0])
        self.calls, self.lines = calls, list[str]()

    def on_train_start(self) -> None:
        self._started_at, self._should_log_fusion = 0.0, False
        self.trainer.print_line = self.line

    def line(self, text: str) -> None:
        self.calls.append(f"line {text.split('|')[0].strip()}")
        self.lines.append(text)

    def on_train_end(self) -> None:
        pass


class RecordsCallback(Callback):
    """Keeps the records of a run: (kind, step, values)."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, dict[str, Any]]] = []

    def of(self, record_type: str) -> list[dict[str, Any]]:
        return [values for written_type, _, values in self.written if written_type == record_type]

    def on_log(self, metrics: dict[str, Any]) -> None:
        self.written.append(("train", self.trainer.progress.step, metrics))

    def on_evaluate_end(self, split: str, values: dict[str, Any]) -> None:
        self.written.append((split, self.trainer.progress.step, values))


class ValidationEvaluator(Evaluator):
    """Leaves out the test split at the end."""

    def on_train_end(self) -> None:
        pass


class RunFixture(NamedTuple):
    """A trainer with an engine that counts, and the callbacks that a test looks at."""

    trainer: Trainer
    calls: list[str]
    screen: RecordingConsole
    records: RecordsCallback
    evaluator: ValidationEvaluator
    engine: Any


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., RunFixture]:
    """Return a function from flags to a run; ``kinds``: the callbacks that it has, None for all."""
    calls: list[str] = []

    class RecordingSaver:
        def __init__(self, world: Any) -> None:
            pass

        def save(self, root: Path, step: int, retention: Any) -> Path:
            calls.append(f"save {step}")
            return root / str(step)

    monkeypatch.setattr(checkpointer, "capture", lambda progress, **_: progress.step)
    monkeypatch.setattr(checkpointer, "SyncSaver", RecordingSaver)

    def build(extra: str, skipped: tuple[int, ...] = (), without: tuple[type[Callback], ...] = ()) -> RunFixture:
        config = parse([*BASE_ARGS.split(), *extra.split()], world_size=1)
        world = World("cpu", CPU, single_grid(), 0)
        stop = StopRequests()
        stop.set_limits(config.run.exit_interval, 0.0, 0.0)
        engine = CountingEngine(calls, set(skipped))
        screen, records = RecordingConsole(config.batch.train_iters, calls), RecordsCallback()
        evaluator = ValidationEvaluator(config.batch.eval_interval if config.batch.eval_iters else 0)
        saver, guard = checkpointer.Checkpointer(RunPaths(tmp_path, None)), StabilityGuard(config.stability)
        callbacks = [
            callback
            for callback in (saver, guard, evaluator, FakeSpeedMonitor(), screen, records)
            if not isinstance(callback, without)
        ]
        data: Any = RecordingData()
        trainer = Trainer(config, world, engine, data, tmp_path, callbacks, stop=stop)  # type: ignore[arg-type]
        return RunFixture(trainer, calls, screen, records, evaluator, engine)

    return build


def test_skipped_step_consumes_samples_but_not_learning_rate(make_run: Any) -> None:
    run = make_run("--train-iters 5 --lr-decay-iters 4 --warmup 0", skipped=(1, 2))
    run.trainer.fit()
    assert run.engine.rates == pytest.approx([0.075, 0.05, 0.05, 0.05, 0.025])
    progress = run.trainer.progress
    assert (progress.step, progress.updates, progress.num_skipped_steps) == (5, 3, 2)
    assert progress.samples_consumed == 5 * 6
    assert run.trainer.last_loss == 4.5


def test_listed_steps_are_skipped_without_reading_their_samples(make_run: Any) -> None:
    run = make_run("--train-iters 8 --lr-decay-iters 4 --warmup 0 --iterations-to-skip 2 4-5 8 --save-interval 2")
    run.trainer.fit()
    assert [call for call in run.calls if call.startswith(("train", "save"))] == [
        "train 0", "train 2", "train 5", "save 6", "train 6", "save 8"
    ]  # fmt: skip
    assert run.engine.read == [("train", 0), ("train", 12), ("train", 30), ("train", 30)]
    assert run.engine.rates == pytest.approx([0.075, 0.05, 0.025, 0.0]), "skipped steps do not advance the rate"
    progress = run.trainer.progress
    assert (progress.step, progress.updates, progress.samples_consumed, progress.samples_skipped) == (8, 4, 48, 24)


def test_weight_decay_follows_updates(make_run: Any) -> None:
    flags = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5 --log-interval 1"
    run = make_run(f"--train-iters 4 {flags} --eval-iters 0", skipped=(1,))
    for group in run.engine.optimizer.param_groups:
        group |= {"weight_decay": -1.0, "has_default_decay": group is run.engine.optimizer.param_groups[0]}
    run.trainer.fit()
    assert [record["weight_decay"] for record in run.records.of("train")] == pytest.approx([0.2, 0.3, 0.3, 0.4])
    assert [group["weight_decay"] for group in run.engine.optimizer.param_groups] == pytest.approx([0.4, -1.0])


def test_run_resumes_at_saved_sample_and_learning_rate(make_run: Any) -> None:
    run = make_run("--train-iters 6 --lr-decay-iters 4 --warmup 0")
    run.trainer.progress = TrainProgress(step=4, updates=2, samples_consumed=24)
    run.trainer.fit()
    assert run.engine.read == [("train", 24)] * 2
    assert run.engine.rates == pytest.approx([0.025, 0.0])
    assert [call for call in run.calls if call.startswith("train")] == ["train 4", "train 5"]


def test_step_order_is_log_evaluate_save_stop(make_run: Any) -> None:
    flags = "--train-iters 9 --log-interval 2 --eval-interval 2 --eval-iters 2 --save-interval 4 --exit-interval 4"
    run = make_run(flags)
    with pytest.raises(StopRequest, match="stopped after step 4 of 9: --exit-interval 4.*--load"):
        run.trainer.fit()
    assert run.calls == [
        *("train 0", "bubble", "line step 1/9"),
        *("train 1", "bubble", "line step 2/9", "evaluate", "evaluate", "line step 2"),
        *("train 2", "train 3", "bubble", "line step 4/9", "evaluate", "evaluate", "line step 4", "save 4"),
        "line step 4",
    ]
    assert run.trainer.find(checkpointer.Checkpointer).newest_step == 4
    assert run.engine.read == [("train", 0)] * 4
    assert run.engine.evaluated == [("valid", 0)] * 4, "what is trained on has a stream of its own"


def test_first_and_last_steps_are_logged_with_any_interval(make_run: Any) -> None:
    run = make_run("--train-iters 7 --log-interval 3 --eval-iters 0")
    run.trainer.fit()
    assert [call for call in run.calls if "/7" in call] == [f"line step {step}/7" for step in (1, 3, 6, 7)]
    assert [step for record_type, step, _ in run.records.written if record_type == "train"] == [1, 3, 6, 7]
    resumed = make_run("--train-iters 6 --log-interval 3 --eval-iters 0")
    resumed.trainer.progress = TrainProgress(step=4, updates=4, samples_consumed=24)
    resumed.calls.clear()
    resumed.trainer.fit()
    assert [call for call in resumed.calls if "/6" in call] == ["line step 6/6"]


def test_end_table_shows_losses_of_all_splits_and_speed(make_run: Any) -> None:
    run = make_run("--train-iters 2 --log-interval 1 --eval-interval 1 --eval-iters 1")
    run.trainer.fit()
    run.trainer.find(FakeSpeedMonitor).rates.mean_tokens_per_s = lambda: 1234.4
    run.evaluator.evaluate("test")
    rows = dict(run.screen.end_rows(5.0))
    names = ("last training loss", "validation loss", "test loss")
    assert [rows.get(name) for name in names] == ["1.5000", "2.0000", "2.0000"]
    assert (rows["tokens/s"], rows["time"]) == ("1,234 on average", "0:05 on 1 rank")
    assert "evaluations" not in rows and rows["metrics"].startswith(str(run.trainer.folder / "metrics.jsonl"))


def test_bubble_is_measured_on_every_rank_and_logged_if_present(make_run: Any) -> None:
    run = make_run("--train-iters 2 --log-interval 2 --eval-iters 0")
    shares = iter([0.125, None])
    run.engine.bubble = lambda: next(shares)
    run.trainer.fit()
    assert ["| bubble 12.5 % |" in line for line in run.screen.lines if "loss" in line] == [True, False]
    assert [values.get("bubble") for values in run.records.of("train")] == [0.125, None]
    other_rank_run = make_run(
        "--train-iters 2 --log-interval 1 --eval-iters 0", without=(RecordingConsole, RecordsCallback)
    )  # a rank but the first
    other_rank_run.trainer.fit()
    assert other_rank_run.calls.count("bubble") == 2


def test_stop_saves_unsaved_step_and_last_step_is_no_stop(make_run: Any) -> None:
    run = make_run("--train-iters 4 --exit-interval 2 --save-interval 3")
    with pytest.raises(StopRequest, match="after step 2"):
        run.trainer.fit()
    assert [call for call in run.calls if call.startswith("save")] == ["save 2"]
    run.trainer.stop_text = ""
    run.trainer.fit()
    assert [call for call in run.calls if call.startswith("save")] == ["save 2", "save 3", "save 4"]


@pytest.mark.parametrize("flags", ["--eval-interval 0 --eval-iters 2", "--eval-interval 1 --eval-iters 0"])
def test_zero_interval_or_length_disables_evaluation(flags: str, make_run: Any) -> None:
    run = make_run(f"--train-iters 3 {flags}")
    run.trainer.fit()
    assert "evaluate" not in run.calls
    assert run.calls[-2:] == ["save 3", "line step 3"]


def test_evaluation_restarts_at_first_sample_and_returns_mean(make_run: Any) -> None:
    run = make_run("--train-iters 1 --eval-iters 4")
    sources: list[Any] = []
    run.engine.evaluate_batch = lambda data: sources.append(data.source) or float(len(sources))
    assert run.evaluator.evaluate("valid") == 2.5
    assert sources == [("valid", 0)] * 4


def test_batch_size_ramp_sets_micro_batches_and_sample_counts(make_run: Any) -> None:
    run = make_run("--train-iters 6 --rampup-batch-size 2 2 8 --log-interval 1")  # 2, 2, 2, 4 and then 6 samples
    run.trainer.fit()
    assert run.engine.micro_batches == [1, 1, 2, 3, 3, 3]
    assert [values["samples"] for values in run.records.of("train")] == [2, 4, 8, 14, 20, 26]
    resumed = make_run("--train-iters 6 --rampup-batch-size 2 2 8")
    resumed.trainer.progress = TrainProgress(step=2, updates=2, samples_consumed=4)
    resumed.trainer.fit()
    assert resumed.engine.micro_batches == [2, 3, 3, 3] and resumed.trainer.progress.samples_consumed == 26


def test_sequence_length_schedule_is_logged_and_used_in_evaluation(make_run: Any) -> None:
    """A step is 6 samples of 8 tokens: the switches are ahead of the third step and of the fourth."""
    run = make_run(
        "--train-iters 4 --seq-length 8 --seq-length-schedule 0:2;96:4;97:8 --eval-interval 1 --log-interval 1"
    )
    lengths: list[int] = []
    monitor = run.trainer.find(SpeedMonitor)
    monitor_start = monitor.on_train_start

    def on_train_start() -> None:
        monitor_start()
        monitor.rates.flops_of_sample = lambda length: lengths.append(length) or 1.0

    monitor.on_train_start = on_train_start
    run.trainer.fit()
    assert lengths == [2, 2, 4, 8] and run.trainer.samples_taken == {2: 12, 4: 6, 8: 6}
    assert [values["seq_length"] for values in run.records.of("train")] == [2, 2, 4, 8]
    assert [line.split("| sequence ")[1].split(" ")[0] for line in run.screen.lines if "loss scale" in line] == [
        "2", "2", "4", "8"
    ]  # fmt: skip
    assert run.engine.evaluated == [("valid", 0, 2)] * 10 + [("valid", 0, 4)] * 10 + [("valid", 0)] * 20
    fixed_length_run = make_run("--train-iters 1 --seq-length 8 --seq-length-schedule 0:8 --log-interval 1")
    fixed_length_run.trainer.fit()
    assert "seq_length" not in fixed_length_run.records.of("train")[0]


def test_corpora_are_evaluated_separately_and_weighted(make_run: Any) -> None:
    run = make_run("--train-iters 1 --eval-iters 2")
    run.screen.on_train_start()
    run.trainer.data.corpora = {"valid": {"a": 0.75, "b": 0.25, "c": 0.0}}
    losses = {"a": 1.0, "b": 3.0, "c": float("inf")}
    run.engine.evaluate_batch = lambda data: losses[data.source[2]]
    assert run.evaluator.evaluate("valid") == 1.5
    assert run.screen.lines == ["step 0 | validation loss 1.5000 | perplexity 4.48 | a 1.0000, b 3.0000, c inf"]
    assert run.records.of("valid")[0]["losses"] == losses
    run.engine.evaluate_batch = lambda data: float(len(data.source))
    assert run.evaluator.evaluate("test") == 2.0
    assert "losses" not in run.records.of("test")[0], "of one corpus nothing more is said"


def test_data_wait_is_logged_as_share_of_step_time(make_run: Any) -> None:
    run = make_run("--train-iters 2 --log-interval 1 --eval-iters 0")
    run.engine.train_step = lambda data, step, share: (
        setattr(data, "_waited_s", 0.125 * (step + 1)) or StepResult(1.0, 1.0, 1.0, False)
    )
    run.trainer.fit()
    shares = [line.split("| data wait ")[1].split(" |")[0] for line in run.screen.lines if "loss" in line]
    assert shares == ["12.5 %", "25.0 %"], "each since the one before"


def agree_on_rank(rank: int, signalled_ranks: list[int], saving_ranks: list[int]) -> tuple[str, bool]:
    grid = build_grid(Topology.from_world_size(4, tensor=2, pipe=2), rank)
    stop = StopRequests()
    if rank in signalled_ranks:
        stop.signal_name = "SIGTERM"
    world, progress = World("cpu", CPU, grid, rank), TrainProgress(step=1)
    trainer: Any = SimpleNamespace(stop=stop, progress=progress, world=world, _is_save_requested=rank in saving_ranks)
    return Trainer.agree(trainer)


def test_all_ranks_stop_together() -> None:
    assert run_ranks(4, agree_on_rank, [], [3]) == [("", True)] * 4, "the wish of one to save is of all"
    reasons = run_ranks(4, agree_on_rank, [2], [])
    assert reasons[2] == ("received SIGTERM", False)
    assert {reasons[rank] for rank in (0, 1, 3)} == {("another rank was asked to stop", False)}


def test_dropout_streams_use_seed_replica_and_tensor_rank(corpus: Path, tmp_path: Path) -> None:
    def record_streams(rank: int) -> None:
        original_make_streams = setup.make_streams

        def recording_make_streams(*args: Any, **kwargs: Any) -> Any:
            streams = original_make_streams(*args, **kwargs)
            (tmp_path / str(rank)).write_text(f"{streams.seed} {streams.data_rank} {streams.tensor_rank}")
            return streams

        setup.make_streams = recording_make_streams  # type: ignore[assignment]

    argv = runs.make_flags(corpus, tmp_path / "run", "--model-parallel-size 2 --train-iters 1 --eval-iters 0 --seed 9")
    assert runs.train_ranks(4, argv, record_streams)[0] == [0] * 4
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["9 0 0", "9 0 1", "9 1 0", "9 1 1"]


@pytest.mark.parametrize("pipe", [1, 2])
def test_evaluation_applies_no_dropout(pipe: int) -> None:
    """With weights that stand still, dropout changes the training loss and not the evaluated one."""
    frozen_flags = "--fp32 --optimizer sgd --lr 1e-30"
    without_dropout = trace_layout(1, pipe, 1, 2, 2, frozen_flags, steps=1, eval_every=1)[0]
    with_dropout = trace_layout(
        1, pipe, 1, 2, 2, f"{frozen_flags} --hidden-dropout 0.1 --attention-dropout 0.1", steps=1, eval_every=1
    )[0]
    assert with_dropout.losses != without_dropout.losses
    assert with_dropout.eval_losses == without_dropout.eval_losses
