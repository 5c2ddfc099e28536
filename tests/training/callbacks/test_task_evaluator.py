"""Tasks on the model in training: the same results in every layout, and a training that goes on as without."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.config import parse
from megatron.errors import ConfigError, DataError
from megatron.evaluation import tasks
from megatron.evaluation.tasks import Results
from megatron.runtime.exit_signals import StopRequests
from megatron.training.callbacks import task_evaluator
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.callbacks.task_evaluator import headline
from tests.helpers.evaluation import Request, decoder_lm
from tests.helpers.runs import flags, train_ranks, write_corpus
from tools.report_parts.runs import chart_data, read_run, run_data

TEXTS = [("The tide", " comes in"), ("", "海"), ("The tide comes in twice a day", ", and goes")]
SHORT = "--fp64 --train-iters 4 --hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --eval-interval 2"


class Tasks:
    """In place of lm_eval's tasks: one that scores, and one that writes."""

    that_write = ("written",)

    def __init__(self, suite: Any, kind: str) -> None:
        self.suite = suite

    def evaluate(self, lm: Any) -> Results:
        scores = lm.loglikelihood([Request(pair) for pair in TEXTS])
        rolling = lm.loglikelihood_rolling([Request(("".join(TEXTS[2]) * 3,))])
        found = {"small": {"acc": float(scores[0][1]), "sum": sum(value for value, _ in scores) + rolling[0]}}
        if "written" in self.suite.tasks:
            texts = lm.generate_until([Request((text, {"max_gen_toks": 4})) for text, _ in TEXTS])
            found["written"] = {"characters": float(len("".join(texts))), "characters_stderr": 0.5}
        return Results(found, {})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = ModuleType("lm_eval")
    module.__spec__ = ModuleSpec("lm_eval", None)
    decoder_lm()
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setattr(task_evaluator, "LoadedTasks", Tasks)
    (tmp_path / "suite.yaml").write_text("tasks: [small, written]\n")
    return tmp_path / "suite.yaml"


def records(corpus: Path, folder: Path, ranks: int, extra: str) -> list[dict[str, Any]]:
    codes, _ = train_ranks(ranks, flags(corpus, folder, f"{SHORT} {extra}"))
    assert codes == [0] * ranks
    return read_metrics(folder / "metrics.jsonl")


def of_kind(found: list[dict[str, Any]], *kinds: str) -> list[Any]:
    names = ("kind", "step", "loss", "grad_norm") if "tasks" not in kinds else ("step", "small", "written")
    return [{name: record.get(name) for name in names} for record in found if record["kind"] in kinds]


