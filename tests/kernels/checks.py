"""Comparisons of the functions that launch Triton kernels with torch's operators in fp64.

They run with emulated kernels (``tests.kernels.emulated``) in the short tests, with Triton's interpreter as
``TRITON_INTERPRET=1 python -m tests.kernels.checks NAME``, and on a GPU in tests/gpu.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron import triton_launch
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.models.common.transformer import TransformerLayer
from megatron.mpu import fp8_quantize
from megatron.mpu.random import DropoutStreams, checkpoint
from megatron.ops import fused_norm, fused_rotary, gated_activation
from megatron.ops.positions import Rotary, apply_rotary, rotary_cos_sin

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-7}
"""Relative to the largest element; the interpreter truncates to bf16."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0, device: torch.device = CPU) -> torch.Tensor:
    """Return a leaf of normally distributed values, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()


def compare(
    kernel: Callable[..., Any], plain: Callable[..., Any], *leaves: torch.Tensor, tolerance: float | None = None
) -> None:
    """Check values and gradients of ``kernel`` against those of ``plain`` in fp64."""
    wide_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    outputs, expected = as_tuple(kernel(*leaves)), as_tuple(plain(*wide_leaves))
    grads = [
        random(*output.shape, dtype=output.dtype, seed=9 + i, device=output.device) for i, output in enumerate(outputs)
    ]
    actual_grads = torch.autograd.grad(outputs, leaves, grads)
    expected_grads = torch.autograd.grad(expected, wide_leaves, [grad.double() for grad in grads])
    tolerance = tolerance or TOLERANCES[leaves[0].dtype]
    for actual, wide in zip((*outputs, *actual_grads), (*expected, *expected_grads), strict=True):
        error = float((actual.detach().double() - wide.detach()).abs().max() / wide.detach().abs().max())
        assert error <= tolerance, f"relative error {error:.2e} of a tensor {tuple(actual.shape)} in {actual.dtype}"


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return ``value``, or a tuple of it."""
    return value if isinstance(value, tuple) else (value,)


# Operations.


def rotary(device: torch.device = CPU) -> None:
    """Rotary positions with and without grouped keys, for part of the head, and with positions per sample."""
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 3, 9, 1, 0]], device=device)
    cases = itertools.product((torch.float32, torch.bfloat16), ((2, 3), (3, 1)), (1.0, 0.5), (None, positions))
    for dtype, (num_groups, heads_per_group), percent, ids in cases:
        groups = random(5, 2, num_groups, heads_per_group + 2, 12, dtype=dtype, device=device)
        angles = Rotary(head_size=12, percent=percent)

        def split_plainly(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
            heads = groups.split([groups.shape[3] - 2, 1, 1], dim=3)
            query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in heads)
            cosine, sine = rotary_cos_sin(angles, query.float(), ids, 10)  # noqa: B023
            return apply_rotary(query, cosine, sine), apply_rotary(key, cosine, sine), value

        cosine, sine = rotary_cos_sin(angles, groups.select(3, 0).permute(1, 2, 0, 3), ids, 10)
        compare(lambda groups: fused_rotary.split_and_rotate(groups, cosine, sine), split_plainly, groups)  # noqa: B023
        query = random(2, num_groups * heads_per_group, 5, 12, dtype=dtype, device=device)
        key = random(5, 2, num_groups, 12, dtype=dtype, seed=1, device=device)  # not contiguous as [b, g, s, d]
        compare(
            lambda query, key: fused_rotary.rotate(query, key.permute(1, 2, 0, 3), cosine, sine),  # noqa: B023
            lambda query, key: (
                apply_rotary(query, cosine, sine),  # noqa: B023
                apply_rotary(key.permute(1, 2, 0, 3), cosine, sine),  # noqa: B023
            ),
            query,
            key,
        )


def gates(device: torch.device = CPU) -> None:
    """Gated activations of odd sizes, of sizes beyond one program, and of no rows."""
    for dtype, name, shape in itertools.product(
        (torch.float32, torch.bfloat16), ("gated-silu", "gated-gelu"), ((3, 2, 7), (2, 1, 1030))
    ):
        pairs = random(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)
        compare(
            lambda pairs: gated_activation.gated_activation(name, *gated_activation.split(pairs)),  # noqa: B023
            lambda pairs: activate_plainly(name, *pairs.unflatten(-1, (-1, 2)).unbind(-1)),  # noqa: B023
            pairs,
        )
        gate, value = (random(*shape, dtype=dtype, seed=seed, device=device) for seed in (1, 2))
        compare(
            lambda gate, value: gated_activation.gated_activation(name, gate, value),  # noqa: B023
            lambda gate, value: activate_plainly(name, gate, value),  # noqa: B023
            gate,
            value,
        )
    empty = torch.zeros(0, 6, device=device, requires_grad=True)
    gated_activation.gated_activation("gated-silu", *gated_activation.split(empty)).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 6)


