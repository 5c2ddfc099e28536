"""A mutant is killed when a test that it is planted for fails: by a comparison, or by the code's own refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.runner import Runner

ROOT = Path(__file__).resolve().parents[2]
ALL_SKIPPED = re.compile(r"^s+ +\[100%\]$", re.MULTILINE)
RAISED = re.compile(r"^E +(?:\w+\.)*(\w+(?:Error|Exception))\b", re.MULTILINE)


def assert_killed(mutant: Mutant, runner: Runner) -> None:
    outcome = runner.run(mutant.tests, (mutant.file, mutant.old, mutant.new))
    print(outcome.text[-3000:])
    if outcome.code == 0 and ALL_SKIPPED.search(outcome.text):
        pytest.skip(f"the tests that must see it are skipped on this machine: {', '.join(mutant.tests)}")
    assert outcome.code == 1, f"pytest ended with {outcome.code} where 1, a failed test, is wanted"
    raised = set(RAISED.findall(outcome.text))
    assert mutant.refuses or raised <= {"AssertionError"}, (
        "a comparison must fail; a mistake that cannot even run proves nothing"
    )
