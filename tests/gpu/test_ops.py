"""Norms, activations, positions, losses and gradient norms on the device, each against its formula in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron.models.common.norms import layer_norm, rms_norm
from megatron.mpu.cross_entropy import validate_targets, vocab_parallel_cross_entropy
from megatron.mpu.linear_cross_entropy import linear_cross_entropy
from megatron.ops.activations import ACTIVATIONS
from megatron.ops.attention import positions_in_segments
from megatron.ops.positions import (
    Rotary,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    relative_buckets,
    rotary_cos_sin,
)
from tds.grad_norm import LARGE_NUMEL, clip_coefficient, global_norm
from tests.gpu.near import DTYPES, assert_near, make_leaf, name_of, random_values

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
Call = Callable[..., torch.Tensor]


def compare_with_formula(
    implementation: Call, formula: Call, inputs: list[torch.Tensor], torch_device: torch.device, dtype: torch.dtype
) -> None:
    """Compare what both give, and the gradients of ``inputs``."""
    results = []
    for call, call_device, call_dtype in ((implementation, torch_device, dtype), (formula, CPU, torch.float64)):
        leaves = [make_leaf(tensor, call_device, call_dtype) for tensor in inputs]
        out = call(*leaves)
        out.backward(random_values(50, *out.shape, dtype=torch.bfloat16).to(call_device, out.dtype))
        results.append({"output": out} | {f"gradient {i}": x.grad for i, x in enumerate(leaves)})
    assert_near(results[0], results[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("h", [61, 64, 1536])
@pytest.mark.parametrize("norm_type", ["layer norm", "layer norm without a shift", "rms norm"])
def test_norms_match_formulas(norm_type: str, h: int, dtype: torch.dtype, torch_device: torch.device) -> None:
    x, weight, bias = (
        random_values(1, 7, 3, h, dtype=dtype),
        random_values(2, h, dtype=dtype),
        random_values(3, h, dtype=dtype),
    )
    epsilon = 0.01  # large enough to be seen

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight

    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight

    if norm_type == "rms norm":
        compare_with_formula(lambda x, w: rms_norm(x, w, epsilon), scaled, [x, weight], torch_device, dtype)
    elif norm_type == "layer norm":
        inputs = [x, weight, bias]
        compare_with_formula(
            lambda x, w, b: layer_norm(x, w, b, epsilon), lambda x, w, b: normed(x, w) + b, inputs, torch_device, dtype
        )
    else:
        compare_with_formula(lambda x, w: layer_norm(x, w, None, epsilon), normed, [x, weight], torch_device, dtype)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


FORMULAS: dict[str, Call] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu-tanh": _gelu_tanh,
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "squared-relu": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
    "silu": _silu,
    "gated-gelu": _gelu_tanh,
    "gated-quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gated-silu": _silu,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_formulas(name: str, dtype: torch.dtype, torch_device: torch.device) -> None:
    compare_with_formula(
        ACTIVATIONS[name], FORMULAS[name], [3 * random_values(4, 33, 17, dtype=dtype)], torch_device, dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
def test_rotary_positions_rotate_each_pair_by_its_angle(
    scaling: str, dtype: torch.dtype, torch_device: torch.device
) -> None:
    rotary = Rotary(head_size=16, scaling=scaling, original_positions=64)
    positions = torch.stack([torch.arange(11), torch.arange(11) * 900])
    speeds = torch.tensor(rotary.frequencies(), dtype=torch.float64)
    angles = (positions.double().unsqueeze(-1) * speeds).unsqueeze(1)  # [b, 1, s, d/2]

    def implementation(x: torch.Tensor) -> torch.Tensor:
        return apply_rotary(x, *rotary_cos_sin(rotary, x, positions.to(torch_device), max_length=9001))

    def formula(x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1)) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat((turned.real, turned.imag), dim=-1)

    compare_with_formula(implementation, formula, [random_values(5, 2, 3, 11, 16, dtype=dtype)], torch_device, dtype)


def test_biases_and_positions_are_bitwise_cpu_values(torch_device: torch.device) -> None:
    """What is made of integers alone, and read by attention."""
    segments = torch.tensor([[0, 0, 1, 1, 1, 2, -1], [3, 3, 3, 3, 3, 3, 3]])
    assert positions_in_segments(segments.to(torch_device)).tolist() == [[0, 1, 0, 1, 2, 0, 0], list(range(7))]
    distances = torch.arange(-700, 701)
    for is_bidirectional in (True, False):
        options = {"num_buckets": 32, "max_distance": 128, "is_bidirectional": is_bidirectional}
        assert torch.equal(
            relative_buckets(distances.to(torch_device), **options).cpu(), relative_buckets(distances, **options)
        )
    slopes, positions = torch.tensor(alibi_slopes(12), dtype=torch.float64), torch.arange(33)
    for dtype in DTYPES:
        bias = alibi_bias(
            slopes.to(torch_device), positions.unsqueeze(0).to(torch_device), positions.to(torch_device), dtype
        ).cpu()
        assert torch.equal(bias, alibi_bias(slopes, positions.unsqueeze(0), positions, dtype))
        assert torch.allclose(bias[0, 3, 20, :21].double(), slopes[3] * (positions[:21] - 20), rtol=2**-8)


N, H, V = 77, 24, 211


def loss_formula(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    picked = logits[torch.arange(len(targets)), targets]
    return ((logits.exp().sum(-1).log() - picked) * weights).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("chunk", [None, 20, 77], ids=["logits", "chunks", "one chunk"])
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "torch"])
def test_losses_match_formula_without_padded_rows(
    has_kernels: bool, chunk: int | None, dtype: torch.dtype, torch_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, V, (N,), generator=generator)
    weights = (torch.rand(N, generator=generator) < 0.7).double()
    x, table, bias = (random_values(i, *shape, dtype=dtype) for i, shape in ((6, (N, H)), (7, (256, H)), (8, (256,))))

    def implementation(x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        vocab_args = {"vocab_size": V, "divisible_by": 128, "has_kernels": has_kernels}
        device_targets, loss_dtype = targets.to(torch_device), torch.promote_types(dtype, torch.float32)
        device_weights = weights.to(loss_dtype).to(torch_device)
        if chunk is not None:
            return linear_cross_entropy(
                x, table, device_targets, device_weights, bias=bias, chunk_tokens=chunk, **vocab_args
            )
        logits = torch.nn.functional.linear(x, table, bias)
        return (vocab_parallel_cross_entropy(logits, device_targets, **vocab_args) * device_weights).sum()

    def formula(x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return loss_formula((x @ table.t() + bias)[:, :V], targets, weights)

    compare_with_formula(implementation, formula, [x, table, bias], torch_device, dtype)


def test_label_outside_vocabulary_raises_or_makes_loss_nan(torch_device: torch.device) -> None:
    targets, weights = (
        torch.tensor([1, 210, 211, 500]).to(torch_device),
        torch.tensor([1.0, 1.0, 1.0, 0.0]).to(torch_device),
    )
    if torch_device.type == "cpu":
        with pytest.raises(ValueError, match="got 211"):
            validate_targets(weights, targets, V)
    else:
        assert validate_targets(weights, targets, V).cpu().isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_gradient_norm_is_exact_and_clipping_reaches_limit(
    dtype: torch.dtype, torch_device: torch.device, device_type: str
) -> None:
    """Of large, small, strided and empty gradients; a naive sum of squares in fp32 would be off by 1e-4 and more."""
    fp32_rtol = (
        1e-5 if device_type == "sim" else 1e-6
    )  # it adds up as the host's processor does: no tree, an AMD's is 2e-6 off
    shapes = ((LARGE_NUMEL + 1023,), (300, 7), (), (0, 4), (4 * LARGE_NUMEL,))
    fp64_grads = [random_values(i, *shape, dtype=dtype) * 10.0 ** (i - 2) for i, shape in enumerate(shapes)]
    fp64_grads = [grad.to(dtype).double() for grad in fp64_grads]
    gradients = [grad.to(torch_device, dtype) for grad in fp64_grads]
    gradients[1] = gradients[1].t().contiguous().t()
    norm = global_norm(gradients, [], torch_device)
    expected = math.sqrt(sum(float(grad.square().sum()) for grad in fp64_grads))
    assert norm.dtype == torch.float64 and norm.device.type == torch_device.type
    assert norm.item() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else fp32_rtol)
    torch._foreach_mul_(gradients, clip_coefficient(norm.item(), 0.5))
    assert global_norm(gradients, [], torch_device).item() == pytest.approx(0.5, rel=1e-5)
    gradients[2].fill_(math.inf)
    assert global_norm(gradients, [], torch_device).item() == math.inf


def test_norm_of_large_fp16_values_is_finite(torch_device: torch.device) -> None:
    gradients = [torch.full((5000,), 200.0, dtype=torch.float16).to(torch_device)]
    assert global_norm(gradients, [], torch_device).item() == pytest.approx(200.0 * math.sqrt(5000), rel=1e-6)
