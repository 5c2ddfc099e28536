"""When hooks are called, on which ranks and in which order; what a checkpoint keeps of a callback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt2
from megatron.config import parse, resolve_dtype
from megatron.config.batch import Share
from megatron.errors import NumericsError, StopRequest
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.mappings import all_reduce
from megatron.mpu.topology import Topology
from megatron.runtime.exit_signals import StopRequests
from megatron.training import Callback, initialize, run_callbacks, startup
from megatron.training.callbacks import Callback as Reexported
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.data import RunData
from megatron.training.run_callbacks import CallbackRow
from megatron.training.step_result import StepResult
from megatron.training.timeouts import AXES
from megatron.training.trainer import HOOKS, STEP_HOOKS, Trainer
from megatron.training.world import World
from tests.helpers import runs
from tests.helpers.harness import run_ranks

CPU = torch.device("cpu")
BASE_ARGS = "--data-path none --device cpu --vocab-size 9 --batch-size 2 --gas 3 --lr 0.1 --eval-iters 0"


class FakeEngine:
    """Takes steps that do nothing, and calls ``on_loss`` as engines do."""

    def __init__(self, error: Exception | None = None) -> None:
        self.optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.0}])
        self.on_loss: Callable[[float], None] = lambda loss: None
        self.error = error

    def train_step(self, data: Any, step: int, share: Share) -> StepResult:
        self.on_loss(step + 0.5)
        if self.error is not None:
            raise self.error
        return StepResult(step + 0.5, 1.0, 1.0, False)


def make_trainer(callbacks: list[Callback], extra: str = "", world: World | None = None, engine: Any = None) -> Trainer:
    config = parse([*BASE_ARGS.split(), *extra.split()], world_size=1)
    trainer_world = world or World("cpu", CPU, single_grid(), 0)
    return Trainer(config, trainer_world, engine or FakeEngine(), RunData({}, None), Path(), callbacks)


class RecordingCallback(Callback):
    """Notes the hooks that are called on it."""

    def __init__(self, name: str, calls: list[str], every: int = 1) -> None:
        self.label, self.calls, self.every = name, calls, every

    def _note(self, hook: str) -> None:
        self.calls.append(f"{self.label} {hook} {self.trainer.progress.step}")


def _make_recording_hook(hook: str) -> Callable[..., None]:
    return lambda self, *args: self._note(hook)


for _hook in HOOKS:
    setattr(RecordingCallback, _hook, _make_recording_hook(_hook))


def test_hooks_follow_table_order() -> None:
    calls: list[str] = []
    make_trainer([RecordingCallback("a", calls)], "--train-iters 2 --log-interval 1").fit()
    step_hooks = ["step_start {0}", "before_update {0}", "after_update {1}", "log {1}", "step_end {1}"]
    expected = [
        "train_start 0",
        *(hook_call.format(n, n + 1) for n in range(2) for hook_call in step_hooks),
        "train_end 2",
    ]
    assert calls == [f"a on_{hook_call}" for hook_call in expected]


def test_callbacks_run_in_list_order_and_only_when_due() -> None:
    calls: list[str] = []
    callbacks: list[Callback] = [
        RecordingCallback("a", calls, every=2),
        RecordingCallback("b", calls),
        RecordingCallback("never", calls, every=0),
    ]
    make_trainer(callbacks, "--train-iters 4 --log-interval 100").fit()
    ends = [call for call in calls if "on_step_end" in call]
    assert ends == [
        f"{label} on_step_end {step}" for step in (1, 2, 3, 4) for label in "ab" if label == "b" or step % 2 == 0
    ]
    assert not [call for call in calls if call.startswith("never") and call.split()[1] in STEP_HOOKS]
    assert [call for call in calls if "on_log" in call and call.startswith("a")] == ["a on_log 1", "a on_log 4"]


def test_hook_without_override_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class LossCallback(Callback):
        def on_step_end(self, result: StepResult) -> None:
            self.seen = result.loss

    for hook in HOOKS:
        monkeypatch.setattr(Callback, hook, lambda self, *args: pytest.fail("called on the base class"))
    callback = LossCallback()
    make_trainer([callback], "--train-iters 2").fit()
    assert callback.seen == 1.5
    assert Callback is Reexported


def callback_names_on_rank(rank: int) -> list[str]:
    class First(Callback):
        on_all_ranks = False

    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    trainer = make_trainer([First(), Callback()], world=World("cpu", CPU, grid, rank))
    return [callback.name for callback in trainer.callbacks]


def test_rank_0_callback_is_absent_on_other_ranks() -> None:
    assert run_ranks(2, callback_names_on_rank) == [["First", "Callback"], ["Callback"]]


def hook_calls_on_rank(rank: int) -> list[str]:
    calls: list[str] = []
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    make_trainer([RecordingCallback("a", calls)], "--train-iters 2", world=World("cpu", CPU, grid, rank)).fit()
    return calls


def test_all_ranks_call_hooks_in_same_order() -> None:
    first, last = run_ranks(2, hook_calls_on_rank)
    assert first == last and len(first) > 8


def test_callback_stops_run_with_reason() -> None:
    class LowLoss(Callback):
        def on_step_end(self, result: StepResult) -> None:
            if result.loss > 1.0:
                self.trainer.stop.request("the loss is what it should be")

    trainer = make_trainer([LowLoss()], "--train-iters 9")
    with pytest.raises(StopRequest, match="the loss is what it should be"):
        trainer.fit()
    assert trainer.progress.step == 2


def test_rolled_back_step_has_no_step_end_hook() -> None:
    calls: list[str] = []

    class RollbackCallback(Callback):
        times = 0

        def on_step_end(self, result: StepResult) -> None:
            if self.trainer.progress.step == 3 and not self.times:
                self.times += 1
                self.trainer.progress.step, self.trainer.progress.samples_consumed = 1, 6

    trainer = make_trainer([RollbackCallback(), RecordingCallback("a", calls)], "--train-iters 4 --log-interval 100")
    trainer.fit()
    assert [call for call in calls if "on_step_end" in call] == [f"a on_step_end {step}" for step in (1, 2, 2, 3, 4)]
    assert trainer.steps_taken == 6 and trainer.progress.step == 4


def test_exception_reaches_all_callbacks_and_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    class Worse(Callback):
        def on_exception(self, error: BaseException) -> None:
            raise ValueError("of its own")

    class Finder(Callback):
        def find_nonfinite(self, error: NumericsError) -> str | None:
            return "layers.3 gave it"

    calls: list[str] = []
    engine = FakeEngine(NumericsError("the loss must be finite, got nan."))
    trainer = make_trainer([Worse(), Finder(), RecordingCallback("a", calls)], "--train-iters 2", engine=engine)
    with pytest.raises(NumericsError, match=r"^step 1 \(samples 0-5\): the loss must be .*, layers.3 gave it\.$"):
        trainer.fit()
    assert calls[-1] == "a on_exception 0"
    assert "Worse.on_exception failed (ValueError: of its own)" in capsys.readouterr().err


# In whole runs.


class Counter(Callback):
    """Counts steps, over restarts."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, result: StepResult) -> None:
        self.count += 1

    def on_log(self, metrics: dict[str, Any]) -> None:
        metrics["counted"] = self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def read_counts(folder: Path) -> list[int]:
    return [record["counted"] for record in read_metrics(folder / "metrics.jsonl") if "counted" in record]


