"""The family whose tests are run, for tests that several families share."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.parity.decoder_tests", "tests.helpers.parity_runs")

from tests.helpers.parity_runs import ParityRuns  # noqa: E402


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> ParityRuns:
    """The ``RUNS`` of the file that the test is collected in."""
    module_runs: ParityRuns = request.module.RUNS
    return module_runs


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """How many steps are compared: past the warm-up of 2, and 20 of them with --all."""
    return 20 if request.config.getoption("--all") else 6
