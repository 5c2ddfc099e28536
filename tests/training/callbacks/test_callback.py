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
SIZES = "--data-path none --device cpu --vocab-size 9 --batch-size 2 --gas 3 --lr 0.1 --eval-iters 0"


class Engine:
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


def trainer_of(callbacks: list[Callback], extra: str = "", world: World | None = None, engine: Any = None) -> Trainer:
    config = parse([*SIZES.split(), *extra.split()], world_size=1)
    here = world or World("cpu", CPU, single_grid(), 0)
    return Trainer(config, here, engine or Engine(), RunData({}, None), Path(), callbacks)


class Noting(Callback):
    """Notes the hooks that are called on it."""

    def __init__(self, name: str, calls: list[str], every: int = 1) -> None:
        self.label, self.calls, self.every = name, calls, every

    def _note(self, hook: str) -> None:
        self.calls.append(f"{self.label} {hook} {self.trainer.progress.step}")


def _noting(hook: str) -> Callable[..., None]:
    return lambda self, *given: self._note(hook)


for _hook in HOOKS:
    setattr(Noting, _hook, _noting(_hook))


def test_hooks_come_in_the_order_of_their_table() -> None:
    calls: list[str] = []
    trainer_of([Noting("a", calls)], "--train-iters 2 --log-interval 1").fit()
    step = ["step_start {0}", "before_update {0}", "after_update {1}", "log {1}", "step_end {1}"]
    wanted = ["train_start 0", *(each.format(n, n + 1) for n in range(2) for each in step), "train_end 2"]
    assert calls == [f"a on_{each}" for each in wanted]


def test_callbacks_are_called_in_the_order_of_their_list_and_where_they_are_due() -> None:
    calls: list[str] = []
    callbacks: list[Callback] = [Noting("a", calls, every=2), Noting("b", calls), Noting("never", calls, every=0)]
    trainer_of(callbacks, "--train-iters 4 --log-interval 100").fit()
    ends = [call for call in calls if "on_step_end" in call]
    assert ends == [f"{who} on_step_end {step}" for step in (1, 2, 3, 4) for who in "ab" if who == "b" or step % 2 == 0]
    assert not [call for call in calls if call.startswith("never") and call.split()[1] in STEP_HOOKS]
    assert [call for call in calls if "on_log" in call and call.startswith("a")] == ["a on_log 1", "a on_log 4"]


def test_a_hook_that_a_class_leaves_alone_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Callback):
        def on_step_end(self, result: StepResult) -> None:
            self.seen = result.loss

    for hook in HOOKS:
        monkeypatch.setattr(Callback, hook, lambda self, *given: pytest.fail("called on the base class"))
    plain = Plain()
    trainer_of([plain], "--train-iters 2").fit()
    assert plain.seen == 1.5
    assert Callback is Reexported


def of_ranks(rank: int) -> list[str]:
    class First(Callback):
        on_all_ranks = False

    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    trainer = trainer_of([First(), Callback()], world=World("cpu", CPU, grid, rank))
    return [each.name for each in trainer.callbacks]


def test_a_callback_of_rank_0_is_nowhere_else() -> None:
    assert run_ranks(2, of_ranks) == [["First", "Callback"], ["Callback"]]


def calls_of(rank: int) -> list[str]:
    calls: list[str] = []
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    trainer_of([Noting("a", calls)], "--train-iters 2", world=World("cpu", CPU, grid, rank)).fit()
    return calls


def test_every_rank_calls_the_same_hooks_in_one_order() -> None:
    first, last = run_ranks(2, calls_of)
    assert first == last and len(first) > 8


def test_a_callback_ends_a_run_and_the_reason_is_said() -> None:
    class LowLoss(Callback):
        def on_step_end(self, result: StepResult) -> None:
            if result.loss > 1.0:
                self.trainer.stop.request("the loss is what it should be")

    trainer = trainer_of([LowLoss()], "--train-iters 9")
    with pytest.raises(StopRequest, match="the loss is what it should be"):
        trainer.fit()
    assert trainer.progress.step == 2