def add_counter(rank: int) -> None:
    runs.INJECTED_CALLBACKS.append(Counter())


def test_callback_state_resumes_or_starts_from_scratch(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    short_args = "--train-iters 6 --eval-iters 0"
    assert runs.train_ranks(1, runs.make_flags(corpus, folder, f"{short_args} --exit-interval 3"), add_counter)[0] == [
        75
    ]
    manifest = json.loads((folder / "checkpoints/step-00000003/manifest.json").read_text())
    state = manifest["state"]
    assert state.get("callbacks") == {"Counter": {"count": 3}} and "losses" in state["guard"]
    assert runs.train_ranks(1, runs.make_flags(corpus, folder, f"{short_args} --load {folder}"), add_counter)[0] == [0]
    assert read_counts(folder) == [0, 1, 2, 3, 4, 5]
    stateless_dir = tmp_path / "without"
    assert runs.train_ranks(1, runs.make_flags(corpus, stateless_dir, f"{short_args} --exit-interval 3"))[0] == [75]
    assert runs.train_ranks(
        1, runs.make_flags(corpus, stateless_dir, f"{short_args} --load {stateless_dir}"), add_counter
    )[0] == [0]
    assert read_counts(stateless_dir) == [0, 1, 2], "a checkpoint that knows nothing of it"


class Collectives(Callback):
    """A user's own, with a sum of its own in some steps, and a number in the record."""

    every = 2

    def on_step_end(self, result: StepResult) -> None:
        all_reduce(torch.ones(1), self.trainer.world.grid.world)

    def on_log(self, metrics: dict[str, Any]) -> None:
        metrics["ranks"] = all_reduce(torch.ones(1), self.trainer.world.grid.world).item()


ALL_FEATURES_ARGS = (
    "--train-iters 4 --log-interval 2 --eval-iters 1 --eval-interval 2 --save-interval 2 --log-layer-norms "
    "--stability-guard skip --stability-sigma 1000 --drift-interval 2 --pipe-parallel-size 2 --step-timeout 30"
)
COLLECTIVE_NAMES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather",
)


