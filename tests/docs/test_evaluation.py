"""docs/evaluation.md: its commands, its files and its errors are real; the tasks of the example are sound."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from megatron.errors import DataError
from megatron.evaluation.tasks import OUTPUT_TYPES, check_task_folder, read_suite

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "evaluation.md", ROOT / "docs" / "zh" / "evaluation.md"]
EXAMPLE = ROOT / "examples" / "evaluation"
TASKS = {path.stem: path for path in sorted((EXAMPLE / "tasks").glob("*.yaml"))}
every_page = pytest.mark.parametrize("page", PAGES, ids=("english", "chinese"))


def read_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def read_task_settings(task: str) -> dict[str, object]:
    """Return the keys of a task file with those of the file that it includes."""
    settings = yaml.safe_load(TASKS[task].read_text(encoding="utf-8"))
    included = settings.pop("include", None)
    return {**(read_task_settings(Path(included).stem) if included else {}), **settings}


def test_example_has_task_of_each_output_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_task_folder(EXAMPLE / "tasks")
    suite = read_suite(EXAMPLE / "suite.yaml")
    assert suite.tasks == ("stories",) and suite.include_path == EXAMPLE / "tasks"
    settings_by_task = {name: read_task_settings(name) for name in TASKS}
    assert all(values["task"] == name and values["tag"] == "stories" for name, values in settings_by_task.items())
    assert {values["output_type"] for values in settings_by_task.values()} == set(OUTPUT_TYPES)


@pytest.mark.parametrize("task", TASKS)
def test_task_fields_exist_in_data(task: str) -> None:
    values = read_task_settings(task)
    templates = " ".join(str(value) for key, value in values.items() if key.startswith("doc_to"))
    field_names = set(re.findall(r"\{\{(\w+)", templates)) | set(re.findall(r"\[(\w+)\]", templates))
    assert isinstance(values["dataset_kwargs"], dict) and field_names
    for line in (ROOT / values["dataset_kwargs"]["data_files"]["test"]).read_text(encoding="utf-8").splitlines():
        example = json.loads(line)
        assert field_names <= set(example)
        if "endings" in example:
            assert len(set(example["endings"])) == 4 and example["right"] in range(4)


@every_page
def test_page_lists_every_task_with_output_type(page: Path) -> None:
    rows = re.findall(r"^\| `examples/evaluation/tasks/(\w+)\.yaml` \| `(\w+)` \|", page.read_text("utf-8"), re.M)
    assert dict(rows) == {name: read_task_settings(name)["output_type"] for name in TASKS}


@every_page
def test_documented_files_equal_example(page: Path, tmp_path: Path) -> None:
    task, suite = read_blocks(page, "yaml")
    shown, example_settings = yaml.safe_load(task), read_task_settings("stories_who")
    for key, value in shown.items():
        example_value = example_settings[key]
        assert example_value == value or (isinstance(example_value, dict) and value.items() <= example_value.items()), (
            key
        )
    (line,) = read_blocks(page, "json")
    assert line in (EXAMPLE / "who.jsonl").read_text(encoding="utf-8")
    (tmp_path / "suite.yaml").write_text(suite, encoding="utf-8")
    assert read_suite(tmp_path / "suite.yaml").include_path == tmp_path / "tasks"


@every_page
def test_documented_errors_are_raised(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my_tasks")
    folder.mkdir()
    lines = [json.dumps({"q": "a", "answer": 1})] * 16 + [json.dumps({"q": "b"})]
    (folder / "quiz.jsonl").write_text("\n".join(lines))
    data = "dataset_kwargs: {data_files: {test: my_tasks/quiz.jsonl}}"
    (folder / "quiz.yaml").write_text(f"task: quiz\ndataset_path: json\noutput_type: multiple-choice\n{data}\n")
    with pytest.raises(DataError) as raised:
        check_task_folder(folder)
    (errors,) = (block for block in read_blocks(page, "") if "quiz" in block)
    assert errors.splitlines()[:2] == str(raised.value).splitlines()
