from __future__ import annotations

import pytest
import torch

from megatron import device


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of device that is tried: "cuda", or in the dry form "cpu" or "sim"."""
    return request.config.getoption("--gpu-device") or "cuda"


@pytest.fixture(scope="session")
def place(kind: str) -> torch.device:
    """The device that is tried."""
    return device.bind(kind, 0)
