"""Imports ``spmd_types`` once, before the tests fork their processes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_checks() -> None:
    """Import the checks and with them the package; not run if all tests of the folder are skipped."""
    import tests.types.check
    import tests.types.declarations  # noqa: F401
