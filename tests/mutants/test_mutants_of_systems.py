"""Mistakes in the further families of models and in what surrounds them, each planted and seen."""

from __future__ import annotations

import pytest

from tests.mutants.killing import assert_killed
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import IN_FAMILIES, IN_SYSTEMS
from tests.mutants.runner import Runner


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_FAMILIES, ids=lambda mutant: mutant.name)
def test_mutant_in_a_family_of_models_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_SYSTEMS, ids=lambda mutant: mutant.name)
def test_mutant_in_zero_recompute_devices_dumps_or_contracts_is_killed(mutant: Mutant, runner: Runner) -> None:
    assert_killed(mutant, runner)
