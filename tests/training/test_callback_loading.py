"""--callback: classes of a file join a run, and their states are saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.training.callback_loading import load_callbacks
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import launch_script, make_flags, write_corpus

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "callbacks.py"
SOURCE = """
from megatron.training import Callback
loads = []
loads.append(1)
class First(Callback):
    def __init__(self):
        self.loads = loads
class Second(First): ...
class NoCallback: ...
class NeedsLimit(Callback):
    def __init__(self, limit): ...
def function(): ...
"""
COUNTER = """
from megatron.training import Callback
class LogCounter(Callback):
    def __init__(self):
        self.count = 0
    def on_log(self, metrics):
        self.count += 1
        metrics["log_count"] = self.count
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_classes_are_constructed_in_order_and_file_is_imported_once(file: Path) -> None:
    other = file.parent / "other" / "mine.py"  # the same name in another folder is another module
    other.parent.mkdir()
    other.write_text(SOURCE)
    second, first, other_first = load_callbacks(f"{file}:Second {file}:First {other}:First")
    assert [type(callback).__name__ for callback in (second, first)] == ["Second", "First"]
    assert second.loads is first.loads and len(first.loads) == 1  # type: ignore[attr-defined]
    assert type(other_first) is not type(first)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoCallback", ("subclass of megatron.training.Callback", "mine.py:NoCallback")),
        ("function", ("mine.py:function, a function",)),
        ("NeedsLimit", ("NeedsLimit() failed", "limit", "without arguments")),
        ("Missing", ("mine.py:Missing",)),
    ],
)
def test_error_of_class_names_it(file: Path, name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_callbacks(f"{file}:{name}")
    assert all(word in str(raised.value) for word in words), raised.value


def test_error_of_import_names_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("\nimport package_that_is_not_installed\nclass A: ...\n")
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: .*package_that_is_not_installed.*\(broken.py:2\)"):
        load_callbacks(f"{tmp_path / 'broken.py'}:A")


def test_file_that_exits_is_an_error(tmp_path: Path) -> None:
    """A script without a check of __name__ must not end the job with code 0."""
    (tmp_path / "script.py").write_text("import sys\nclass A: ...\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"importing the file failed: SystemExit: 0 \(script.py:3\)"):
        load_callbacks(f"{tmp_path / 'script.py'}:A")


def test_hook_with_other_parameters_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from megatron.training import Callback\n"
        "class Few(Callback):\n    def on_step_end(self): ...\n"
        "class Many(Callback):\n    def on_save(self, step): ...\n"
        "class Any(Callback):\n    def on_step_end(self, *args, **kwargs): ...\n"
        "class Other(Callback):\n    def on_step_ends(self, result): ...\n"
    )
    with pytest.raises(ConfigError, match=r"mine.py:Few: on_step_end must accept the arguments \(result\)"):
        load_callbacks(f"{tmp_path / 'mine.py'}:Few")
    with pytest.raises(ConfigError, match=r"mine.py:Many: on_save must accept the arguments \(\), got"):
        load_callbacks(f"{tmp_path / 'mine.py'}:Many")
    load_callbacks(f"{tmp_path / 'mine.py'}:Any {tmp_path / 'mine.py'}:Other")
    assert (
        "on_step_ends is not a hook, so the trainer does not call it. Did you mean on_step_end?"
        in capsys.readouterr().err
    )


def test_repeated_flag_adds_and_file_takes_list(tmp_path: Path, file: Path) -> None:
    def parsed(*words: str) -> str | None:
        return parse(["--vocab-size", "64", "--data-path", "mock", *words], world_size=1).run.callback

    first, second = f"{file}:First", f"{file}:Second"
    assert parsed("--callback", first, "--callback", second) == f"{first} {second}"
    assert parsed("--callback", first, second) == f"{first} {second}"
    (tmp_path / "run.yaml").write_text(f"callback: ['{first}', '{second}']\n")
    assert parsed("--config", str(tmp_path / "run.yaml")) == f"{first} {second}"
    assert parsed("--config", str(tmp_path / "run.yaml"), "--callback", first) == first
    with pytest.raises(ConfigError, match="Missing"):
        parsed("--callback", f"{file}:Missing")


def test_callback_joins_run_and_resumes_with_state(tmp_path: Path) -> None:
    prefix, folder, log = write_corpus(tmp_path), tmp_path / "run", tmp_path / "log"
    (tmp_path / "counter.py").write_text(COUNTER)
    value = f"{EXAMPLE}:WeightNorm {EXAMPLE}:BestLoss {tmp_path / 'counter.py'}:LogCounter"
    argv = make_flags(prefix, folder, f"--train-iters 4 --eval-iters 0 --no-prove --callback {value}")
    assert launch_script(1, [*argv, "--exit-interval", "2"], log) == [75], log.read_text()
    assert json.loads((folder / "config.json").read_text())["run"]["callback"] == value
    assert launch_script(1, [*argv, "--load", str(folder)], log) == [0], log.read_text()
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "log_count" in row]
    losses = [row["loss"] for row in rows]
    assert [row["log_count"] for row in rows] == [1, 2, 3, 4]  # the state of step 2 was restored
    assert [row["best_loss"] for row in rows] == [min(losses[:n]) for n in (1, 2, 3, 4)]
    assert all(0 < row["weight_norm"] < 1000 for row in rows)


def test_two_states_of_one_name_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "copy.py").write_text(EXAMPLE.read_text())
    log = tmp_path / "log"
    callbacks = f"--callback {EXAMPLE}:BestLoss {tmp_path / 'copy.py'}:BestLoss"
    flags = f"--train-iters 1 --eval-iters 0 --no-prove {callbacks}"
    argv = make_flags(write_corpus(tmp_path), tmp_path / "run", flags)
    assert launch_script(1, argv, log) == [2]
    assert "BestLoss" in log.read_text() and "different names" in log.read_text()
