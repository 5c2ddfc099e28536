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

READ_METHODS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
DATA_DEPENDENT_OPS = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave")
PROJECT_FOLDERS = ("megatron", "tds", "deepspeed", "torch/distributed")


def find_caller() -> str:
    """Return the innermost active function of this project or of DeepSpeed, as "file:function"."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(f"/{folder}/" in name for folder in PROJECT_FOLDERS) and not name.endswith(
            ("host_reads.py", "_dispatch.py")
        ):
            path = name[max(name.rfind(f"/{folder}/") for folder in PROJECT_FOLDERS) + 1 :]
            return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _RecordDataDependentSizes(TorchDispatchMode):
    """Appends a line to ``waits`` for each operation whose output size depends on its data."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        has_boolean_index = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        has_tensor_repeats = name != "repeat_interleave" or "Tensor" in func._overloadname
        if has_boolean_index or (name in DATA_DEPENDENT_OPS and has_tensor_repeats):
            self.waits.append(f"{name} in {find_caller()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def replace_synchronize(replacement: Callable[..., None]) -> Iterator[None]:
    """Replace the functions that wait for all work of a device by ``replacement``."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_, **__: replacement())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_, **__: replacement())
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: replacement())
        yield


@contextmanager
def count_waits() -> Iterator[list[str]]:
    """Yield a list that receives a line for each wait in the block."""
    waits: list[str] = []
    methods = {name: getattr(torch.Tensor, name) for name in READ_METHODS}
    factories = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def wrap_read(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            waits.append(f"{name} in {find_caller()}")
            return call(self, *args, **kwargs)

        return read

    def wrap_factory(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and not isinstance(data, torch.Tensor):
                waits.append(f"{name} in {find_caller()}")
            return call(data, *args, **kwargs)

        return make

    def record_synchronize() -> None:
        waits.append(f"synchronize in {find_caller()}")

    try:
        for name, call in methods.items():
            setattr(torch.Tensor, name, wrap_read(name, call))
        for name, call in factories.items():
            setattr(torch, name, wrap_factory(name, call))
        with _RecordDataDependentSizes(waits), replace_synchronize(record_synchronize):
            yield waits
    finally:
        for name, call in methods.items():
            setattr(torch.Tensor, name, call)
        for name, call in factories.items():
            setattr(torch, name, call)
