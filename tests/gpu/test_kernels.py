"""Triton kernels of layers on the device, against torch's operators in fp64; emulated ones in the dry forms."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron import triton_launch
from tests.kernels.checks import CHECKS
from tests.kernels.emulated import emulated

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_match_torch(name: str, torch_device: torch.device) -> None:
    kernels: Any = nullcontext() if triton_launch.is_available(torch_device) else emulated()
    with kernels:
        CHECKS[name](torch_device)
