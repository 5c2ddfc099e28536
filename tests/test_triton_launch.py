"""Launch of Triton kernels by name."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from megatron import triton_launch


class Kernel:
    """Kernel that stores its launches."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constexprs: self.launches.append((grid, args, constexprs))


def test_launch_imports_kernel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, out = Kernel(), torch.zeros(2)
    module = types.ModuleType("kernels_of_this_test")
    module.scale_kernel = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    triton_launch.launch("kernels_of_this_test:scale_kernel", (3, 2), out, 7, writes=(out,), BLOCK=4)
    assert kernel.launches == [((3, 2), (out, 7), {"BLOCK": 4})]


def test_hook_replaces_launch_without_importing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(triton_launch, "hook", lambda *call: calls.append(call))
    x, out = torch.zeros(2), torch.zeros(2)
    triton_launch.launch("no_such_module:kernel", (1,), x, out, 5, writes=[out], updates=[x], BLOCK=4)
    assert calls == [("no_such_module:kernel", (x, out, 5), (out,), (x,))]


def test_kernels_require_cuda_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_installed in (True, False):
        monkeypatch.setattr(triton_launch, "has_triton", lambda is_installed=is_installed: is_installed)
        assert triton_launch.is_available(torch.device("cuda")) is is_installed
        assert not triton_launch.is_available(torch.device("cpu"))
