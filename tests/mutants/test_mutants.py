"""The suite can fail: each mistake of ``mutants.py``, planted in a copy of the tree, makes a test fail there."""

from __future__ import annotations

import ast
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter

import pytest

from tests.mutants.killing import ROOT, assert_killed
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import IN_ARITHMETIC, IN_TEXT, MUTANTS
from tests.mutants.runner import Runner, replace_once

QUICK = "labels are the tokens themselves"


def test_the_text_that_each_mutant_changes_is_there_once() -> None:
    wrong = [m.name for m in MUTANTS if (ROOT / m.file).read_text(encoding="utf-8").count(m.old) != 1]
    assert not wrong, "bring the tables of tests/mutants up to date with the code"


@functools.cache
def statements_of(file: str) -> tuple[str, list[int]]:
    """Return the text of ``file``, where each statement of the module begins in it, and its end."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    first = {min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) for node in ast.parse(text).body}
    return text, [0, *(lines[line - 1] for line in sorted(first)), len(text)]


def changed_statements(mutant: Mutant) -> str:
    """Return what the mistake makes of the module's statements that it changes."""
    text, starts = statements_of(mutant.file)
    begin = text.index(mutant.old)
    end = begin + len(mutant.old)
    first, last = starts[bisect_right(starts, begin) - 1], starts[bisect_left(starts, end)]
    return text[first:begin] + mutant.new + text[end:last]


def test_every_mutant_has_a_name_of_its_own_and_compiles() -> None:
    """Of each file the statements that change: to compile the whole file for each mistake takes long."""
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []
    for mutant in MUTANTS:
        if mutant.file.endswith(".py"):
            compile(changed_statements(mutant), mutant.file, "exec")


def test_every_selected_test_is_there() -> None:
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or f"\ndef {name.partition('[')[0]}(" in text, test


def test_one_mutant_is_killed(runner: Runner) -> None:
    """The small sibling of the slow tests; and the same test passes ahead of the mistake and behind it.

    So it does where a test has left a file or altered one.
    """
    mutant = next(mutant for mutant in MUTANTS if mutant.name == QUICK)
    assert runner.run(mutant.tests).code == 0
    assert_killed(mutant, runner)
    left, altered = runner.folder / "tree" / "tests" / "conftest_left.py", runner.folder / "tree" / mutant.file
    left.write_text("")
    assert runner.run(mutant.tests).code == 0 and not left.exists()
    replace_once(altered, mutant.old, mutant.new)
    assert runner.run(mutant.tests).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_ARITHMETIC, ids=lambda mutant: mutant.name)
def test_mutant_in_arithmetic_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_TEXT, ids=lambda mutant: mutant.name)
def test_mutant_between_text_and_token_files_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)
