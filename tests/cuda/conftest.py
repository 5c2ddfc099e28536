"""The processes with the device without CUDA for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda import fake_cuda
from tests.cuda.worker import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    if fake_cuda.find_compiler() is None:
        pytest.skip("no C++ compiler: the device without CUDA cannot be built")
    fake_cuda.build()
    with Worker() as running_worker:
        yield running_worker
