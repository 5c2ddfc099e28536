"""Mutants in what a run survives: checkpoints, signals, launcher, watch and guard."""

from __future__ import annotations

import pytest

from tests.mutants.killing import assert_killed
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import IN_FAULTS
from tests.mutants.runner import Runner


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_FAULTS, ids=lambda mutant: mutant.name)
def test_mutant_in_what_a_run_survives_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)