def test_a_step_from_which_a_run_goes_back_has_no_end() -> None:
    calls: list[str] = []

    class Back(Callback):
        times = 0

        def on_step_end(self, result: StepResult) -> None:
            if self.trainer.progress.step == 3 and not self.times:
                self.times += 1
                self.trainer.progress.step, self.trainer.progress.samples_consumed = 1, 6

    trainer = trainer_of([Back(), Noting("a", calls)], "--train-iters 4 --log-interval 100")
    trainer.fit()
    assert [call for call in calls if "on_step_end" in call] == [f"a on_step_end {step}" for step in (1, 2, 2, 3, 4)]
    assert trainer.steps_taken == 6 and trainer.progress.step == 4


def test_an_error_comes_to_every_callback_and_is_the_one_that_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    class Worse(Callback):
        def on_exception(self, error: BaseException) -> None:
            raise ValueError("of its own")

    class Finder(Callback):
        def find_nonfinite(self, error: NumericsError) -> str | None:
            return "layers.3 gave it"

    calls: list[str] = []
    engine = Engine(NumericsError("the loss must be finite, got nan."))
    trainer = trainer_of([Worse(), Finder(), Noting("a", calls)], "--train-iters 2", engine=engine)
    with pytest.raises(NumericsError, match=r"^step 1 \(samples 0-5\): the loss must be .* Here layers.3 gave it\.$"):
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


def counted(folder: Path) -> list[int]:
    return [record["counted"] for record in read_metrics(folder / "metrics.jsonl") if "counted" in record]


def plant_counter(rank: int) -> None:
    runs.PLANTED.append(Counter())


