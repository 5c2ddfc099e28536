"""Norms, activations, positions, losses and gradient norms on the device, each against its formula in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron.models.common.norms import layer_norm, rms_norm
from megatron.mpu.cross_entropy import known_or_nan, vocab_parallel_cross_entropy
from megatron.mpu.linear_cross_entropy import linear_cross_entropy
from megatron.ops.activations import ACTIVATIONS
from megatron.ops.attention import positions_in_segments
from megatron.ops.positions import (
    Rotary,
    alibi_bias,
    alibi_slopes,
    relative_buckets,
    rotated,
    turns,
)
from tds.grad_norm import LARGE, clip_coefficient, global_norm
from tests.gpu.near import DTYPES, assert_near, leaf, name_of, noise

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
Call = Callable[..., torch.Tensor]


def compare(ours: Call, formula: Call, parts: list[torch.Tensor], place: torch.device, dtype: torch.dtype) -> None:
    """Compare what both give, and the gradients of ``parts``."""
    found = []
    for call, there, kind in ((ours, place, dtype), (formula, CPU, torch.float64)):
        leaves = [leaf(part, there, kind) for part in parts]
        out = call(*leaves)
        out.backward(noise(50, *out.shape, dtype=torch.bfloat16).to(there, out.dtype))
        found.append({"output": out} | {f"gradient {i}": x.grad for i, x in enumerate(leaves)})
    assert_near(found[0], found[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("h", [61, 64, 1536])
@pytest.mark.parametrize("which", ["layer norm", "layer norm without a shift", "rms norm"])
def test_norms_are_their_formulas(which: str, h: int, dtype: torch.dtype, place: torch.device) -> None:
    x, weight, bias = noise(1, 7, 3, h, dtype=dtype), noise(2, h, dtype=dtype), noise(3, h, dtype=dtype)
    epsilon = 0.01  # large enough to be seen

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight

    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight

    if which == "rms norm":
        compare(lambda x, w: rms_norm(x, w, epsilon), scaled, [x, weight], place, dtype)
    elif which == "layer norm":
        both = [x, weight, bias]
        compare(lambda x, w, b: layer_norm(x, w, b, epsilon), lambda x, w, b: normed(x, w) + b, both, place, dtype)
    else:
        compare(lambda x, w: layer_norm(x, w, None, epsilon), normed, [x, weight], place, dtype)


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
    "gated-silu": _silu,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name: str, dtype: torch.dtype, place: torch.device) -> None:
    compare(ACTIVATIONS[name], FORMULAS[name], [3 * noise(4, 33, 17, dtype=dtype)], place, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
def test_rotary_positions_turn_each_pair_by_its_angle(scaling: str, dtype: torch.dtype, place: torch.device) -> None:
    rotary = Rotary(head_size=16, scaling=scaling, original_positions=64)
    positions = torch.stack([torch.arange(11), torch.arange(11) * 900])
    speeds = torch.tensor(rotary.frequencies(), dtype=torch.float64)
    angles = (positions.double().unsqueeze(-1) * speeds).unsqueeze(1)  # [b, 1, s, d/2]

    def ours(x: torch.Tensor) -> torch.Tensor:
        return rotated(x, *turns(rotary, x, positions.to(place), longest=9001))

    def formula(x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1)) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat((turned.real, turned.imag), dim=-1)

    compare(ours, formula, [noise(5, 2, 3, 11, 16, dtype=dtype)], place, dtype)


def test_biases_and_positions_are_the_cpus_to_the_bit(place: torch.device) -> None:
    """What is made of integers alone, and read by attention."""
    segments = torch.tensor([[0, 0, 1, 1, 1, 2, -1], [3, 3, 3, 3, 3, 3, 3]])
    assert positions_in_segments(segments.to(place)).tolist() == [[0, 1, 0, 1, 2, 0, 0], list(range(7))]
    away = torch.arange(-700, 701)
    for both in (True, False):
        how = {"num_buckets": 32, "max_distance": 128, "is_bidirectional": both}
        assert torch.equal(relative_buckets(away.to(place), **how).cpu(), relative_buckets(away, **how))
    slopes, places = torch.tensor(alibi_slopes(12), dtype=torch.float64), torch.arange(33)
    for dtype in DTYPES:
        found = alibi_bias(slopes.to(place), places.unsqueeze(0).to(place), places.to(place), dtype).cpu()
        assert torch.equal(found, alibi_bias(slopes, places.unsqueeze(0), places, dtype))
        assert torch.allclose(found[0, 3, 20, :21].double(), slopes[3] * (places[:21] - 20), rtol=2**-8)


N, H, V = 77, 24, 211


def loss_formula(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    picked = logits[torch.arange(len(targets)), targets]
    return ((logits.exp().sum(-1).log() - picked) * weights).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("chunk", [None, 20, 77], ids=["logits", "chunks", "one chunk"])
def test_losses_are_the_formula_with_padded_rows_left_out(
    chunk: int | None, dtype: torch.dtype, place: torch.device
) -> None:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, V, (N,), generator=generator)
    weights = (torch.rand(N, generator=generator) < 0.7).double()
    x, table, bias = (noise(i, *shape, dtype=dtype) for i, shape in ((6, (N, H)), (7, (256, H)), (8, (256,))))

    def ours(x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        sizes = {"vocab_size": V, "divisible_by": 128}
        aim, wide = targets.to(place), torch.promote_types(dtype, torch.float32)
        count = weights.to(wide).to(place)
        if chunk is not None:
            return linear_cross_entropy(x, table, aim, count, bias=bias, at_once=chunk, **sizes)
        logits = torch.nn.functional.linear(x, table, bias)
        return (vocab_parallel_cross_entropy(logits, aim, **sizes) * count).sum()

    def formula(x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return loss_formula((x @ table.t() + bias)[:, :V], targets, weights)

    compare(ours, formula, [x, table, bias], place, dtype)


def test_a_label_outside_the_vocabulary_is_told_or_makes_the_loss_no_number(place: torch.device) -> None:
    targets, weights = torch.tensor([1, 210, 211, 500]).to(place), torch.tensor([1.0, 1.0, 1.0, 0.0]).to(place)
    if place.type == "cpu":
        with pytest.raises(ValueError, match="got 211"):
            known_or_nan(weights, targets, V)
    else:
        assert known_or_nan(weights, targets, V).cpu().isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_the_gradient_norm_counts_every_number_and_clipping_brings_it_down(
    dtype: torch.dtype, place: torch.device, kind: str
) -> None:
    """Of large, small, strided and empty gradients; a naive sum of squares in fp32 would be off by 1e-4 and more."""
    in_fp32 = 1e-5 if kind == "sim" else 1e-6  # it adds up as the host's processor does: no tree, an AMD's is 2e-6 off
    shapes = ((LARGE + 1023,), (300, 7), (), (0, 4), (4 * LARGE,))
    wide = [noise(i, *shape, dtype=dtype) * 10.0 ** (i - 2) for i, shape in enumerate(shapes)]
    wide = [each.to(dtype).double() for each in wide]
    gradients = [each.to(place, dtype) for each in wide]
    gradients[1] = gradients[1].t().contiguous().t()
    norm = global_norm(gradients, [], place)
    wanted = math.sqrt(sum(float(each.square().sum()) for each in wide))
    assert norm.dtype == torch.float64 and norm.device.type == place.type
    assert norm.item() == pytest.approx(wanted, rel=1e-12 if dtype == torch.float64 else in_fp32)
    torch._foreach_mul_(gradients, clip_coefficient(norm.item(), 0.5))
    assert global_norm(gradients, [], place).item() == pytest.approx(0.5, rel=1e-5)
    gradients[2].fill_(math.inf)
    assert global_norm(gradients, [], place).item() == math.inf


def test_the_norm_of_numbers_too_large_for_fp16_sums_is_finite(place: torch.device) -> None:
    gradients = [torch.full((5000,), 200.0, dtype=torch.float16).to(place)]
    assert global_norm(gradients, [], place).item() == pytest.approx(200.0 * math.sqrt(5000), rel=1e-6)
