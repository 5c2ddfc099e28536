"""Mutants in runs and in the order of samples, in a file of their own: the workers of a test run share them."""

from __future__ import annotations

import pytest

from tests.mutants.killing import assert_killed
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import IN_FAULTS, IN_ORDER, IN_RUNS, MUTANTS
from tests.mutants.runner import Runner


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_RUNS, ids=lambda mutant: mutant.name)
def test_mutant_in_a_run_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_ORDER, ids=lambda mutant: mutant.name)
def test_mutant_in_the_order_of_samples_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_selected_tests_pass_without_a_mistake(runner: Runner) -> None:
    tests = sorted({test for mutant in MUTANTS if mutant not in IN_FAULTS for test in mutant.tests})
    outcome = runner.run(tuple(tests), deadline_s=500.0)
    print(outcome.text[-3000:])
    assert outcome.code == 0
