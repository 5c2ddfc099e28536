"""The family whose tests are run, for tests that several families share."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.parity.decoder_tests", "tests.helpers.parity_runs")

from tests.helpers.parity_runs import Runs  # noqa: E402


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> Runs:
    """The ``RUNS`` of the file that the test is collected in."""
    found: Runs = request.module.RUNS
    return found
