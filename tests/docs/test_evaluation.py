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


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def settings_of(task: str) -> dict[str, object]:
    """Return the keys of a task file with those of the file that it includes."""
    own = yaml.safe_load(TASKS[task].read_text(encoding="utf-8"))
    included = own.pop("include", None)
    return {**(settings_of(Path(included).stem) if included else {}), **own}


def test_the_example_has_a_task_of_each_kind_and_its_files_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_task_folder(EXAMPLE / "tasks")
    suite = read_suite(EXAMPLE / "suite.yaml")
    assert suite.tasks == ("stories",) and suite.include_path == EXAMPLE / "tasks"
    found = {name: settings_of(name) for name in TASKS}
    assert all(values["task"] == name and values["tag"] == "stories" for name, values in found.items())
    assert {values["output_type"] for values in found.values()} == set(OUTPUT_TYPES)


@pytest.mark.parametrize("task", TASKS)
def test_the_fields_that_a_task_names_are_in_its_data(task: str) -> None:
    values = settings_of(task)
    templates = " ".join(str(value) for key, value in values.items() if key.startswith("doc_to"))
    wanted = set(re.findall(r"\{\{(\w+)", templates)) | set(re.findall(r"\[(\w+)\]", templates))
    assert isinstance(values["dataset_kwargs"], dict) and wanted
    for line in (ROOT / values["dataset_kwargs"]["data_files"]["test"]).read_text(encoding="utf-8").splitlines():
        example = json.loads(line)
        assert wanted <= set(example)
        if "endings" in example:
            assert len(set(example["endings"])) == 4 and example["right"] in range(4)


@every_page
def test_the_page_names_every_task_with_its_kind(page: Path) -> None:
    rows = re.findall(r"^\| `examples/evaluation/tasks/(\w+)\.yaml` \| `(\w+)` \|", page.read_text("utf-8"), re.M)
    assert dict(rows) == {name: settings_of(name)["output_type"] for name in TASKS}


@every_page
def test_the_files_of_the_page_are_those_of_the_example(page: Path, tmp_path: Path) -> None:
    task, suite = blocks(page, "yaml")
    shown, there = yaml.safe_load(task), settings_of("stories_who")
    for key, value in shown.items():
        inner = there[key]
        assert inner == value or (isinstance(inner, dict) and value.items() <= inner.items()), key
    (line,) = blocks(page, "json")
    assert line in (EXAMPLE / "who.jsonl").read_text(encoding="utf-8")
    (tmp_path / "suite.yaml").write_text(suite, encoding="utf-8")
    assert read_suite(tmp_path / "suite.yaml").include_path == tmp_path / "tasks"


@every_page
def test_the_errors_of_the_page_are_real(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my_tasks")
    folder.mkdir()
    lines = [json.dumps({"q": "a", "answer": 1})] * 16 + [json.dumps({"q": "b"})]
    (folder / "quiz.jsonl").write_text("\n".join(lines))
    data = "dataset_kwargs: {data_files: {test: my_tasks/quiz.jsonl}}"
    (folder / "quiz.yaml").write_text(f"task: quiz\ndataset_path: json\noutput_type: multiple-choice\n{data}\n")
    with pytest.raises(DataError) as caught:
        check_task_folder(folder)
    (errors,) = (block for block in blocks(page, "") if "quiz" in block)
    assert errors.splitlines()[:2] == str(caught.value).splitlines()
