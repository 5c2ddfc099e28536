"""Quantized weights that the micro-batches of a step share: equal bits, one quantization, dropped for the update."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron.mpu import fp8, fp8_weights
from megatron.mpu.fp8 import BLOCKWISE, ROWWISE, use_fp8
from megatron.mpu.fp8_weights import sharing_quantized_weights
from megatron.mpu.groups import SINGLE
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.random import DropoutStreams, checkpoint
from megatron.ops import grouped
from megatron.ops.stacked_weights import share_storage
from tds.linear_function import linear
from tests.helpers.harness import run_ranks
from tests.helpers.whole import fill_shard, group_of_all_ranks

M, H, F = 6, 128, 256


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def micro_batches(weight: torch.Tensor, num: int = 3) -> list[torch.Tensor]:
    """Return output and input gradient of ``num`` products with ``weight``."""
    results = []
    for idx in range(num):
        x = random(M, H, seed=10 + idx).requires_grad_()
        y = linear(x, weight)
        y.backward(random(M, F, seed=20 + idx))
        assert x.grad is not None
        results += [y.detach(), x.grad]
    return results


def count_quantizations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the quantizations of tensors with the size of the weight [F, H]."""
    counts: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def count(x: torch.Tensor, *args: Any) -> Any:
            counts[name] += x.numel() == F * H
            return original(x, *args)

        return count

    for module, name in ((fp8, "quantize_rows"), (fp8, "quantize_columns"), (fp8, "quantize_blocks")):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counts


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [(ROWWISE, {"quantize_rows": 1, "quantize_columns": 1}), (BLOCKWISE, {"quantize_blocks": 1})],
)
def test_micro_batches_share_a_weight_and_change_no_bit(
    recipe: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(F, H, seed=1).requires_grad_()
    use_fp8(weight, recipe, SINGLE, None)
    plain = micro_batches(weight)
    counts = count_quantizations(monkeypatch)
    with sharing_quantized_weights():
        shared = micro_batches(weight)
        assert +counts == expected
        num_bytes = 2 * F * H + 4 * (F + H) if recipe == ROWWISE else 4 * F * H  # dequantized to fp32 on a CPU
        assert fp8_weights.num_bytes() == num_bytes
    assert fp8_weights.num_bytes() == 0
    assert all(map(torch.equal, shared, plain))


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE])
def test_products_after_an_update_have_the_new_weight(recipe: str) -> None:
    weight = random(F, H, seed=1).requires_grad_()
    use_fp8(weight, recipe, SINGLE, None)
    with sharing_quantized_weights():
        micro_batches(weight)
        fp8_weights.free()
        assert fp8_weights.num_bytes() == 0
        weight.data.copy_(random(F, H, seed=2))
        shared = micro_batches(weight)
    assert all(map(torch.equal, shared, micro_batches(weight)))


def test_nothing_is_saved_without_sharing() -> None:
    weight = random(F, H, seed=1).requires_grad_()
    use_fp8(weight, ROWWISE, SINGLE, None)
    with sharing_quantized_weights(), sharing_quantized_weights(is_enabled=False):
        micro_batches(weight)
        assert fp8_weights.num_bytes() == 0


def test_recomputation_reads_the_saved_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute and backward receive detached copies of the weight, which have its address."""
    layer: Any = ColumnParallelLinear(H, F, bias=False).bfloat16()
    fill_shard(layer.weight, random(F, H, seed=1))
    use_fp8(layer.weight, ROWWISE, SINGLE, 0)
    counts = count_quantizations(monkeypatch)
    with sharing_quantized_weights():
        for idx in range(2):
            x = random(M, 1, H, seed=10 + idx).requires_grad_()
            checkpoint(DropoutStreams(seed=0), layer, x).backward(random(M, 1, F, seed=20 + idx))
    assert +counts == {"quantize_rows": 1, "quantize_columns": 1}


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE])
@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("implementation", [grouped.LOOP, grouped.GROUPED])
def test_experts_share_weights_but_not_temporary_copies(
    implementation: str, is_stacked: bool, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stacked copy of experts in separate storages is freed after its product, so it must not be saved."""
    monkeypatch.setattr(grouped, "IMPLEMENTATION", implementation)
    weights = [torch.nn.Parameter(random(F, H, seed=idx)) for idx in range(3)]
    if is_stacked:
        share_storage(weights)
    for weight in weights:
        use_fp8(weight, recipe, SINGLE, None)

    def run() -> list[torch.Tensor]:
        results = []
        for counts in ([2, 0, 4], [1, 3, 2]):
            x = random(M, H, seed=3).requires_grad_()
            y = grouped.grouped_linear(x, weights, torch.tensor(counts))
            y.backward(random(M, F, seed=4))
            assert x.grad is not None
            results += [y.detach(), x.grad]
        return results

    plain = run()
    with sharing_quantized_weights():
        assert all(map(torch.equal, run(), plain))
        is_saved = is_stacked or implementation == grouped.LOOP
        num_bytes = 3 * (2 * F * H + 4 * (F + H) if recipe == ROWWISE else 4 * F * H)
        assert fp8_weights.num_bytes() == (num_bytes if is_saved else 0)


def run_sharded_layers(rank: int, size: int, is_enabled: bool) -> list[torch.Tensor]:
    """Return outputs and input gradients of a column-parallel and a row-parallel layer for three micro-batches."""
    group, results = group_of_all_ranks(rank, size), []
    for layer_class, partition_dim in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
        layer: Any = layer_class(H, F, bias=False, group=group).bfloat16()
        fill_shard(layer.weight, random(F, H, seed=1))
        use_fp8(layer.weight, ROWWISE, group, partition_dim)
        with sharing_quantized_weights(is_enabled):
            for idx in range(3):
                x, grad = random(M, 1, H, seed=10 + idx), random(M, 1, F, seed=20 + idx)
                x = (x if partition_dim == 0 else x.chunk(size, -1)[rank]).clone().requires_grad_()
                y = layer(x)
                y.backward(grad.chunk(size, -1)[rank] if partition_dim == 0 else grad)
                results += [y.detach(), x.grad]
    return results


def test_tensor_ranks_share_weights_and_change_no_bit() -> None:
    """Only the first micro-batch has the maxima of the weight in its message."""
    plain, shared = (run_ranks(2, run_sharded_layers, 2, is_enabled) for is_enabled in (False, True))
    for rank_plain, rank_shared in zip(plain, shared, strict=True):
        assert all(map(torch.equal, rank_shared, rank_plain))
