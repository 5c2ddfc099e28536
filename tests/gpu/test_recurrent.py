"""The delta rule and the short convolution on the device against a loop in fp64, and the kernels of fla-core."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu.canary_compare import without_tuning
from megatron.ops.delta_rule import gated_delta_rule
from megatron.ops.fla_delta_rule import HALF_PRECISION, fla_delta_rule
from megatron.ops.short_convolution import short_convolution
from tests.gpu.near import DTYPES, assert_near, make_leaf, name_of, random_values
from tests.gpu.test_ops import compare_with_formula
from tests.helpers.recurrent_samples import make_starts
from tests.ops.test_delta_rule import loop as delta_loop
from tests.ops.test_short_convolution import loop as convolution_loop

pytestmark = pytest.mark.gpu
BATCH, LENGTH, NUM_HEADS, HEAD_SIZE = 2, 130, 2, 64
STARTS = make_starts(LENGTH, [[0, 3, 64, 100], [0, 65]])


def make_inputs(has_decay_per_element: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value, log decay and beta, rounded to ``dtype``; keys have norm 1."""
    heads = (BATCH, LENGTH, NUM_HEADS)
    query, key, value = (random_values(idx, *heads, HEAD_SIZE) for idx in range(3))
    log_decay = -F.softplus(random_values(3, *heads, HEAD_SIZE) if has_decay_per_element else random_values(3, *heads))
    inputs = [query / 8, F.normalize(key, dim=-1), value, log_decay, torch.sigmoid(random_values(4, *heads))]
    return [x.to(dtype).double() for x in inputs]


def compare(function: Callable[..., Any], inputs: list[torch.Tensor], where: torch.device, dtype: torch.dtype) -> None:
    """Compare outputs and gradients with the loop; the log decay is fp32 or wider."""
    results = []
    for call, device, call_dtype in ((function, where, dtype), (delta_loop, torch.device("cpu"), torch.float64)):
        wide = torch.promote_types(call_dtype, torch.float32)
        leaves = [make_leaf(x, device, wide if idx == 3 else call_dtype) for idx, x in enumerate(inputs)]
        starts = STARTS.to(device)
        if call is delta_loop:
            state = torch.zeros(BATCH, NUM_HEADS, HEAD_SIZE, HEAD_SIZE, dtype=call_dtype)
            output, _ = call(*leaves, state, starts=starts)
        else:
            output, _ = call(*leaves, starts=starts)
        output.backward(random_values(50, *output.shape, dtype=torch.bfloat16).to(device, output.dtype))
        results.append({"output": output} | {f"gradient {idx}": x.grad for idx, x in enumerate(leaves)})
    assert_near(results[0], results[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_delta_rule_matches_loop(has_decay_per_element: bool, dtype: torch.dtype, torch_device: torch.device) -> None:
    compare(gated_delta_rule, make_inputs(has_decay_per_element, dtype), torch_device, dtype)


@pytest.fixture
def first_configurations() -> Iterator[None]:
    """Do not compile and time all configurations of the kernels, which takes minutes."""
    with without_tuning():
        yield


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
@pytest.mark.usefixtures("first_configurations")
@pytest.mark.gpu(only="the kernels of fla-core need CUDA")
@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=name_of)
@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_kernels_of_fla_match_loop(has_decay_per_element: bool, dtype: torch.dtype, torch_device: torch.device) -> None:
    compare(fla_delta_rule, make_inputs(has_decay_per_element, dtype), torch_device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_short_convolution_matches_loop(dtype: torch.dtype, torch_device: torch.device) -> None:
    shapes = [(BATCH, 20, 8), (BATCH, 3, 8), (8, 4), (8,)]
    x, left, weight, bias = (random_values(idx, *shape, dtype=dtype) for idx, shape in enumerate(shapes))
    starts = make_starts(20, [[0, 2, 3], [0, 11]])
    starts[1, :11] = -2  # the first document starts before ``x``

    def convolve(x: torch.Tensor, left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return short_convolution(x, weight, bias, starts=starts.to(x.device), left=left)

    def formula(*inputs: torch.Tensor) -> torch.Tensor:
        return convolution_loop(*inputs, starts)

    compare_with_formula(convolve, formula, [x, left, weight, bias], torch_device, dtype)
