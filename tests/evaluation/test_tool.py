"""tools/evaluate.py: tables and a file of results, the same in every layout; and what it refuses."""

from __future__ import annotations

import io
import json
import shlex
import sys
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.checkpoint.huggingface.convert import export
from megatron.checkpoint.one_process import open_folder
from megatron.errors import ConfigError, DataError
from megatron.evaluation import tasks
from megatron.evaluation.options import parse_args, should_start_ranks
from megatron.evaluation.tasks import Results
from megatron.generate.options import parse_args as parse_generate
from tests.helpers.evaluation import Request, import_decoder_lm
from tests.helpers.harness import run_ranks
from tests.helpers.saved_models import save_model
from tools import evaluate, generate


class UnpicklableError(Exception):
    """An error whose class no pickle can make again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


class FakeTasks:
    """In place of lm_eval's tasks."""

    def __init__(self, suite: Any) -> None:
        if "none" in suite.tasks:
            raise ConfigError("a task must be one of lm_eval's")
        self.suite = suite

    def evaluate(self, lm: Any, *, should_keep_samples: bool = False) -> Results:
        if "broken" in self.suite.tasks:
            raise UnpicklableError(1, 2)
        scores = lm.loglikelihood([Request(("the lamp", " stood")), Request(("灯", "在窗前"))])
        text, limit = lm.generate_until([Request(("the", {"max_gen_toks": 6}))])[0], self.suite.limit
        metrics = {"small": {"acc": sum(value for value, _ in scores), "acc_stderr": 0.5, "length": float(len(text))}}
        notes = {"small": {"alias": " - small", "version": 1, "num_fewshot": 0, "num_samples": limit}}
        return Results(metrics, notes, {"small": [{"doc": {"q": "灯"}}]} if should_keep_samples else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    save_model(folder / "run", "gpt2", activation="gelu-tanh")
    save_model(folder / "t5", "t5")
    (folder / "a.txt").write_text("the lamp stood in the window of the house, 灯在窗前 " * 4, encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in ("the house", "", "灯在窗前 the lamp")]
    (folder / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def fake_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("lm_eval")
    module.__spec__ = ModuleSpec("lm_eval", None)
    import_decoder_lm()
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setattr(tasks, "LoadedTasks", FakeTasks)


def run_tool(command_line: str) -> str:
    """Return what the tool writes to standard output."""
    stdout = io.StringIO()
    with redirect_stdout(stdout):
        evaluate.run(parse_args("", shlex.split(command_line)), {})
    return stdout.getvalue()


def run_on_rank(rank: int, command_line: str) -> str:
    return run_tool(command_line)


def default_command_line(folder: Path, output: Path) -> str:
    texts = f"--texts {folder / 'a.txt'} lines={folder / 'b.jsonl'}"
    return f"--load {folder / 'run'} {texts} --tasks small,other --limit 3 --dtype fp64 --device cpu --output {output}"


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, "--model-parallel-size 2 --max-tokens 40"),
        pytest.param(2, "--pipe-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(4, "--model-parallel-size 2 --max-tokens 10", marks=pytest.mark.slow),
    ],
)
def test_results_are_identical_in_every_layout(num_ranks: int, layout: str, folder: Path, tmp_path: Path) -> None:
    stdout = run_tool(default_command_line(folder, tmp_path / "alone.json"))
    assert "bits per byte" in stdout.replace("\n", " ") or "bits per" in stdout
    assert "│ lines " in stdout and "│ all " in stdout and "-  small" not in stdout and " - small" in stdout
    first, *other_outputs = run_ranks(
        num_ranks, run_on_rank, f"{default_command_line(folder, tmp_path / 'ranks.json')} {layout}"
    )
    assert first == stdout and not any(other_outputs)
    single_process, multi_rank = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "ranks"))
    assert list(single_process["texts"]) == ["a", "lines", "all"] and single_process["texts"]["lines"]["documents"] == 2
    for name, values in single_process["texts"].items():
        assert abs(values["nats"] - multi_rank["texts"][name]["nats"]) <= 1e-11 * values["nats"]
    assert (
        abs(single_process["tasks"]["small"]["acc"] - multi_rank["tasks"]["small"]["acc"])
        <= 1e-11 * -single_process["tasks"]["small"]["acc"]
    )
    assert single_process["tasks"]["small"]["length"] == multi_rank["tasks"]["small"]["length"]
    assert single_process["max_length"] == 48 and "samples" not in single_process


