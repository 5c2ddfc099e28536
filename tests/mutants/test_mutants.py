"""Each mutant of this folder makes one of its tests fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mutants.mutant import Mutant, find_target, load_mutants
from tests.mutants.runner import ROOT, Runner, why_it_survives

MUTANTS = load_mutants()
QUICK = "mpu.row_parallel_output_is_not_summed"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("mutants")) as started:
        yield started


def assert_killed(mutant: Mutant, runner: Runner) -> None:
    if not mutant.can_be_applied:
        pytest.skip(f"{mutant.needs} is not installed")
    outcome = runner.run(mutant.tests, mutant.name)
    print(outcome.text[-3000:])
    if outcome.is_skipped:
        pytest.skip(f"the tests that detect it are skipped on this machine: {', '.join(mutant.tests)}")
    assert why_it_survives(mutant, outcome) is None


def test_every_target_and_every_test_of_a_mutant_exists() -> None:
    for mutant in MUTANTS.values():
        if mutant.can_be_applied:
            find_target(mutant.target)
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not function or f"def {function.partition('[')[0].rpartition('::')[2]}(" in text, test


def test_one_mutant_is_killed_and_its_tests_pass_without_it(runner: Runner) -> None:
    """The small sibling of the slow test."""
    mutant = MUTANTS[QUICK]
    assert runner.run(mutant.tests).code == 0
    assert_killed(mutant, runner)
    assert runner.run(mutant.tests).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)
