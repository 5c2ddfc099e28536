"""Each mutant of this folder makes one of its tests fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.harness import run_ranks
from tests.mpu import test_layers
from tests.mutants.mutant import Mutant, apply_mutant, find_target, load_mutants
from tests.mutants.runner import ROOT, Runner, explain_survival

MUTANTS = load_mutants()
QUICK_MUTANT = "mpu.row_parallel_output_is_not_summed"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("mutants")) as mutant_runner:
        yield mutant_runner


def assert_killed(mutant: Mutant, runner: Runner) -> None:
    if not mutant.can_be_applied:
        pytest.skip(f"{mutant.needs} is not installed")
    outcome = runner.run(mutant.tests, mutant.name)
    print(outcome.text[-3000:])
    if outcome.is_skipped:
        pytest.skip(f"the tests that detect it are skipped on this machine: {', '.join(mutant.tests)}")
    assert explain_survival(mutant, outcome) is None


def test_mutant_targets_and_tests_exist() -> None:
    for mutant in MUTANTS.values():
        if mutant.can_be_applied:
            find_target(mutant.target)
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not function or f"def {function.partition('[')[0].rpartition('::')[2]}(" in text, test


def run_with_mutant(rank: int, mutant: str | None) -> str:
    """Apply the mutant in this process, run the test that detects it, and return its error."""
    if mutant is not None:
        apply_mutant(MUTANTS[mutant])
    try:
        test_layers.test_column_then_row_matches_two_linears(2)
    except AssertionError as error:
        return str(error)
    return ""


def test_quick_mutant_is_killed_and_unmodified_test_passes() -> None:
    """The small sibling of the slow tests, without pytest and the process that forks it."""
    assert run_ranks(1, run_with_mutant, None, init=False) == [""]
    assert run_ranks(1, run_with_mutant, QUICK_MUTANT, init=False) != [""]


@pytest.mark.slow
def test_runner_is_unchanged_after_mutant(runner: Runner) -> None:
    mutant = MUTANTS[QUICK_MUTANT]
    assert_killed(mutant, runner)
    assert runner.run(mutant.tests).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)
