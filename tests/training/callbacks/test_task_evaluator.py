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
from tests.helpers.evaluation import Request, import_decoder_lm
from tests.helpers.runs import make_flags, train_ranks, write_corpus
from tools.report_parts.runs import chart_data, read_run, run_data

TEXTS = [("The tide", " comes in"), ("", "海"), ("The tide comes in twice a day", ", and goes")]
SHORT = "--fp64 --train-iters 4 --hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --eval-interval 2"


class FakeTasks:
    """In place of lm_eval's tasks: one that scores, and one that writes."""

    generating_tasks = ("written",)

    def __init__(self, suite: Any, device_type: str) -> None:
        self.suite = suite

    def evaluate(self, lm: Any) -> Results:
        scores = lm.loglikelihood([Request(pair) for pair in TEXTS])
        rolling = lm.loglikelihood_rolling([Request(("".join(TEXTS[2]) * 3,))])
        results = {"small": {"acc": float(scores[0][1]), "sum": sum(value for value, _ in scores) + rolling[0]}}
        if "written" in self.suite.tasks:
            texts = lm.generate_until([Request((text, {"max_gen_toks": 4})) for text, _ in TEXTS])
            results["written"] = {"characters": float(len("".join(texts))), "characters_stderr": 0.5}
        return Results(results, {})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = ModuleType("lm_eval")
    module.__spec__ = ModuleSpec("lm_eval", None)
    import_decoder_lm()
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setattr(task_evaluator, "LoadedTasks", FakeTasks)
    (tmp_path / "suite.yaml").write_text("tasks: [small, written]\n")
    return tmp_path / "suite.yaml"


def train_and_read_records(corpus: Path, folder: Path, num_ranks: int, extra: str) -> list[dict[str, Any]]:
    codes, _ = train_ranks(num_ranks, make_flags(corpus, folder, f"{SHORT} {extra}"))
    assert codes == [0] * num_ranks
    return read_metrics(folder / "metrics.jsonl")


def select_records(all_records: list[dict[str, Any]], *record_types: str) -> list[Any]:
    names = ("kind", "step", "loss", "grad_norm") if "tasks" not in record_types else ("step", "small", "written")
    return [{name: record.get(name) for name in names} for record in all_records if record["kind"] in record_types]


