"""Task files of one's own: what is wrong is named with file and line; suites in a file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.errors import ConfigError, DataError
from megatron.evaluation import tasks
from megatron.evaluation.tasks import Suite, check_task_folder, preserve_random_state, read_suite

VALID_TASK = """task: small
dataset_path: json
dataset_kwargs:
  data_files:
    test: {lines}
output_type: multiple_choice
doc_to_target: !function utils.target
"""


@pytest.fixture
def task_dir(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"q": "x", "a": 0}\n{"q": "y", "a": 1}\n')
    (tmp_path / "a.yaml").write_text(VALID_TASK.format(lines=tmp_path / "a.jsonl"))
    return tmp_path


def error_of(task_dir: Path) -> str:
    with pytest.raises(DataError) as raised:
        check_task_folder(task_dir)
    return str(raised.value)


def test_valid_task_files_pass(task_dir: Path) -> None:
    check_task_folder(task_dir)
    check_task_folder(None)


def test_invalid_task_file_is_named_with_line(task_dir: Path) -> None:
    valid_text = VALID_TASK.format(lines=task_dir / "a.jsonl")
    for text, message in (
        (valid_text.replace("multiple_choice", "choice"), "b.yaml:6: output_type must be one of loglikelihood, "),
        ("task: x\n  bad: y\n", "b.yaml:2: must be YAML, got mapping values are not allowed here"),
        ("- task\n", "b.yaml:1: a task file must contain keys with values"),
        ("dataset_path: json\n", "b.yaml:1: a task file must name its task, got no key task"),
        ("task: x\ndataset_path: json\n", "b.yaml:1: with dataset_path: json, dataset_kwargs must name data_files"),
        (valid_text.replace("a.jsonl", "none.jsonl"), "b.yaml:5: data_files must exist, got "),
    ):
        (task_dir / "b.yaml").write_text(text)
        assert message in error_of(task_dir)
    (task_dir / "a.yaml").write_text("- task\n")
    assert error_of(task_dir).count("\n") == 1, "all problems at once"


def test_invalid_example_is_named_with_line(task_dir: Path) -> None:
    for line, message in (
        ("{", "a.jsonl:3: each line must be a JSON object, got "),
        ("[1]", "a.jsonl:3: each line must be a JSON object, got a list"),
        ('{"q": "z"}', "a.jsonl:3: each example must have the fields of the first one, missing: a"),
    ):
        (task_dir / "a.jsonl").write_text(f'{{"q": "x", "a": 0}}\n{{"q": "y", "a": 1}}\n{line}\n')
        assert message in error_of(task_dir)


def test_folder_without_tasks_is_rejected(tmp_path: Path) -> None:
    assert "must contain task files that end in .yaml, got none" in error_of(tmp_path)
    assert "must be a folder of task files" in error_of(tmp_path / "none")


def test_suite_is_read_from_file(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text("tasks: [a, b]\ninclude_path: own\nlimit: 5\nnum_fewshot: 0\n")
    assert read_suite(file) == Suite(("a", "b"), tmp_path / "own", 0, 5)
    file.write_text("tasks: a\n")
    assert read_suite(file) == Suite(("a",))
    for text, problem in (
        ("tasks: []\n", "suite.yaml:1: tasks must be a list of names, got []"),
        ("tasks: a\nlimits: 5\n", "suite.yaml:2: keys may be .* got limits. Did you mean limit"),
        ("tasks: a\nlimit: -5\n", "suite.yaml:2: limit must be of type int, got -5"),
        ("tasks: a\nlimit: yes please\n", "suite.yaml:2: limit must be of type int, got 'yes please'"),
        ("tasks: a\nlimit: true\n", "suite.yaml:2: limit must be of type int, got True"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
            read_suite(file)


def test_evaluation_restores_random_state() -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    with preserve_random_state():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
    numbers = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    assert numbers == (random.random(), np.random.rand(), torch.rand(1))


def test_missing_lm_eval_error_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--tasks needs the package lm_eval, .* Run pip install -e '.\[eval\]'"):
        tasks.LoadedTasks(Suite(("a",)))
