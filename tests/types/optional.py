"""The package that the tests of this folder need, and their deadline."""

from __future__ import annotations

import importlib.util

import pytest

NEEDS_SPMD_TYPES = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("spmd_types") is None,
        reason="spmd_types is not installed: pip install -e '.[spmd-types]'",
    ),
]
"""Marks of the test files. The short run compares the same functions and decoders with one process, in fp64."""
DEADLINE_S = 200.0
"""Seconds for about one second of computation, on a machine that many tests share."""
