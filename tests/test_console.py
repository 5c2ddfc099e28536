"""Tables: off a terminal no word is broken over two lines; on a terminal they keep to its width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.console import print_table
from megatron.training.console import TrainingConsole

PATH = "/data/" + "a-long-folder/" * 12 + "gpt2_text_document"
WORDS = "some words of prose that do not fit on a line of eighty columns, so that they are wrapped between two words"


def render(table: Table, **options: object) -> str:
    file = io.StringIO()
    print_table(table, Console(file=file, markup=False, **options))  # type: ignore[arg-type]
    return file.getvalue()


def make_table(name: str, value: str) -> Table:
    table = Table(title=name, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(name, value)
    table.add_row("a name of several words", "x")
    return table


def test_paths_are_not_wrapped_without_terminal() -> None:
    text = render(make_table("data", f"0.7 {PATH} {WORDS}"), width=80)
    assert PATH in text and "a name of several words" in text
    assert max(map(len, text.splitlines())) < len(PATH) + 40, "prose is wrapped"
    assert PATH in render(make_table(PATH, "in the title and the first column"), width=80).splitlines()[0]
    short = render(make_table("data", WORDS), width=80)
    assert max(map(len, short.splitlines())) <= 80


def test_table_fits_terminal_width() -> None:
    text = render(make_table("data", PATH), width=80, force_terminal=True)
    assert PATH not in text and max(len(Text.from_ansi(line).plain) for line in text.splitlines()) <= 80


def test_start_table_prints_values_without_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    TrainingConsole("plain", 1).table("Plan", [("data", PATH), ("layout", "[s, b] [/x] [bold]")])
    text = capsys.readouterr().out
    assert PATH in text and "[s, b] [/x] [bold]" in text
