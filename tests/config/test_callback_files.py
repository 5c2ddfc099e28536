"""Values of --callback are checked without running the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.callback_files import CallbackSpec, callback_problems, parse_callbacks

SOURCE = """
raise SystemExit("the check must not run the file")
import math as renamed
class Norm: ...
if True:
    class Nested: ...
Alias = Norm
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("class Norm:\n    x = (\n")
    (tmp_path / "star.py").write_text("from mine import *\n")
    return tmp_path


@pytest.mark.parametrize("name", ["mine.py:Norm", "mine.py:Nested", "mine.py:Alias", "mine.py:renamed", "star.py:Norm"])
def test_name_that_the_file_may_define_is_accepted(folder: Path, name: str) -> None:
    assert list(callback_problems(name)) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("gone.py:Norm", ("gone.py", "No such file", "looked in")),
        ("mine.py:Nrom", ("mine.py:Nrom", "its classes are Norm")),
        ("mine.py", ("mine.py without a class", "its classes are Norm")),
        ("star.py", ("it defines none",)),
        ("bad.py:Norm", ("bad.py:2", "was never closed")),
        ("mine:Norm", ("FILE.py:Class", "mine:Norm")),
        ("Norm", ("FILE.py:Class", "got Norm")),
        ("mine.py:9", ("FILE.py:Class", "mine.py:9")),
        ("mine.py:Norm mine.py:Norm", ("mine.py:Norm twice",)),
        ("'mine.py:Norm", ("quotation",)),
    ],
)
def test_error_names_value_and_fix(folder: Path, value: str, words: tuple[str, ...]) -> None:
    (problem,) = callback_problems(value)
    assert problem.startswith("--callback") and all(word in problem for word in words), problem


def test_every_value_with_a_problem_is_reported(folder: Path) -> None:
    assert len(list(callback_problems("gone.py:A mine.py:Norm mine.py:B"))) == 2


def test_paths_may_contain_spaces_and_colons(tmp_path: Path) -> None:
    path = tmp_path / "my folder" / "a:b.py"
    path.parent.mkdir()
    path.write_text("class Norm: ...\n")
    text = f"'{path}:Norm'"
    assert parse_callbacks(text) == [CallbackSpec(str(path), "Norm")] and list(callback_problems(text)) == []
    assert parse_callbacks(None) == []
