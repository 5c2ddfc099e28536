"""Triton kernels of layers: values and gradients, where they are used, and that each one is compiled by a test."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from megatron import triton_launch
from megatron.models.common.norms import rms_norm
from megatron.ops import gated_activation
from tests.helpers.runs import ROOT
from tests.kernels import checks
from tests.kernels.emulated import emulated
from tests.kernels.launches import CASES, defined_kernels, record, recorded

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[triton]'"
)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", checks.CHECKS)
def test_kernels_match_torch(name: str) -> None:
    """By Triton's interpreter, which must be chosen before Triton is imported."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.checks", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("name", [name for name in checks.CHECKS if name != "layers"])
def test_emulated_kernels_match_torch(name: str) -> None:
    with emulated():
        checks.CHECKS[name]()


@pytest.mark.parametrize("name", checks.LAYERS)
def test_layer_with_emulated_kernels_matches_layer_without(name: str) -> None:
    with emulated() as launches:
        checks.check_layer(name)
    assert launches


def run_llama_layer(**settings: Any) -> list[str]:
    """Return the names of the kernels that forward and backward of a layer launch."""
    layer = checks.make_layer(**settings)
    with recorded() as launches:
        layer(torch.randn(7, 2, 24)).sum().backward()
    return [launch.kernel.partition(":")[2] for launch in launches]


def test_layer_launches_one_kernel_per_operation() -> None:
    forward = ["norm_forward_kernel", "rotary_kernel", "norm_forward_kernel", "gated_forward_kernel"]
    backward = ["gated_backward_kernel", "norm_backward_kernel", "rotary_kernel", "norm_backward_kernel"]
    assert run_llama_layer() == forward + backward


def test_dropout_kernel_adds_residual() -> None:
    kernels = run_llama_layer(hidden_dropout=0.1)
    forward = ["norm_forward_kernel", "rotary_kernel", "dropout_kernel", "norm_forward_kernel", "gated_forward_kernel"]
    assert kernels[:6] == [*forward, "dropout_kernel"] and kernels.count("dropout_kernel") == 4


@pytest.mark.parametrize("case", ["fp64", "--fused-kernels torch", "no Triton"])
def test_layer_without_kernels_launches_none(case: str) -> None:
    layer = checks.make_layer(torch.float64 if case == "fp64" else torch.float32)
    layer.parallel.streams.has_kernels = case != "--fused-kernels torch"
    x = torch.randn(7, 2, 24, dtype=layer.input_norm.weight.dtype)  # type: ignore[union-attr]
    with recorded() as launches:
        if case == "no Triton":
            triton_launch.is_available = lambda device: False  # restored by ``recorded``
        layer(x).sum().backward()
    assert not launches


@pytest.mark.parametrize("case", ["hook", "other kernel"])
def test_norm_is_called_if_it_has_a_hook_or_another_kernel(case: str) -> None:
    layer, calls = checks.make_layer(), []
    norm: Any = layer.post_attention_norm
    if case == "hook":
        norm.register_forward_hook(lambda *_: calls.append("called"))
    else:
        norm.kernel = lambda *args: calls.append("called") or rms_norm(*args)
    with emulated() as launches:
        layer(torch.randn(7, 2, 24))
    assert calls == ["called"] and launches.count("norm_forward_kernel") == 1


def test_gate_and_value_of_one_product_are_not_copied() -> None:
    product = torch.randn(3, 2, 10)
    gate, value = gated_activation.split(product)
    joined = gated_activation.interleave(gate, value)
    assert joined.data_ptr() == product.data_ptr() and torch.equal(joined, product)
    for even, odd in ((value, gate), (gate, value.clone()), (gate[1:], value[:2]), (gate[..., :2], value[..., :2])):
        copied = gated_activation.interleave(even, odd)
        assert torch.equal(copied, torch.stack((even, odd), dim=-1).flatten(-2))


def test_gradient_of_a_product_is_not_copied() -> None:
    """Backward of ``split`` returns the tensor that the kernel has written."""
    grads: dict[str, torch.Tensor] = {}
    with emulated():
        product = torch.randn(3, 2, 10, requires_grad=True) * 1
        gate, value = gated_activation.split(product)
        for name, tensor in (("product", product), ("gate", gate)):
            tensor.register_hook(partial(grads.__setitem__, name))
        gated_activation.gated_activation("gated-silu", gate, value).sum().backward()
    assert grads["product"].data_ptr() == grads["gate"].data_ptr() and grads["product"].is_contiguous()


def test_modules_have_the_same_inputs_and_outputs_with_kernels() -> None:
    """As megatron.debug sees them, whose dumps of different devices are compared."""
    runs = []
    for has_kernels in (False, True):
        layer, tensors = checks.make_layer(), {}
        layer.parallel.streams.has_kernels = has_kernels
        for name, module in layer.named_modules():
            module.register_forward_hook(partial(record_call, tensors, name))
        with emulated():
            layer(checks.random(7, 2, 24, dtype=torch.float32))
        runs.append(tensors)
    assert runs[0].keys() == runs[1].keys() and len(runs[0]) > 8
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-5)


def record_call(tensors: dict[str, Any], name: str, module: Any, args: Any, output: Any) -> None:
    """Store the tensors that a module was called with and has returned."""
    tensors[name] = [x.detach().clone() for x in (*args, *checks.as_tuple(output)) if isinstance(x, torch.Tensor)]


def test_every_kernel_is_compiled_ahead_of_time() -> None:
    """Functions with other names are parts of kernels."""
    kernels = {kernel for name, kernel in defined_kernels().items() if name.endswith("_kernel")}
    launched = {launch.kernel for case in CASES.values() for launch in record(case)}
    assert launched == kernels


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_without_spills(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For A100 (without FP8), H100 and B200. ``python -m tests.kernels.ahead_of_time`` prints the resources."""
    from tests.kernels.ahead_of_time import architectures_of, compile_launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for launch in record(CASES[case]):
        for architecture in architectures_of(launch):
            resources = compile_launch(launch, architecture)
            assert resources.spilled_bytes == resources.stack_bytes == 0, (launch.kernel, architecture, resources)
            assert resources.shared_bytes <= 48 * 1024
            if launch.kernel.startswith(("megatron.ops.rotary", "megatron.ops.gated")):
                assert not resources.num_narrow_accesses, (launch.kernel, architecture, resources)
