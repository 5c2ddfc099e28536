"""Replacements of CUDA calls with which megatron-core runs on CPUs over gloo.

``run_megatron_core`` of tests/helpers/megatron_core.py applies them before it imports a program. They change where
tensors are stored and how work is queued, and no arithmetic. Dropout and random initial weights are not reproduced:
programs set dropout to 0 and load their weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; it must see CUDA's own functions, and ranks should not import it
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaOnCpu(TorchFunctionMode):
    """Maps the device "cuda" to the CPU, and lets CPU tensors report CUDA types such as "torch.cuda.FloatTensor"."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:  # optimizers compare it with CUDA's types
            return function(args[0]).replace("torch.", "torch.cuda.")
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if function is torch.Tensor.to and any(_is_cuda(argument) for argument in args[1:]):
            args = tuple(CPU if _is_cuda(argument) else argument for argument in args)
        return function(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class CpuStream:
    """A CUDA stream or event of a device that runs each operation at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def replace_cuda_calls() -> None:
    """Replace the CUDA calls of this process and of the processes that it forks."""
    torch.compile = lambda function=None, **options: function or (lambda inner: inner)  # its fused functions
    CudaOnCpu().__enter__()
    stream = CpuStream()
    torch.cuda.current_device = lambda: CPU
    torch.cuda.device_count = lambda: 1
    torch.cuda.Stream = torch.cuda.Event = CpuStream
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.synchronize = torch.cuda.set_device = torch.cuda.empty_cache = lambda *args: None

    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()


def init_model_parallel(**sizes: int) -> None:
    """Form megatron-core's process groups from the gloo group of this program; ``sizes`` are its keyword arguments.

    Collective.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)
    dist.barrier()