def _exclude_callbacks(original: Callable[..., list[CallbackRow]]) -> Callable[..., list[CallbackRow]]:
    excluded = ("Evaluator", "LayerNorms", "ReplicaCheck")
    return lambda *args: [row for row in original(*args) if row.path.partition(":")[2] not in excluded]


def _reverse_callbacks(original: Callable[..., list[CallbackRow]]) -> Callable[..., list[CallbackRow]]:
    return lambda *args: original(*args)[::-1]


VARIATIONS: dict[str, tuple[Any, list[Callback]]] = {
    "as they are": (None, []),
    "added": (None, [Collectives(), Counter()]),
    "left out": (_exclude_callbacks, []),
    "reordered": (_reverse_callbacks, [Collectives()]),
}


def record_collectives(rank: int, argv_by_variation: dict[str, list[str]]) -> dict[str, list[tuple[str, str]]]:
    """Return, of each variation, the collectives that this rank has called: (group, operation)."""
    calls_by_variation: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []

    def make_recorder(name: str, original: Any) -> Any:
        def record_and_call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            current.append(("world" if group is None else group.group_name, name))
            return original(*args, **kwargs)

        return record_and_call

    for name in COLLECTIVE_NAMES:
        setattr(dist, name, make_recorder(name, getattr(dist, name)))
    runs.disable_slow_features()
    original_callbacks = run_callbacks.step_callbacks
    for name, argv in argv_by_variation.items():
        transform, extra_callbacks = VARIATIONS[name]
        run_callbacks.step_callbacks = original_callbacks if transform is None else transform(original_callbacks)
        current.clear()
        config = resolve_dtype(runs.parse_script_config(pretrain_gpt2, argv, 2), "fp32")
        providers = (
            pretrain_gpt2.train_valid_test_datasets_provider,
            pretrain_gpt2.model_provider,
            pretrain_gpt2.forward_step,
        )
        world = initialize.start(config)
        handles = [getattr(world.grid, axis).handle for axis in AXES]  # the routes between stages are the engine's own
        groups = {"world", *(handle.group_name for handle in handles if handle is not None)}
        startup.run(config, world, *providers, "gpt2", StopRequests(), extra_callbacks)
        calls_by_variation[name] = [call for call in current if call[0] in groups]
    return calls_by_variation


def test_ranks_call_same_collectives_in_same_order_for_any_callbacks(corpus: Path, tmp_path: Path) -> None:
    argv_by_variation = {
        name: runs.make_flags(corpus, tmp_path / name.replace(" ", "-"), ALL_FEATURES_ARGS) for name in VARIATIONS
    }
    first, last = run_ranks(2, record_collectives, argv_by_variation, deadline_s=110.0)
    assert first == last
    assert len(first["left out"]) < len(first["as they are"]) < len(first["added"])
    records = {name: read_metrics(tmp_path / name.replace(" ", "-") / "metrics.jsonl") for name in VARIATIONS}
    losses = {
        name: [r["loss"].hex() for r in run_records if r["kind"] == "train"] for name, run_records in records.items()
    }
    assert len(losses["added"]) == 3 and len(set(map(tuple, losses.values()))) == 1, "and trains to the same numbers"
    assert [record["ranks"] for record in records["added"] if "ranks" in record] == [2.0] * 3


def load_documented_callback() -> Callback:
    """Return the callback that docs/own_model.md shows, as it stands there."""
    section = (runs.ROOT / "docs" / "own_model.md").read_text(encoding="utf-8").split("## Your own callback")[1]
    lines = [line[4:] for line in section.split("\n## ")[0].splitlines() if line.startswith("    ")]
    code = "\n".join(line for line in lines if not line.startswith(("pretrain(", "bash ")))
    namespace: dict[str, Any] = {"torch": torch}
    exec(code, namespace)  # noqa: S102 - it is our own page
    callback: Callback = namespace["WeightNorm"]()
    return callback


def test_documented_callback_logs_weight_norm(corpus: Path, tmp_path: Path) -> None:
    argv = runs.make_flags(corpus, tmp_path / "run", "--train-iters 2 --eval-iters 0 --pipe-parallel-size 2")
    codes, _ = runs.train_ranks(2, argv, lambda rank: runs.INJECTED_CALLBACKS.append(load_documented_callback()))
    assert codes == [0, 0]
    norms = [record.get("weight_norm") for record in read_metrics(tmp_path / "run/metrics.jsonl")[:2]]
    assert all(norm is not None and 1.0 < norm < 1000.0 for norm in norms)
