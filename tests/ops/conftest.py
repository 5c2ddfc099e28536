"""What the tests of operators share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what ``empty`` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
