"""The root-mean-square norm against its formula, and which norms of queries and keys are cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.norms import layer_norm, rms_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.embedding_lookup import embedding_lookup
from megatron.mpu.groups import Group
from megatron.mpu.shard import is_partial, shard_of
from tests.helpers.model_samples import small_sizes
from tests.helpers.whole import random

H = 12


def formula(x, weight, epsilon):
    return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight


def with_gradients(function, dtype=torch.float64):
    x, weight = random(1, 5, 3, H).to(dtype).requires_grad_(), (1 + random(2, H)).to(dtype).requires_grad_()
    y = function(x, weight, 0.1)
    y.backward(random(3, 5, 3, H).to(dtype))
    return y.detach(), x.grad, weight.grad


def test_it_is_its_formula_and_so_are_its_gradients():
    for own, wanted in zip(with_gradients(rms_norm), with_gradients(formula), strict=True):
        assert (own - wanted).abs().max() <= 1e-14 * wanted.abs().max()


def test_it_is_torchs_function_of_the_same_name():
    theirs = with_gradients(lambda x, weight, epsilon: F.rms_norm(x, (H,), weight, epsilon))
    for own, wanted in zip(with_gradients(rms_norm), theirs, strict=True):
        assert (own - wanted).abs().max() <= 1e-14 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bits_are_summed_in_32(dtype):
    for own, wanted in zip(with_gradients(rms_norm, dtype), with_gradients(formula), strict=True):
        assert own.dtype == dtype
        assert (own - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_accumulates_16_bit_gradients_in_fp32(dtype, has_bias):
    """torch on a CPU accumulates them in 16 bits: after 4,000 tokens a bias gradient in bf16 is 87 % too small."""
    leaves = [random(1, 4000, H), 1 + random(2, H), random(3, H)][: 2 + has_bias]
    grad = random(4, 4000, H).abs()
    results = []
    for wanted in (dtype, torch.float64):
        given = [leaf.to(dtype).to(wanted).requires_grad_() for leaf in leaves]
        y = layer_norm(given[0], given[1], given[2] if has_bias else None, 1e-5)
        y.backward(grad.to(dtype).to(wanted))
        results.append([y.detach(), *(leaf.grad for leaf in given)])
    plain = F.layer_norm(*(leaf.to(dtype) for leaf in leaves[:1]), (H,), *(leaf.to(dtype) for leaf in leaves[1:]))
    assert torch.equal(results[0][0], plain)
    for own, expected in zip(*results, strict=True):
        assert own.dtype == dtype
        assert (own - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.slow
def test_compiled_16_bit_sums_are_taken_in_fp32():
    ids, table = torch.full((2000,), 3), torch.randn(7, H).bfloat16().requires_grad_()
    weight, bias = (torch.ones(H).bfloat16().requires_grad_() for _ in range(2))
    grad = random(4, 2000, H).abs().bfloat16()
    compiled = torch.compile(lambda x: (embedding_lookup(ids, table), layer_norm(x, weight, bias, 1e-5)))
    rows, normalized = compiled(random(1, 2000, H).bfloat16())
    torch.autograd.backward([rows, normalized], [grad, grad])
    for own in (bias.grad, table.grad[3]):
        assert (own / grad.double().sum(0) - 1).abs().max() <= torch.finfo(torch.bfloat16).eps


def test_a_row_of_zeros_is_zero_and_gives_finite_gradients():
    x = torch.zeros(2, H, requires_grad=True)
    y = rms_norm(x, torch.ones(H), 1e-6)
    y.sum().backward()
    assert y.count_nonzero() == 0 and x.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["head", "all"])
def test_a_heads_norm_is_whole_and_its_gradient_a_summand_that_of_all_heads_is_cut(kind: str) -> None:
    sizes = small_sizes(qk_norm=kind, num_query_groups=2)
    for place, is_cut in ((ParallelContext(Group((0, 1), 1)), True), (ParallelContext(), False)):
        held = dict(DecoderModel(sizes, place).layers[0].attention.named_parameters())
        norms = {name: held[name] for name in held if "_norm." in name}
        assert sorted(norms) == ["key_norm.bias", "key_norm.weight", "query_norm.bias", "query_norm.weight"]
        assert all(is_partial(each) == (is_cut and kind == "head") for each in norms.values())
        shards = {name: shard_of(each) for name, each in norms.items()}
        assert all(shard.is_partitioned == (kind == "all") for shard in shards.values())
        if kind == "all":
            assert (shards["query_norm.weight"].start, shards["key_norm.weight"].start) == (
                (8, 4) if is_cut else (0, 0)
            )
            assert shards["key_norm.weight"].global_shape == (8,)