def test_the_state_of_a_callback_goes_on_and_without_one_it_begins_anew(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    short = "--train-iters 6 --eval-iters 0"
    assert runs.train_ranks(1, runs.flags(corpus, folder, f"{short} --exit-interval 3"), plant_counter)[0] == [75]
    manifest = json.loads((folder / "checkpoints/step-00000003/manifest.json").read_text())
    state = manifest["state"]
    assert state.get("callbacks") == {"Counter": {"count": 3}} and "losses" in state["guard"]
    assert runs.train_ranks(1, runs.flags(corpus, folder, f"{short} --load {folder}"), plant_counter)[0] == [0]
    assert counted(folder) == [0, 1, 2, 3, 4, 5]
    without = tmp_path / "without"
    assert runs.train_ranks(1, runs.flags(corpus, without, f"{short} --exit-interval 3"))[0] == [75]
    assert runs.train_ranks(1, runs.flags(corpus, without, f"{short} --load {without}"), plant_counter)[0] == [0]
    assert counted(without) == [0, 1, 2], "a checkpoint that knows nothing of it"


class Collectives(Callback):
    """A user's own, with a sum of its own in some steps, and a number in the record."""

    every = 2

    def on_step_end(self, result: StepResult) -> None:
        all_reduce(torch.ones(1), self.trainer.world.grid.world)

    def on_log(self, metrics: dict[str, Any]) -> None:
        metrics["ranks"] = all_reduce(torch.ones(1), self.trainer.world.grid.world).item()


ALL = (
    "--train-iters 4 --log-interval 2 --eval-iters 1 --eval-interval 2 --save-interval 2 --log-layer-norms "
    "--stability-guard skip --stability-sigma 1000 --drift-interval 2 --pipe-parallel-size 2 --step-timeout 30"
)
SENT = ("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_object", "broadcast_object_list", "gather")


def _left_out(plain: Callable[..., list[CallbackRow]]) -> Callable[..., list[CallbackRow]]:
    left_out = ("Evaluator", "LayerNorms", "ReplicaCheck")
    return lambda *given: [row for row in plain(*given) if row.path.partition(":")[2] not in left_out]


def _reordered(plain: Callable[..., list[CallbackRow]]) -> Callable[..., list[CallbackRow]]:
    return lambda *given: plain(*given)[::-1]


VARIATIONS: dict[str, tuple[Any, list[Callback]]] = {
    "as they are": (None, []),
    "added": (None, [Collectives(), Counter()]),
    "left out": (_left_out, []),
    "reordered": (_reordered, [Collectives()]),
}


def record_collectives(rank: int, lines: dict[str, list[str]]) -> dict[str, list[tuple[str, str]]]:
    """Return, of each variation, the collectives that this rank has called: (group, operation)."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []

    def recording(name: str, plain: Any) -> Any:
        def recorded(*args: Any, **given: Any) -> Any:
            group = given.get("group")
            current.append(("world" if group is None else group.group_name, name))
            return plain(*args, **given)

        return recorded

    for name in SENT:
        setattr(dist, name, recording(name, getattr(dist, name)))
    runs.leave_out_what_takes_long()
    plain = run_callbacks.step_callbacks
    for name, argv in lines.items():
        change, own = VARIATIONS[name]
        run_callbacks.step_callbacks = plain if change is None else change(plain)
        current.clear()
        config = resolve_dtype(runs.parse_as(pretrain_gpt2, argv, 2), "fp32")
        providers = (
            pretrain_gpt2.train_valid_test_datasets_provider,
            pretrain_gpt2.model_provider,
            pretrain_gpt2.forward_step,
        )
        here = initialize.start(config)
        handles = [getattr(here.grid, axis).handle for axis in AXES]  # the routes between stages are the engine's own
        groups = {"world", *(handle.group_name for handle in handles if handle is not None)}
        startup.run(config, here, *providers, "gpt2", StopRequests(), own)
        found[name] = [each for each in current if each[0] in groups]
    return found


def test_all_ranks_call_the_same_collectives_in_one_order_whatever_callbacks_there_are(
    corpus: Path, tmp_path: Path
) -> None:
    lines = {name: runs.flags(corpus, tmp_path / name.replace(" ", "-"), ALL) for name in VARIATIONS}
    first, last = run_ranks(2, record_collectives, lines, deadline_s=110.0)
    assert first == last
    assert len(first["left out"]) < len(first["as they are"]) < len(first["added"])
    records = {name: read_metrics(tmp_path / name.replace(" ", "-") / "metrics.jsonl") for name in VARIATIONS}
    losses = {name: [r["loss"].hex() for r in of if r["kind"] == "train"] for name, of in records.items()}
    assert len(losses["added"]) == 3 and len(set(map(tuple, losses.values()))) == 1, "and trains to the same numbers"
    assert [record["ranks"] for record in records["added"] if "ranks" in record] == [2.0] * 3


def callback_of_page() -> Callback:
    """Return the callback that docs/own_model.md shows, as it stands there."""
    page = (runs.ROOT / "docs" / "own_model.md").read_text(encoding="utf-8").split("## Your own callback")[1]
    lines = [line[4:] for line in page.split("\n## ")[0].splitlines() if line.startswith("    ")]
    code = "\n".join(line for line in lines if not line.startswith("pretrain("))
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)  # noqa: S102 - it is our own page
    made: Callback = names["WeightNorm"]()
    return made


def test_the_callback_of_the_page_logs_its_number(corpus: Path, tmp_path: Path) -> None:
    argv = runs.flags(corpus, tmp_path / "run", "--train-iters 2 --eval-iters 0 --pipe-parallel-size 2")
    codes, _ = runs.train_ranks(2, argv, lambda rank: runs.PLANTED.append(callback_of_page()))
    assert codes == [0, 0]
    norms = [record.get("weight_norm") for record in read_metrics(tmp_path / "run/metrics.jsonl")[:2]]
    assert all(norm is not None and 1.0 < norm < 1000.0 for norm in norms)