def activate_plainly(name: str, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a gated activation by torch's operators."""
    return (F.gelu(gate, approximate="tanh") if name == "gated-gelu" else F.silu(gate)) * value


def norms(device: torch.device = CPU) -> None:
    """Both norms with and without a branch, a bias and an offset, in rows of a width that is no power of two."""
    cases = itertools.product((torch.float32, torch.bfloat16), *[(False, True)] * 4)
    for dtype, has_branch, has_bias, is_centred, is_offset in cases:
        leaves = [random(19, 2, 37, dtype=dtype, device=device), random(37, dtype=dtype, seed=1, device=device)]
        leaves += [random(37, dtype=dtype, seed=2, device=device)] if has_bias else []
        leaves += [random(19, 2, 37, dtype=dtype, seed=3, device=device)] if has_branch else []

        def norm_by_kernel(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> Any:
            bias, branch = split_optional(others, has_bias, has_branch)  # noqa: B023
            flags = {"is_centred": is_centred, "is_offset": is_offset}  # noqa: B023
            return fused_norm.add_and_norm(x, branch, weight, bias, 1e-5, **flags)

        def norm_plainly(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> Any:
            bias, branch = split_optional(others, has_bias, has_branch)  # noqa: B023
            total = x * 1 if branch is None else x + branch
            scale = 1.0 + weight if is_offset else weight  # noqa: B023
            norm: Any = F.layer_norm if is_centred else F.rms_norm  # noqa: B023
            normed = norm(total, (37,), weight=scale, eps=1e-5)
            return total, normed if bias is None else normed + bias

        # the sum is rounded before the norm
        compare(norm_by_kernel, norm_plainly, *leaves, tolerance=0.03 if dtype == torch.bfloat16 else None)
    x, weight = random(3, 5, dtype=torch.float32, device=device), random(5, dtype=torch.float32, seed=1, device=device)
    for idx in (0, 1):  # one of the outputs is not used
        compare(
            lambda x: fused_norm.add_and_norm(x, x, weight, None, 1e-5, is_centred=True, is_offset=False)[idx],  # noqa: B023
            lambda x: (2 * x, F.layer_norm(2 * x, (5,), weight.double()))[idx],  # noqa: B023
            x,
        )


def split_optional(others: Sequence[torch.Tensor], has_bias: bool, has_branch: bool) -> Any:
    """Return (bias, branch), each of which may be missing in ``others``."""
    return others[0] if has_bias else None, others[-1] if has_branch else None


# Layers: with kernels and without.

LLAMA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "kv_hidden_size": 6, "ff_hidden_size": 20,
    "vocab_size": 11, "max_position_embeddings": 16, "hidden_bias": False, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "activation": "gated-silu",
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "LLaMA": {},
    "GPT-2": {
        "position_embedding_type": "learned_absolute", "activation": "gelu-tanh", "normalization": "LayerNorm",
        "hidden_bias": True,
    },
    "grouped keys, a part of the head, gated GELU": {
        "num_query_groups": 2, "rotary_percent": 0.5, "activation": "gated-gelu", "clip_qkv": 0.7,
    },
    "query and key norms, norms with offset after the branches too": {
        "qk_norm": "head", "norm_placement": "both", "layernorm_1p": True, "residual_scale": 1.4,
    },
    "norms after the branches": {"norm_placement": "after", "normalization": "LayerNorm", "hidden_bias": True},
    "normed residual": {"apply_residual_connection_post_layernorm": True},
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 8},
    "recompute": {},
}  # fmt: skip


def make_layer(dtype: torch.dtype = torch.float32, device: torch.device = CPU, **settings: Any) -> TransformerLayer:
    """Return a layer with weights that are not near 0."""
    layer = TransformerLayer(ModelArgs(**{**LLAMA, **settings}), ParallelContext(), 0).to(dtype)
    initialize(layer.named_parameters(), seed=3, rule=gpt2_rule(0.3, 2))
    for i, parameter in enumerate(layer.parameters()):
        if parameter.dim() == 1:
            parameter.data.add_(random(len(parameter), dtype=dtype, seed=i).detach(), alpha=0.2)
    return layer.to(device)  # after the initialization, because on plug-in devices this replaces the parameters


def run_layer(name: str, layer: TransformerLayer, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the output of a layer and all gradients."""
    x = random(7, 2, LLAMA["hidden_size"], dtype=torch.float32, device=device)
    if name == "recompute":
        y = checkpoint(DropoutStreams(), layer, x * 1)
    else:
        y = layer(x * 1)
    (y * random(*y.shape, dtype=torch.float32, seed=1, device=device)).sum().backward()
    assert x.grad is not None
    grads = {f"gradient of {key}": p.grad for key, p in layer.named_parameters() if p.grad is not None}
    return {"output": y, "gradient of the input": x.grad, **grads}


def check_layer(name: str, device: torch.device = CPU) -> None:
    """Check that kernels change values and gradients of a layer by rounding only."""
    layer = make_layer(device=device, **LAYERS[name])
    with_kernels = run_layer(name, layer, device)
    layer.zero_grad()
    layer.parallel.streams.has_kernels = False
    without_kernels = run_layer(name, layer, device)
    assert with_kernels.keys() == without_kernels.keys()
    for key, expected in without_kernels.items():
        error = float((with_kernels[key].detach() - expected.detach()).abs().max() / expected.detach().abs().max())
        assert error < 2e-5, f"{key}: {error:.1e}"


def layers(device: torch.device = CPU) -> None:
    """All layers of ``LAYERS``."""
    for name in LAYERS:
        check_layer(name, device)


def fp8(device: torch.device = CPU) -> None:
    """Compare the bytes of FP8 rows and columns, and their maxima, with those of torch's operators."""
    shapes, dtypes = ((1, 16), (5, 37), (70, 130), (3, 5000)), (torch.bfloat16, torch.float32)
    for shape, dtype in itertools.product(shapes, dtypes):
        x = random(*shape, dtype=dtype, device=device).detach()
        x *= torch.logspace(-20, 4, shape[0], device=device).unsqueeze(1).to(dtype)
        x[0, 1] = float("nan") if shape[0] == 5 else 0.0
        x[-1] = 0.0 if shape[0] > 1 else x[-1]
        actual = _quantize(x)
        is_available, triton_launch.is_available = triton_launch.is_available, lambda device: False
        try:
            expected = _quantize(x)
        finally:
            triton_launch.is_available = is_available
        for name, tensor in actual.items():
            assert torch.equal(_bits(tensor), _bits(expected[name])), f"{name} of a tensor {shape} in {dtype}"
    _check_batch(device)


def _check_batch(device: torch.device) -> None:
    """Compare the columns of several matrices with those of each matrix."""
    x = random(3, 70, 37, dtype=torch.bfloat16, device=device).detach()
    maxima = fp8_quantize.column_maxima(x)
    quantized = fp8_quantize.quantize_columns(x, maxima)
    for matrix, columns, transpose in zip(x, maxima, quantized, strict=True):
        assert torch.equal(columns, fp8_quantize.column_maxima(matrix))
        assert torch.equal(_bits(transpose), _bits(fp8_quantize.quantize_columns(matrix, columns)))


def _quantize(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize rows and columns of ``x``."""
    rows, columns = fp8_quantize.row_maxima(x), fp8_quantize.column_maxima(x)
    return {
        "maxima of rows": rows,
        "maxima of columns": columns,
        "rows": fp8_quantize.quantize_rows(x, rows),
        "columns": fp8_quantize.quantize_columns(x, columns),
    }


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``x`` as integers; 1 for every NaN, whose sign is not defined."""
    bits = x.view(torch.uint8 if x.itemsize == 1 else torch.int32)
    return bits.masked_fill(x.float().isnan(), 1)


CHECKS: dict[str, Callable[..., None]] = {
    "rotary": rotary, "gates": gates, "norms": norms, "fp8": fp8, "layers": layers,
}  # fmt: skip


def round_e4m3_to_nearest() -> None:
    """Replace the interpreter's cast to e4m3, which is not rounded to the nearest even number as on GPUs."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if str(output_dtype) != "fp8e4nv":
            return original(data, input_dtype, output_dtype, rounding_mode)
        return torch.tensor(data, dtype=torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


if __name__ == "__main__":
    triton_launch.is_available = lambda device: True
    round_e4m3_to_nearest()
    CHECKS[sys.argv[1]]()
