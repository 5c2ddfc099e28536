"""Comparisons for rows of the canary: random inputs, relative errors, and references on the CPU in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
TOLERANCES = {BF16: 1e-2, FP32: 2e-6, FP64: 1e-12}
"""Dtype -> allowed relative error of an output, in the Frobenius norm. Rounding to bf16 alone gives 1.7e-3."""


class NeedsCuda(Exception):
    """The call of a row exists on CUDA only."""


class NeedsPackage(Exception):
    """The call of a row needs an optional package, which is the argument."""


@dataclass(frozen=True)
class Row:
    """One call.

    Args:
        run: function that compares the call on a device, and returns one line of text.
        is_judged: a difference is a failure; otherwise it is only recorded.
    """

    name: str
    run: Callable[[torch.device], str]
    is_judged: bool = True


def random(seed: int, *shape: int, dtype: torch.dtype = FP64, scale: float = 1.0) -> torch.Tensor:
    """Return random numbers on the CPU in fp64 that ``dtype`` can represent."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=FP64)).to(dtype).double()


def require_cuda(device: torch.device) -> None:
    """Raise ``NeedsCuda`` unless ``device`` is a GPU."""
    if device.type != "cuda":
        raise NeedsCuda


@contextmanager
def without_tuning() -> Iterator[None]:
    """Let kernels of Triton that are defined in the block use the first of their configurations.

    Otherwise the first call of a kernel compiles and times all of them, which takes minutes for the kernels of a layer.
    """
    from triton.runtime.autotuner import Autotuner

    initialize = Autotuner.__init__

    def keep_first(tuner: Any, *args: Any, **kwargs: Any) -> None:
        initialize(tuner, *args, **kwargs)
        tuner.configs = tuner.configs[:1]

    Autotuner.__init__ = keep_first
    try:
        yield
    finally:
        Autotuner.__init__ = initialize


def compare(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype, factor: float = 1.0
) -> str:
    """Return the relative error of each tensor as text.

    Args:
        factor: factor of the tolerance of ``dtype``.

    Raises:
        AssertionError: an error exceeds the tolerance.
    """
    allowed = factor * TOLERANCES[dtype]
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    assert all(error <= allowed for error in errors.values()), f"{text}; allowed {allowed:.0e}"
    return text


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``expected``; infinite for other shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.detach().double().cpu() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm().clamp_min(1e-300))


def run_with_grads(
    function: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    factor: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return the output of ``function`` and the gradients of ``inputs`` for the loss ``(output * factor).sum()``."""
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs.values()]
    output = function(*leaves)
    output.backward(factor.to(device, dtype))
    return {"out": output, **grads_by_name(inputs, leaves)}


def grads_by_name(names: Iterable[str], leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of ``leaves`` by name; zeros if a leaf has none."""
    return {
        f"d{name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in zip(names, leaves, strict=True)
    }


def compare_with_fp64(
    function: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    factor: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype = BF16,
    tolerance_factor: float = 1.0,
) -> str:
    """Compare output and gradients of ``function`` on the device with ``reference`` on the CPU in fp64."""
    actual = run_with_grads(function, inputs, factor, device, dtype)
    expected = run_with_grads(reference, inputs, factor, torch.device("cpu"), FP64)
    return compare(actual, expected, dtype, tolerance_factor)


def kernel_names(call: Callable[[], Any], words: Sequence[str]) -> str:
    """Return the names of operators and kernels of ``call`` that contain one of ``words``, or the profiler's error."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        with torch.profiler.profile(activities=activities) as profile:
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        names = dict.fromkeys(event.name[:70] for event in profile.events() or [])
    except RuntimeError as error:  # a machine may not permit profiles, which is no fault of the call
        return f"no profile: {error}"[:200]
    return ", ".join(name for name in names if any(word in name.lower() for word in words))[:400]


def run_with_scalar(
    function: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients of ``inputs``."""
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs.values()]
    loss = function(*leaves)
    loss.backward()
    return {"loss": loss, **grads_by_name(inputs, leaves)}
