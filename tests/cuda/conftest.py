"""Fixture of the processes with the simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda import fake_cuda
from tests.cuda.worker import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    if fake_cuda.find_compiler() is None:
        pytest.skip("no C++ compiler: the simulated device cannot be built")
    fake_cuda.build()
    with Worker() as running_worker:
        yield running_worker
