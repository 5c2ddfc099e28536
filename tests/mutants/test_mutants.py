"""The suite can fail: each mistake of ``mutants.py``, planted in a copy of the tree, makes a test fail there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.runner import Runner, replace_once

ROOT = Path(__file__).resolve().parents[2]
QUICK = "labels are the tokens themselves"
RAISED = re.compile(r"^E +(?:\w+\.)*(\w+(?:Error|Exception))\b", re.MULTILINE)
every = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(ROOT, tmp_path_factory.mktemp("mutants")) as made:
        yield made


def assert_killed(mutant: Mutant, runner: Runner) -> None:
    outcome = runner.run(mutant.tests, (mutant.file, mutant.old, mutant.new))
    print(outcome.text[-3000:])
    assert outcome.code == 1, f"pytest ended with {outcome.code} where 1, a failed test, is wanted"
    raised = set(RAISED.findall(outcome.text))
    assert raised <= {"AssertionError"}, "a comparison must fail; a mistake that cannot even run proves nothing"


def test_the_text_that_each_mutant_changes_is_there_once() -> None:
    wrong = [m.name for m in MUTANTS if (ROOT / m.file).read_text(encoding="utf-8").count(m.old) != 1]
    assert not wrong, "bring tests/mutants/mutants.py up to date with the code"


def test_every_mutant_has_a_name_of_its_own_and_compiles(tmp_path: Path) -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    for mutant in MUTANTS:
        copy = tmp_path / "copy.py"
        copy.write_bytes((ROOT / mutant.file).read_bytes())
        replace_once(copy, mutant.old, mutant.new)
        compile(copy.read_text(encoding="utf-8"), mutant.file, "exec")


def test_every_selected_test_is_there() -> None:
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_one_mutant_is_killed(runner: Runner) -> None:
    """The small sibling of the slow test below; and the same test passes without the mistake."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == QUICK)
    assert runner.run(mutant.tests).code == 0
    assert_killed(mutant, runner)


@pytest.mark.slow
@every
def test_mutant_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_selected_tests_pass_without_a_mistake(runner: Runner) -> None:
    tests = sorted({test for mutant in MUTANTS for test in mutant.tests})
    outcome = runner.run(tuple(tests), deadline_s=500.0)
    print(outcome.text[-3000:])
    assert outcome.code == 0
