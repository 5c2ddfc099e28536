"""Count operations that make the host wait for the device. They run on a CPU, where the same calls do not wait.

| counted | on a GPU |
|---|---|
| ``item``, ``tolist``, ``bool``, ``int``, ``float``, ``numpy``, ``cpu`` of a tensor | waits for the tensor |
| ``nonzero``, ``masked_select``, index by booleans, ``unique``, ``repeat_interleave`` by a tensor | waits for a size |
| a tensor made of Python numbers with ``device=`` | copies from memory that is not pinned, and waits |
| ``synchronize`` of the device, by torch or by DeepSpeed's accelerator | waits for all work |

Operations on tensors that are always on the host, such as samples before they form a micro-batch, are listed, too; the
caller removes them by file name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
SIZED_BY_DATA = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave")
SHARED = ("megatron", "tds", "deepspeed", "torch/distributed")


def place() -> str:
    """Return the innermost active function of this project or of DeepSpeed, as "file:function"."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(f"/{part}/" in name for part in SHARED) and not name.endswith(("host_reads.py", "_dispatch.py")):
            short = name[max(name.rfind(f"/{part}/") for part in SHARED) + 1 :]
            return f"{short}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _OfSizesByData(TorchDispatchMode):
    """Appends a line to ``found`` for each operation whose output size depends on its data."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_booleans = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        by_repeats = name != "repeat_interleave" or "Tensor" in func._overloadname
        if by_booleans or (name in SIZED_BY_DATA and by_repeats):
            self.found.append(f"{name} in {place()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def synchronize_is(call: Callable[..., None]) -> Iterator[None]:
    """Replace the functions that wait for all work of a device by ``call``."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "synchronize", lambda *_, **__: call())
        patch.setattr(torch.cuda, "synchronize", lambda *_, **__: call())
        patch.setattr(torch.cuda.Event, "synchronize", lambda _: call())
        yield


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that receives a line for each wait in the block."""
    waits: list[str] = []
    methods = {name: getattr(torch.Tensor, name) for name in READS}
    makers = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def reading(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            waits.append(f"{name} in {place()}")
            return call(self, *args, **kwargs)

        return read

    def making(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and not isinstance(data, torch.Tensor):
                waits.append(f"{name} in {place()}")
            return call(data, *args, **kwargs)

        return make

    def waiting() -> None:
        waits.append(f"synchronize in {place()}")

    try:
        for name, call in methods.items():
            setattr(torch.Tensor, name, reading(name, call))
        for name, call in makers.items():
            setattr(torch, name, making(name, call))
        with _OfSizesByData(waits), synchronize_is(waiting):
            yield waits
    finally:
        for name, call in methods.items():
            setattr(torch.Tensor, name, call)
        for name, call in makers.items():
            setattr(torch, name, call)
