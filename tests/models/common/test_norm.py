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
from tests.helpers.model_samples import small_model_args
from tests.helpers.whole import random_tensor

H = 12


def formula(x, weight, epsilon):
    return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight


def run_with_gradients(function, dtype=torch.float64):
    x, weight = (
        random_tensor(1, 5, 3, H).to(dtype).requires_grad_(),
        (1 + random_tensor(2, H)).to(dtype).requires_grad_(),
    )
    y = function(x, weight, 0.1)
    y.backward(random_tensor(3, 5, 3, H).to(dtype))
    return y.detach(), x.grad, weight.grad


def test_rms_norm_and_gradients_match_formula():
    for actual, expected in zip(run_with_gradients(rms_norm), run_with_gradients(formula), strict=True):
        assert (actual - expected).abs().max() <= 1e-14 * expected.abs().max()


def test_rms_norm_matches_torch():
    torch_results = run_with_gradients(lambda x, weight, epsilon: F.rms_norm(x, (H,), weight, epsilon))
    for actual, expected in zip(run_with_gradients(rms_norm), torch_results, strict=True):
        assert (actual - expected).abs().max() <= 1e-14 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_rms_norm_accumulates_in_fp32(dtype):
    for actual, expected in zip(run_with_gradients(rms_norm, dtype), run_with_gradients(formula), strict=True):
        assert actual.dtype == dtype
        assert (actual - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_accumulates_16_bit_gradients_in_fp32(dtype, has_bias):
    """torch on a CPU accumulates them in 16 bits: after 4,000 tokens a bias gradient in bf16 is 87 % too small."""
    leaves = [random_tensor(1, 4000, H), 1 + random_tensor(2, H), random_tensor(3, H)][: 2 + has_bias]
    grad = random_tensor(4, 4000, H).abs()
    results = []
    for compute_dtype in (dtype, torch.float64):
        inputs = [leaf.to(dtype).to(compute_dtype).requires_grad_() for leaf in leaves]
        y = layer_norm(inputs[0], inputs[1], inputs[2] if has_bias else None, 1e-5)
        y.backward(grad.to(dtype).to(compute_dtype))
        results.append([y.detach(), *(leaf.grad for leaf in inputs)])
    reference = F.layer_norm(*(leaf.to(dtype) for leaf in leaves[:1]), (H,), *(leaf.to(dtype) for leaf in leaves[1:]))
    assert torch.equal(results[0][0], reference)
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == dtype
        assert (actual - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.slow
def test_compiled_16_bit_gradients_accumulate_in_fp32():
    ids, table = torch.full((2000,), 3), torch.randn(7, H).bfloat16().requires_grad_()
    weight, bias = (torch.ones(H).bfloat16().requires_grad_() for _ in range(2))
    grad = random_tensor(4, 2000, H).abs().bfloat16()
    compiled = torch.compile(lambda x: (embedding_lookup(ids, table), layer_norm(x, weight, bias, 1e-5)))
    rows, normalized = compiled(random_tensor(1, 2000, H).bfloat16())
    torch.autograd.backward([rows, normalized], [grad, grad])
    for actual in (bias.grad, table.grad[3]):
        assert (actual / grad.double().sum(0) - 1).abs().max() <= torch.finfo(torch.bfloat16).eps


def test_zero_row_gives_zero_output_and_finite_gradients():
    x = torch.zeros(2, H, requires_grad=True)
    y = rms_norm(x, torch.ones(H), 1e-6)
    y.sum().backward()
    assert y.count_nonzero() == 0 and x.grad.isfinite().all()


@pytest.mark.parametrize("qk_norm", ["head", "all"])
def test_head_norm_is_replicated_and_all_heads_norm_is_sharded(qk_norm: str) -> None:
    args = small_model_args(qk_norm=qk_norm, num_query_groups=2)
    for parallel, is_sharded in ((ParallelContext(Group((0, 1), 1)), True), (ParallelContext(), False)):
        parameters = dict(DecoderModel(args, parallel).layers[0].attention.named_parameters())
        norms = {name: parameters[name] for name in parameters if "_norm." in name}
        assert sorted(norms) == ["key_norm.bias", "key_norm.weight", "query_norm.bias", "query_norm.weight"]
        assert all(is_partial(parameter) == (is_sharded and qk_norm == "head") for parameter in norms.values())
        shards = {name: shard_of(parameter) for name, parameter in norms.items()}
        assert all(shard.is_partitioned == (qk_norm == "all") for shard in shards.values())
        if qk_norm == "all":
            assert (shards["query_norm.weight"].start, shards["key_norm.weight"].start) == (
                (8, 4) if is_sharded else (0, 0)
            )
            assert shards["key_norm.weight"].global_shape == (8,)
