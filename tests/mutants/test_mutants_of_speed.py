"""Mistakes in what makes a run fast, planned and visible; and the tests that mistakes are planted for pass without."""

from __future__ import annotations

import pytest

from tests.mutants.killing import assert_killed
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import IN_SIGHT, IN_SPEED, PARTS
from tests.mutants.runner import Runner


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_SPEED, ids=lambda mutant: mutant.name)
def test_mutant_in_what_makes_a_step_fast_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_SIGHT, ids=lambda mutant: mutant.name)
def test_mutant_in_plans_reports_or_pages_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_the_selected_tests_pass_without_a_mistake(part: str, runner: Runner) -> None:
    """A test that fails anyway would seem to kill whatever is planted for it.

    That it passes in the tree the run of all tests says; this is of what the copy may lack, which every third shows.
    """
    tests = sorted({test for mutant in PARTS[part] for test in mutant.tests})[::3]
    outcome = runner.run(tuple(tests), deadline_s=800.0)
    print(outcome.text[-3000:])
    assert outcome.code == 0
