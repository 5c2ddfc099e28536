from __future__ import annotations

import pytest
import torch

from megatron import device


@pytest.fixture(scope="session")
def device_type(request: pytest.FixtureRequest) -> str:
    """The kind of device that is tried: "cuda", or in the dry form "cpu" or "sim"."""
    return request.config.getoption("--gpu-device") or "cuda"


@pytest.fixture(scope="session")
def torch_device(device_type: str) -> torch.device:
    """The device that is tried."""
    return device.bind(device_type, 0)
