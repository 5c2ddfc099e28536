"""What a device computes, held against the CPU in fp64 on the very same numbers.

A reference gets the weights and inputs as the device has them, rounded to its type, so that what is left is what the
device's own arithmetic rounds. So the allowed differences can be tight, and a mistake of a few per cent is seen.

| type | rel-F of a gradient or an output | bits of a number |
|---|---|---|
| fp64 | 1e-9; 1e-11 where a kernel takes the epsilon of a norm in fp32 | 53 |
| fp32 | 2e-5; TF32 would give 1e-3 | 24 |
| fp16 | 1e-2 | 11 |
| bf16 | 6e-2 | 8 |

A model is allowed more in 16 bits where its function has a kink (ReLU, clipping), since a number rounded across it
changes a gradient as a whole, and where scores are not scaled: ``families.ROUGH``.

rel-F is ``|a - b| / max(|b|, floor x |all|)``: what is nought but for rounding has no relative error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
NORM_FLOORS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def name_of(value: Any) -> str:
    """Return how a value is called in the name of a test."""
    return str(value).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")


def to_device(value: Any, torch_device: torch.device) -> Any:
    """Return a tensor on ``torch_device``; anything else as it is."""
    return value.to(torch_device) if isinstance(value, torch.Tensor) else value


def assert_near(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], dtype: torch.dtype, factor: float = 1.0
) -> None:
    """Compare tensors by name, each as in the table, the worst one told by name.

    Args:
        dtype: in which ``actual`` was computed.
        factor: on what is allowed.
    """
    assert sorted(actual) == sorted(expected)
    host_tensors = {name: tensor.detach().cpu().double() for name, tensor in actual.items()}
    total_norm = torch.stack([tensor.detach().double().norm() for tensor in expected.values()]).norm()
    assert total_norm > 0, "there is nothing to compare"
    floor, tolerance = NORM_FLOORS[dtype] * total_norm, factor * TOLERANCES[dtype]
    errors = {
        name: float(
            (host_tensors[name] - reference.detach().double()).norm()
            / torch.maximum(reference.detach().double().norm(), floor)
        )
        for name, reference in expected.items()
    }
    failures = {name: f"{error:.2g}" for name, error in errors.items() if not error <= tolerance}  # a NaN is not
    assert not failures, f"off by more than {tolerance:g}, which is allowed in {name_of(dtype)}"


def random_values(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return random numbers of the CPU that ``dtype`` can hold, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()


def make_leaf(x: torch.Tensor, torch_device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` on ``torch_device`` as something that gets a gradient."""
    return x.detach().to(dtype).to(torch_device).requires_grad_()
