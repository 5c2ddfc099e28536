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
from megatron.evaluation.options import parse_args, starts_ranks
from megatron.evaluation.tasks import Results
from megatron.generate.options import parse_args as parse_generate
from tests.helpers.evaluation import Request, decoder_lm
from tests.helpers.harness import run_ranks
from tests.helpers.saved_models import save_model
from tools import evaluate, generate


class OfATask(Exception):
    """An error whose class no pickle can make again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} {other}")


class Tasks:
    """In place of lm_eval's tasks."""

    def __init__(self, suite: Any) -> None:
        if "none" in suite.tasks:
            raise ConfigError("a task must be one of lm_eval's")
        self.suite = suite

    def evaluate(self, lm: Any, *, keeps_samples: bool = False) -> Results:
        if "broken" in self.suite.tasks:
            raise OfATask(1, 2)
        scores = lm.loglikelihood([Request(("the lamp", " stood")), Request(("灯", "在窗前"))])
        text, limit = lm.generate_until([Request(("the", {"max_gen_toks": 6}))])[0], self.suite.limit
        metrics = {"small": {"acc": sum(value for value, _ in scores), "acc_stderr": 0.5, "length": float(len(text))}}
        notes = {"small": {"alias": " - small", "version": 1, "num_fewshot": 0, "num_samples": limit}}
        return Results(metrics, notes, {"small": [{"doc": {"q": "灯"}}]} if keeps_samples else {})


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
def has_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("lm_eval")
    module.__spec__ = ModuleSpec("lm_eval", None)
    decoder_lm()
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setattr(tasks, "LoadedTasks", Tasks)


def asked(words: str) -> str:
    """Return what the tool writes to standard output."""
    out = io.StringIO()
    with redirect_stdout(out):
        evaluate.run(parse_args("", shlex.split(words)), {})
    return out.getvalue()


def of_ranks(rank: int, words: str) -> str:
    return asked(words)


def usual(folder: Path, output: Path) -> str:
    texts = f"--texts {folder / 'a.txt'} lines={folder / 'b.jsonl'}"
    return f"--load {folder / 'run'} {texts} --tasks small,other --limit 3 --dtype fp64 --device cpu --output {output}"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--model-parallel-size 2 --max-tokens 40"),
        pytest.param(2, "--pipe-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(4, "--model-parallel-size 2 --max-tokens 10", marks=pytest.mark.slow),
    ],
)
def test_results_are_the_same_in_every_layout(ranks: int, layout: str, folder: Path, tmp_path: Path) -> None:
    shown = asked(usual(folder, tmp_path / "alone.json"))
    assert "bits per byte" in shown.replace("\n", " ") or "bits per" in shown
    assert "│ lines " in shown and "│ all " in shown and "-  small" not in shown and " - small" in shown
    first, *others = run_ranks(ranks, of_ranks, f"{usual(folder, tmp_path / 'ranks.json')} {layout}")
    assert first == shown and not any(others)
    alone, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "ranks"))
    assert list(alone["texts"]) == ["a", "lines", "all"] and alone["texts"]["lines"]["documents"] == 2
    for name, values in alone["texts"].items():
        assert abs(values["nats"] - found["texts"][name]["nats"]) <= 1e-11 * values["nats"]
    assert (
        abs(alone["tasks"]["small"]["acc"] - found["tasks"]["small"]["acc"]) <= 1e-11 * -alone["tasks"]["small"]["acc"]
    )
    assert alone["tasks"]["small"]["length"] == found["tasks"]["small"]["length"]
    assert alone["max_length"] == 48 and "samples" not in alone


def test_a_hugging_face_folder_has_the_results_of_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    export(open_folder(folder / "run"), tmp_path / "hf")
    texts = f"--texts {folder / 'a.txt'} {folder / 'b.jsonl'} --dtype fp64 --device cpu"
    assert asked(f"--load {tmp_path / 'hf'} {texts}") == asked(f"--load {folder / 'run'} {texts}")
    prompt = ["--prompt", "the lamp", "--device", "cpu", "--load"]
    written = io.StringIO(), io.StringIO()
    for out, place in zip(written, (tmp_path / "hf", folder / "run"), strict=True):
        with redirect_stdout(out):
            generate.run(parse_generate("", [*prompt, str(place)]), {})
    assert written[0].getvalue() == written[1].getvalue() != ""


def test_samples_are_written_where_they_are_asked_for(folder: Path, tmp_path: Path) -> None:
    asked(f"--load {folder / 'run'} --tasks small --log-samples --output {tmp_path / 'out.json'} --device cpu")
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["samples"] == {"small": [{"doc": {"q": "灯"}}]}


def fails(rank: int, words: str) -> str:
    try:
        asked(words)
    except (ConfigError, OfATask, RuntimeError) as error:
        return str(error)
    return ""


def test_an_error_of_rank_0_is_one_of_all(folder: Path) -> None:
    words = f"--load {folder / 'run'} --tasks none --device cpu --pipe-parallel-size 2"
    assert run_ranks(2, fails, words) == ["a task must be one of lm_eval's"] * 2
    broken = words.replace("none", "broken")
    assert run_ranks(2, fails, broken) == ["1 2", "rank 0: OfATask: 1 2"], "an error that cannot travel, too"


def test_it_starts_the_ranks_of_its_layout_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(evaluate.os, "execve", lambda program, words, env: started.append(words))
    words = ["--load", "run", "--tasks", "x", "--model-parallel-size", "2", "--pipe-parallel-size", "2"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *words])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = parse_args("", words)
    assert starts_ranks(args)
    evaluate.start_ranks(args)
    assert started == [[sys.executable, "-m", "megatron.launch", "--nproc-per-node", "4", evaluate.__file__, *words]]
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(
        ConfigError, match=r"a multiple of tensor x pipe, got 6.* --nproc-per-node 4 tools/evaluate\.py"
    ):
        parse_args("", words)


def test_what_cannot_be_evaluated_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got a T5 in .* Load one of GPT-2"):
        asked(f"--load {folder / 't5'} --texts {folder / 'a.txt'} --device cpu")
    with pytest.raises(ConfigError, match="--texts must have different names, got a twice"):
        asked(f"--load {folder / 'run'} --texts {folder / 'a.txt'} a={folder / 'b.jsonl'} --device cpu")
    with pytest.raises(DataError, match="got neither"):
        asked(f"--load {folder / 'run'} --texts {folder / 'none.txt'} --device cpu")
    for words, said in (
        ("", "--tasks or --texts must be set"),
        ("--texts x --num-fewshot 3", "--num-fewshot has no effect without --tasks"),
        ("--tasks x --chat-template y", "--chat-template has no effect without --apply-chat-template"),
        ("--tasks x --limit 0", "--limit must be at least 1, got 0"),
        ("--tasks x --log-samples", "--log-samples needs --output, got none"),
        ("--tasks x --output none/x.json", "the folder of --output none/x.json must exist"),
        ("--tasks x --model-parallel-size 0", "must be at least 1, got 0 and 1"),
        ("--task x", "unrecognized arguments: --task x"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_args("", ["--load", "run", *shlex.split(words)])
        assert said in str(caught.value)
