"""docs/reading_order.md: the files of its five sittings are those that one training step runs, seen while it runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.optim.optimizer import MixedPrecisionOptimizer
from tests.helpers.runs import flags, train_ranks, write_corpus

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/reading_order.md", "docs/zh/reading_order.md")
KINDS = {"one stage": "", "two stages": "--pipe-parallel-size 2"}
STEPS = (
    "--train-iters 4 --log-interval 10 --eval-iters 0"  # the third step is an ordinary one: nothing is logged or saved
)
MOST_FILES = {"one stage": 51, "two stages": 61}
"""A step calls into no more: a reader has to know them all."""
MOST_LINES = {"one stage": 1550, "two stages": 2350}
"""Of the functions that a step calls on a rank, docstrings and comments within them included."""
TOLERANCE = 0.15
"""How far a number of the page may be from what runs, as a share: the pages say about how much there is to read."""


def recording(folder: Path) -> Callable[[int], None]:
    """Return what lets a rank write into ``folder`` which functions ran from the second update to the third."""

    def plant(rank: int) -> None:
        ran: set[CodeType] = set()
        updates = 0

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                ran.add(frame.f_code)

        def after(optimizer: Any, *_: Any) -> None:
            nonlocal updates
            updates += isinstance(optimizer, MixedPrecisionOptimizer)
            sys.setprofile(note if updates == 2 else None)
            if updates == 3:
                (folder / f"{rank}.json").write_text(json.dumps(sorted(map(described, ran - {after.__code__}))))

        register_optimizer_step_post_hook(after)

    return plant


def described(code: CodeType) -> tuple[str, str, int, int]:
    """Return (file, name, first line, lines)."""
    lines = [line for *_, line in code.co_lines() if line]
    return code.co_filename, code.co_qualname, code.co_firstlineno, max(lines) - code.co_firstlineno + 1


Files = dict[str, dict[int, tuple[str, int]]]
"""By file, the functions that ran: first line -> (name, lines)."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Files]]:
    """Return for each kind of step what each of its ranks ran."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    found: dict[str, list[Files]] = {}
    for number, (kind, extra) in enumerate(KINDS.items(), start=1):
        folder = tmp_path_factory.mktemp("walk")
        codes, _ = train_ranks(number, flags(corpus, folder / "run", f"{STEPS} {extra}"), recording(folder))
        assert codes == [0] * number
        found[kind] = [{} for _ in range(number)]
        for rank, files in enumerate(found[kind]):
            for file, name, first, lines in json.loads((folder / f"{rank}.json").read_text()):
                path = Path(file)
                if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("megatron", "tds"):
                    files.setdefault(str(path.relative_to(ROOT)), {})[first] = (name, lines)
    return found


@pytest.fixture(scope="module")
def steps(ranks: dict[str, list[Files]]) -> dict[str, Files]:
    """Return for each kind of step what its ranks ran together."""
    joined: dict[str, Files] = {kind: {} for kind in ranks}
    for kind, each in ranks.items():
        for files in each:
            for file, functions in files.items():
                joined[kind].setdefault(file, {}).update(functions)
    return joined


def sittings(page: str) -> list[tuple[list[str], int]]:
    """Return the files of megatron and tds in each of the five sittings, and the lines that the page counts there."""
    rows = re.findall(r"^\| [1-5] \|.*\| (\d+) \|$", (ROOT / page).read_text("utf-8"), flags=re.M)
    found = re.findall(r"^\| [1-5] \|.*$", (ROOT / page).read_text("utf-8"), flags=re.M)
    files = [re.findall(r"`((?:megatron|tds)/[\w/]+\.py)`", row) for row in found]
    return [(names, int(lines)) for names, lines in zip(files, rows, strict=True)]


def test_the_files_and_lines_of_each_sitting_run_in_a_step(steps: dict[str, Any]) -> None:
    one, two = steps.values()
    for files, documented in sittings(PAGES[0]):
        ran = [{**one.get(name, {}), **two.get(name, {})} for name in files]
        assert all(ran), files
        lines = sum(count for functions in ran for _, count in functions.values())
        assert abs(lines - documented) <= TOLERANCE * lines, (lines, files)


def test_a_step_calls_into_few_files(steps: dict[str, Any]) -> None:
    assert {kind: len(files) for kind, files in steps.items() if len(files) > MOST_FILES[kind]} == {}


def test_a_step_runs_few_lines_on_each_rank(ranks: dict[str, list[Files]]) -> None:
    counted = {
        kind: [sum(lines for functions in files.values() for _, lines in functions.values()) for files in each]
        for kind, each in ranks.items()
    }
    assert {kind: each for kind, each in counted.items() if max(each) > MOST_LINES[kind]} == {}


def test_what_the_page_counts_is_what_a_step_runs(steps: dict[str, Any]) -> None:
    text = (ROOT / PAGES[0]).read_text("utf-8")
    rows = re.findall(r"^\| [^|]*--pipe-parallel-size ([12])[^|]*\| (\d+) \| (\d+) \| ([\d,]+) \|$", text, flags=re.M)
    assert [row[0] for row in rows] == ["1", "2"]
    for (_, *documented), files in zip(rows, steps.values(), strict=True):
        functions = [lines for functions in files.values() for _, lines in functions.values()]
        ran = (len(files), len(functions), sum(functions))
        for number, counted in zip(documented, ran, strict=True):
            assert abs(counted - int(number.replace(",", ""))) <= TOLERANCE * counted, (ran, sorted(files))


def test_both_pages_have_the_same_sittings_and_numbers() -> None:
    english, chinese = map(sittings, PAGES)
    named = [name for files, _ in english for name in files]
    assert english == chinese and len(english) == 5 and len(named) == len(set(named))
    counted = [
        re.findall(r"\| (\d+) \| (\d+) \| ([\d,]+) \|$", (ROOT / page).read_text("utf-8"), flags=re.M) for page in PAGES
    ]
    assert counted[0] == counted[1] and len(counted[0]) == 2
