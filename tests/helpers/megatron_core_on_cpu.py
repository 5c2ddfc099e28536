"""Replacements of CUDA calls with which megatron-core runs on CPUs over gloo.

``run_megatron_core`` of tests/helpers/megatron_core.py applies them before it imports a program. They change where
tensors are stored and how work is queued, and no arithmetic; ``fp64_for_fp32`` changes the precision. Dropout and
random initial weights are not reproduced: programs set dropout to 0 and load their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


class Fp64ForFp32(TorchFunctionMode):
    """Computes in fp64 where the program asks for fp32, and lets fp64 tensors report the type of fp32 tensors."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(args[0]).replace("DoubleTensor", "FloatTensor")
        return function(*(_widened(value) for value in args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def fp64_for_fp32() -> Iterator[None]:
    """Run megatron-core in fp64: new tensors are fp64, and conversions to fp32 are conversions to fp64.

    The package converts to fp32 where it needs more precision than bf16 has (cross-entropy, softmax, router, norm of
    the gradients), and its optimizer rejects fp64. The operations are unchanged, so that differences that remain are
    not rounding.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Fp64ForFp32():
            yield
    finally:
        torch.set_default_dtype(previous)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class CpuStream:
    """A CUDA stream or event of a device that runs each operation at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self  # record_event returns an event, which is also one of these


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
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    moe_utils.te_general_gemm = None  # a fault of 0.16.1: without Transformer Engine the router reads an undefined name
    random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    make_norm = WrappedTorchNorm.__new__

    def make_sequence_parallel_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        is_parallel, config.sequence_parallel = config.sequence_parallel, False
        norm = make_norm(cls, config, *args, **kwargs)
        config.sequence_parallel = is_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = is_parallel  # the gradient is summed over the tensor ranks
        return norm

    # torch's norms are rejected with sequence parallelism; the norms of Apex only add this attribute
    WrappedTorchNorm.__new__ = make_sequence_parallel_norm


def init_model_parallel(**sizes: int) -> None:
    """Form megatron-core's process groups from the gloo group of this program; ``sizes`` are its keyword arguments.

    Collective.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)
    dist.barrier()