LAYOUTS = [
    (2, "--model-parallel-size 2 --sequence-parallel --gas 2"),
    pytest.param(2, "--gas 1 --zero-stage 3", marks=pytest.mark.slow),
    pytest.param(4, "--pipe-parallel-size 2 --gas 1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_every_layout_has_the_results_of_one_process(
    ranks: int, layout: str, corpus: Path, tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked = f"--eval-tasks {suite} --eval-tasks-interval 2"
    alone = of_kind(records(corpus, tmp_path / "alone", 1, f"--gas 2 {asked}"), "tasks")
    assert [record["step"] for record in alone] == [2, 4], "and not twice at the end"
    assert "step 2 | tasks | small acc 0.0000 | written characters " in capfd.readouterr().out
    is_cut = "sequence" in layout
    if is_cut:
        suite.write_text("tasks: [small]\n")
        monkeypatch.setattr(Tasks, "that_write", ())
    found = of_kind(records(corpus, tmp_path / "ranks", ranks, f"{layout} {asked}"), "tasks")
    for one, other in zip(found, alone, strict=True):
        assert abs(one["small"]["sum"] - other["small"]["sum"]) <= 2e-11 * abs(other["small"]["sum"])
        assert one["written"] == (None if is_cut else other["written"])


@pytest.mark.slow  # evaluations beside the steps: tests/training/test_side_effects.py
def test_a_training_goes_on_as_without_them(corpus: Path, tmp_path: Path, suite: Path) -> None:
    extra = "--pipe-parallel-size 2 --gas 2 --hidden-dropout 0.1 --attention-dropout 0.1"
    runs = [
        of_kind(records(corpus, tmp_path / f"{place}", 2, f"{extra} {asked}"), "train", "valid", "test")
        for place, asked in enumerate(("", f"--eval-tasks {suite} --eval-tasks-interval 1"))
    ]
    assert runs[0] == runs[1] and len(runs[0]) > 4


def test_without_an_interval_they_are_evaluated_at_the_end_and_drawn_in_the_report(
    corpus: Path, tmp_path: Path, suite: Path
) -> None:
    found = records(corpus, tmp_path / "run", 1, f"--eval-tasks {suite}")
    assert [record["step"] for record in of_kind(found, "tasks")] == [4]
    run = run_data(read_run(tmp_path / "run", "run"), 100)
    charts = [chart["keys"] for chart in chart_data([run]) if chart["id"] == "tasks"]
    assert charts == [["tasks/small/acc"], ["tasks/small/sum"], ["tasks/written/characters"]], "a metric each"
    assert run["tasks"]["step"] == [4]


def test_a_task_that_fails_is_told_and_the_run_goes_on(
    corpus: Path, tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def evaluate(self: Any, lm: Any) -> Results:
        lm.loglikelihood([Request(TEXTS[0])])
        raise DataError("the tasks small failed: KeyError: 'x'")

    monkeypatch.setattr(Tasks, "evaluate", evaluate)
    found = records(corpus, tmp_path / "run", 2, f"--gas 1 --eval-tasks {suite} --eval-tasks-interval 2")
    assert of_kind(found, "tasks") == [] and [one["step"] for one in found if one["kind"] == "train"][-1] == 4
    output = capfd.readouterr()
    assert (output.out + output.err).count("TASKS NOT EVALUATED: the tasks small failed") == 2, "each once"


def is_signalled(rank: int) -> None:
    """Let rank 1 have a signal from the start on."""
    own = StopRequests.__init__

    def signalled(self: StopRequests) -> None:
        own(self)
        self.signal_name = "SIGTERM" if rank else None

    StopRequests.__init__ = signalled  # type: ignore[method-assign]


def test_a_signal_breaks_it_off(corpus: Path, tmp_path: Path, suite: Path) -> None:
    argv = flags(corpus, tmp_path / "run", f"{SHORT} --gas 1 --eval-tasks {suite} --eval-tasks-interval 1")
    codes, _ = train_ranks(2, argv, before=is_signalled)
    found = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert codes == [75, 75] and of_kind(found, "tasks") == []
    assert [one["step"] for one in found if one["kind"] == "save"] == [1]


def test_what_cannot_be_evaluated_is_refused_ahead_of_the_training(
    corpus: Path, tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(*words: str, world_size: int = 1) -> str:
        with pytest.raises(ConfigError) as caught:
            parse([*words, "--vocab-size", "64", "--data-path", "x"], world_size=world_size, env={})
        return str(caught.value)

    assert "has no effect without --eval-tasks FILE" in problem("--eval-tasks-interval", "2")
    assert "must name a file of tasks" in problem("--eval-tasks", str(tmp_path / "none"))
    cut = ("--context-parallel-size", "2")
    assert "which --context-parallel-size cannot split" in problem("--eval-tasks", str(suite), *cut, world_size=2)
    assert "applies to training only" in problem("--eval-tasks", str(suite), "--eval-only", "--load", str(tmp_path))
    argv = flags(corpus, tmp_path / "run", f"{SHORT} --eval-tasks {suite}")
    with pytest.raises(AssertionError, match="--sequence-parallel does not support tasks .* got written"):
        train_ranks(2, [*argv, "--model-parallel-size", "2", "--sequence-parallel"])

    def fails(self: Any, suite: Any, kind: str) -> None:
        raise DataError("a.yaml:3: must be YAML")

    monkeypatch.setattr(Tasks, "__init__", fails)
    with pytest.raises(AssertionError, match=r"ConfigError: a\.yaml:3: must be YAML"):
        train_ranks(1, argv)
    monkeypatch.delitem(sys.modules, "lm_eval")
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    assert "--eval-tasks needs the package lm_eval" in problem("--eval-tasks", str(suite))


def test_a_line_shows_the_metric_that_is_usually_reported() -> None:
    assert headline({"acc": 0.5, "acc_norm": 0.25, "acc_norm_stderr": 0.1}) == "acc_norm 0.2500"
    assert headline({"bleu": 3.0, "bleu_stderr": 1.0}) == "bleu 3.0000" and headline({}) == "no metric"
    assert json.dumps(headline({"exact_match,strict": 1.0})) == '"exact_match,strict 1.0000"'