def test_exported_folder_equals_checkpoint_results(folder: Path, tmp_path: Path) -> None:
    export(open_folder(folder / "run"), tmp_path / "hf")
    texts = f"--texts {folder / 'a.txt'} {folder / 'b.jsonl'} --dtype fp64 --device cpu"
    assert run_tool(f"--load {tmp_path / 'hf'} {texts}") == run_tool(f"--load {folder / 'run'} {texts}")
    prompt = ["--prompt", "the lamp", "--device", "cpu", "--load"]
    outputs = io.StringIO(), io.StringIO()
    for stdout, model_dir in zip(outputs, (tmp_path / "hf", folder / "run"), strict=True):
        with redirect_stdout(stdout):
            generate.run(parse_generate("", [*prompt, str(model_dir)]), {})
    assert outputs[0].getvalue() == outputs[1].getvalue() != ""


def test_samples_are_written_if_requested(folder: Path, tmp_path: Path) -> None:
    run_tool(f"--load {folder / 'run'} --tasks small --log-samples --output {tmp_path / 'out.json'} --device cpu")
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["samples"] == {"small": [{"doc": {"q": "灯"}}]}


def run_and_catch(rank: int, command_line: str) -> str:
    try:
        run_tool(command_line)
    except (ConfigError, UnpicklableError, RuntimeError) as error:
        return str(error)
    return ""


def test_rank_0_error_is_raised_on_all_ranks(folder: Path) -> None:
    command_line = f"--load {folder / 'run'} --tasks none --device cpu --pipe-parallel-size 2"
    assert run_ranks(2, run_and_catch, command_line) == ["a task must be one of lm_eval's"] * 2
    broken_command_line = command_line.replace("none", "broken")
    assert run_ranks(2, run_and_catch, broken_command_line) == ["1 2", "rank 0: UnpicklableError: 1 2"], (
        "an error that cannot be pickled is reported as well"
    )


def test_tool_launches_ranks_of_its_layout_without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(evaluate.os, "execve", lambda program, arguments, env: commands.append(arguments))
    arguments = ["--load", "run", "--tasks", "x", "--model-parallel-size", "2", "--pipe-parallel-size", "2"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = parse_args("", arguments)
    assert should_start_ranks(args)
    evaluate.start_ranks(args)
    assert commands == [
        [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "4", evaluate.__file__, *arguments]
    ]
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(
        ConfigError, match=r"a multiple of tensor x pipe, got 6.* --nproc-per-node 4 tools/evaluate\.py"
    ):
        parse_args("", arguments)


def test_invalid_evaluations_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got a T5 in .* Load one of GPT-2"):
        run_tool(f"--load {folder / 't5'} --texts {folder / 'a.txt'} --device cpu")
    with pytest.raises(ConfigError, match="--texts must have different names, got a twice"):
        run_tool(f"--load {folder / 'run'} --texts {folder / 'a.txt'} a={folder / 'b.jsonl'} --device cpu")
    with pytest.raises(DataError, match="got neither"):
        run_tool(f"--load {folder / 'run'} --texts {folder / 'none.txt'} --device cpu")
    for command_line, problem in (
        ("", "--tasks or --texts must be set"),
        ("--texts x --num-fewshot 3", "--num-fewshot has no effect without --tasks"),
        ("--tasks x --chat-template y", "--chat-template has no effect without --apply-chat-template"),
        ("--tasks x --limit 0", "--limit must be at least 1, got 0"),
        ("--tasks x --log-samples", "--log-samples needs --output, got none"),
        ("--tasks x --output none/x.json", "the folder of --output none/x.json must exist"),
        ("--tasks x --model-parallel-size 0", "must be at least 1, got 0 and 1"),
        ("--task x", "unrecognized arguments: --task x"),
    ):
        with pytest.raises(ConfigError) as raised:
            parse_args("", ["--load", "run", *shlex.split(command_line)])
        assert problem in str(raised.value)
