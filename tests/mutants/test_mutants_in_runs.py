"""Mutants in runs and in the order of samples, in a file of their own: the workers of a test run share them."""

from __future__ import annotations

import pytest

from tests.mutants.killing import assert_killed
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import IN_ORDER, IN_RUNS
from tests.mutants.runner import Runner


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_RUNS, ids=lambda mutant: mutant.name)
def test_mutant_in_a_run_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_ORDER, ids=lambda mutant: mutant.name)
def test_mutant_in_the_order_of_samples_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)