LAYOUTS = [
    (2, "--model-parallel-size 2 --sequence-parallel --gas 2"),
    pytest.param(2, "--gas 1 --zero-stage 3", marks=pytest.mark.slow),
    pytest.param(4, "--pipe-parallel-size 2 --gas 1 --zero-stage 3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_layouts_equal_single_process_task_results(
    num_ranks: int, layout: str, corpus: Path, tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    task_flags = f"--eval-tasks {suite} --eval-tasks-interval 2"
    expected = select_records(train_and_read_records(corpus, tmp_path / "alone", 1, f"--gas 2 {task_flags}"), "tasks")
    assert [record["step"] for record in expected] == [2, 4], "and not twice at the end"
    assert "step 2 | tasks | small acc 0.0000 | written characters " in capfd.readouterr().out
    is_sequence_parallel = "sequence" in layout
    if is_sequence_parallel:
        suite.write_text("tasks: [small]\n")
        monkeypatch.setattr(FakeTasks, "generating_tasks", ())
    actual = select_records(
        train_and_read_records(corpus, tmp_path / "ranks", num_ranks, f"{layout} {task_flags}"), "tasks"
    )
    for actual_record, expected_record in zip(actual, expected, strict=True):
        assert abs(actual_record["small"]["sum"] - expected_record["small"]["sum"]) <= 2e-11 * abs(
            expected_record["small"]["sum"]
        )
        assert actual_record["written"] == (None if is_sequence_parallel else expected_record["written"])


@pytest.mark.slow  # evaluations beside the steps: tests/training/test_side_effects.py
def test_task_evaluation_does_not_change_training(corpus: Path, tmp_path: Path, suite: Path) -> None:
    extra = "--pipe-parallel-size 2 --gas 2 --hidden-dropout 0.1 --attention-dropout 0.1"
    runs = [
        select_records(
            train_and_read_records(corpus, tmp_path / f"{run_idx}", 2, f"{extra} {task_flags}"),
            "train",
            "valid",
            "test",
        )
        for run_idx, task_flags in enumerate(("", f"--eval-tasks {suite} --eval-tasks-interval 1"))
    ]
    assert runs[0] == runs[1] and len(runs[0]) > 4


def test_tasks_without_interval_run_at_end_and_appear_in_report(corpus: Path, tmp_path: Path, suite: Path) -> None:
    run_records = train_and_read_records(corpus, tmp_path / "run", 1, f"--eval-tasks {suite}")
    assert [record["step"] for record in select_records(run_records, "tasks")] == [4]
    run = run_data(read_run(tmp_path / "run", "run"), 100)
    charts = [chart["keys"] for chart in chart_data([run]) if chart["id"] == "tasks"]
    assert charts == [["tasks/small/acc"], ["tasks/small/sum"], ["tasks/written/characters"]], "a metric each"
    assert run["tasks"]["step"] == [4]


def test_failed_task_is_reported_and_run_continues(
    corpus: Path, tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def evaluate(self: Any, lm: Any) -> Results:
        lm.loglikelihood([Request(TEXTS[0])])
        raise DataError("the tasks small failed: KeyError: 'x'")

    monkeypatch.setattr(FakeTasks, "evaluate", evaluate)
    run_records = train_and_read_records(
        corpus, tmp_path / "run", 2, f"--gas 1 --eval-tasks {suite} --eval-tasks-interval 2"
    )
    assert (
        select_records(run_records, "tasks") == []
        and [record["step"] for record in run_records if record["kind"] == "train"][-1] == 4
    )
    output = capfd.readouterr()
    assert (output.out + output.err).count("TASKS NOT EVALUATED: the tasks small failed") == 2, "each once"


def signal_rank_1(rank: int) -> None:
    """Let rank 1 have a signal from the start on."""
    original_init = StopRequests.__init__

    def init_with_signal(self: StopRequests) -> None:
        original_init(self)
        self.signal_name = "SIGTERM" if rank else None

    StopRequests.__init__ = init_with_signal  # type: ignore[method-assign]


def test_signal_interrupts_task_evaluation(corpus: Path, tmp_path: Path, suite: Path) -> None:
    argv = make_flags(corpus, tmp_path / "run", f"{SHORT} --gas 1 --eval-tasks {suite} --eval-tasks-interval 1")
    codes, _ = train_ranks(2, argv, inject_fault=signal_rank_1)
    run_records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert codes == [75, 75] and select_records(run_records, "tasks") == []
    assert [record["step"] for record in run_records if record["kind"] == "save"] == [1]


def test_unsupported_task_evaluation_is_rejected_before_training(
    corpus: Path, tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse_error(*args: str, world_size: int = 1) -> str:
        with pytest.raises(ConfigError) as caught:
            parse([*args, "--vocab-size", "64", "--data-path", "x"], world_size=world_size, env={})
        return str(caught.value)

    assert "has no effect without --eval-tasks FILE" in parse_error("--eval-tasks-interval", "2")
    assert "must name a file of tasks" in parse_error("--eval-tasks", str(tmp_path / "none"))
    context_flags = ("--context-parallel-size", "2")
    assert "which --context-parallel-size cannot split" in parse_error(
        "--eval-tasks", str(suite), *context_flags, world_size=2
    )
    assert "applies to training only" in parse_error("--eval-tasks", str(suite), "--eval-only", "--load", str(tmp_path))
    argv = make_flags(corpus, tmp_path / "run", f"{SHORT} --eval-tasks {suite}")
    with pytest.raises(AssertionError, match="--sequence-parallel does not support tasks .* got written"):
        train_ranks(2, [*argv, "--model-parallel-size", "2", "--sequence-parallel"])

    def failing_init(self: Any, suite: Any, device_type: str) -> None:
        raise DataError("a.yaml:3: must be YAML")

    monkeypatch.setattr(FakeTasks, "__init__", failing_init)
    with pytest.raises(AssertionError, match=r"ConfigError: a\.yaml:3: must be YAML"):
        train_ranks(1, argv)
    monkeypatch.delitem(sys.modules, "lm_eval")
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    assert "--eval-tasks needs the package lm_eval" in parse_error("--eval-tasks", str(suite))


def test_headline_shows_usual_metric() -> None:
    assert headline({"acc": 0.5, "acc_norm": 0.25, "acc_norm_stderr": 0.1}) == "acc_norm 0.2500"
    assert headline({"bleu": 3.0, "bleu_stderr": 1.0}) == "bleu 3.0000" and headline({}) == "no metric"
    assert json.dumps(headline({"exact_match,strict": 1.0})) == '"exact_match,strict 1.0000"'
