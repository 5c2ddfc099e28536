"""The loss in chunks with the head's product, against torch's linear layer and cross-entropy of one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.models.common.language_model import LazyLogits, materialize_logits, model_loss
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu import Group, copy_to_tensor_region, vocab_range
from megatron.mpu.cross_entropy import validate_targets, vocab_parallel_cross_entropy
from megatron.mpu.linear_cross_entropy import linear_cross_entropy
from tests.helpers.alive import LiveMemoryTracker
from tests.helpers.harness import run_ranks
from tests.helpers.whole import group_of_all_ranks, random_tensor

H, SHAPE, N = 4, (7, 2), 14
UPSTREAM = 3.0
PADDING = 50.0  # in padded rows: were they in the softmax, they would take all probability


class Case(NamedTuple):
    """Of 5 words and 3, rank 3 of 4 holds none; of 14 tokens in chunks of 5, the last has 4."""

    vocab: int
    divisible_by: int
    at_once: int
    has_bias: bool = False
    mask: str = "some"


CASES = (
    Case(101, 1, 5),
    Case(101, 8, 14, has_bias=True),
    Case(5, 1, 1, has_bias=True),
    Case(3, 1, 20),
    Case(64, 1, 5, mask="none"),
    Case(64, 1, 4, mask="weighed"),
)


def make_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [7, 2, h], table [v, h], bias [v], targets and weights [7, 2]."""
    targets = torch.randint(0, case.vocab, SHAPE, generator=torch.Generator().manual_seed(5))
    weights = {
        "none": torch.zeros(SHAPE),
        "some": (torch.arange(N).view(SHAPE) % 3 > 0).float(),
        "weighed": torch.arange(N).view(SHAPE) / 4.0,
    }[case.mask]
    table = (
        random_tensor(2, case.vocab, H) * 20.0
    )  # logits far apart, so that a missing subtraction of the largest shows
    return random_tensor(1, *SHAPE, H), table, random_tensor(3, case.vocab), targets, weights


def run_loss(case: Case, group: Group, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum and the leaves x, table and bias of this rank."""
    x, table, bias, targets, weights = make_inputs(case)
    rows, start, num_real = vocab_range(case.vocab, group, case.divisible_by)
    local_table, local_bias = (
        torch.full((rows, *tensor.shape[1:]), PADDING, dtype=torch.float64) for tensor in (table, bias)
    )
    local_table[:num_real], local_bias[:num_real] = table[start : start + num_real], bias[start : start + num_real]
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, local_table, local_bias)]
    total = linear_cross_entropy(
        copy_to_tensor_region(leaves[0], group), leaves[1], targets, weights,
        vocab_size=case.vocab, chunk_tokens=case.at_once, bias=leaves[2] if case.has_bias else None,
        divisible_by=case.divisible_by, group=group,
    )  # fmt: skip
    return total, leaves if case.has_bias else leaves[:2]


def run_rank(rank: int, size: int) -> dict[Case, Any]:
    group = group_of_all_ranks(rank, size)
    results = {}
    for case in CASES:
        total, leaves = run_loss(case, group)
        (total * UPSTREAM).backward()
        with torch.no_grad():
            total_without_grad, _ = run_loss(case, group)
        results[case] = (total.detach(), total_without_grad, [leaf.grad for leaf in leaves])
    return results


@functools.cache
def rank_results(size: int) -> list[dict[Case, Any]]:
    return run_ranks(size, run_rank, size) if size > 1 else [run_rank(0, 1)]


def run_reference(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum and the gradients of x, table and bias of one process."""
    *values, targets, weights = make_inputs(case)
    leaves = [tensor.requires_grad_() for tensor in values]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if case.has_bias else None)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    total = (losses * weights.flatten()).sum()
    (total * UPSTREAM).backward()
    return total.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.vocab}-{case.at_once}-{case.mask}")
def test_loss_and_gradients_match_torch_for_any_sharding(case: Case, size: int) -> None:
    total, (x_grad, *word_grads) = run_reference(case)
    for rank, results in enumerate(rank_results(size)):
        actual, total_without_grad, (actual_x_grad, *actual_word_grads) = results[case]
        assert actual == total_without_grad, "the same sum without gradients"
        assert (actual - total).abs() <= 1e-13 * total.abs()
        assert (actual_x_grad - x_grad).abs().max() <= 1e-13 * x_grad.abs().max()
        _, start, num_real = vocab_range(case.vocab, Group(tuple(range(size)), rank), case.divisible_by)
        for observed, full_grad in zip(actual_word_grads, word_grads, strict=True):
            expected_grad = full_grad[start : start + num_real]
            assert ((observed[:num_real] - expected_grad).abs() <= 1e-13 * full_grad.abs().max()).all()
            assert observed[num_real:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_16_bit_gradients_accumulate_in_fp32(dtype: torch.dtype) -> None:
    """With chunks of one token the table's gradient is a sum over 14 of them."""
    case = Case(64, 1, 1, has_bias=True)
    x, table, bias, targets, weights = make_inputs(case)
    leaves = [(leaf / 20).to(dtype).requires_grad_() for leaf in (x * 20, table, bias)]
    references = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = F.linear(*references).flatten(0, 1)
    reference_total = (F.cross_entropy(logits, targets.flatten(), reduction="none") * weights.flatten()).sum()
    total = linear_cross_entropy(leaves[0], leaves[1], targets, weights, vocab_size=64, chunk_tokens=1, bias=leaves[2])
    assert total.dtype == torch.float32
    (total * 1024).backward()
    reference_total.backward()
    eps = torch.finfo(dtype).eps
    assert abs(total - reference_total) <= eps * 4 * reference_total
    for leaf, reference in zip(leaves, references, strict=True):
        assert leaf.grad is not None and reference.grad is not None and leaf.grad.dtype == dtype
        assert (leaf.grad.double() / 1024 - reference.grad).abs().max() <= 2.5 * eps * reference.grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_gradients_contain_no_uninitialized_memory(num_tokens: int, dtype: torch.dtype) -> None:
    table = random_tensor(1, 8, 3).to(dtype).requires_grad_()
    x, targets = random_tensor(2, num_tokens, 3).to(dtype).requires_grad_(), torch.arange(num_tokens)
    torch.use_deterministic_algorithms(True)  # memory that is not set holds NaN
    try:
        linear_cross_entropy(
            x, table, targets, torch.ones(num_tokens), vocab_size=6, chunk_tokens=2, divisible_by=8
        ).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert table.grad is not None and x.grad is not None
    assert table.grad.isfinite().all() and x.grad.isfinite().all()
    assert table.grad[6:].count_nonzero() == 0 and table.grad[:6].count_nonzero() == (18 if num_tokens else 0)


def test_many_small_bf16_contributions_accumulate() -> None:
    """In bf16 a sum of ones stops at 256."""
    num_tokens, table = 320, torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    x, targets = torch.ones(num_tokens, 1, dtype=torch.bfloat16), torch.zeros(num_tokens, dtype=torch.long)
    linear_cross_entropy(x, table, targets, torch.full((num_tokens,), 2.0), vocab_size=2, chunk_tokens=1).backward()
    assert table.grad is not None and table.grad.flatten().tolist() == [-num_tokens, num_tokens]


def test_fp16_supports_small_probabilities_and_large_loss_scale() -> None:
    """A probability of 1 / 30476 is 550.5 times the smallest number of fp16."""
    vocab = 30476
    x, table = torch.ones(2, 1), torch.zeros(vocab, 1)
    leaves = [tensor.half().requires_grad_() for tensor in (x, table)]
    total = linear_cross_entropy(
        leaves[0], leaves[1], torch.tensor([0, 1]), torch.ones(2), vocab_size=vocab, chunk_tokens=1
    )
    (total * 2.0**14).backward()
    gradient = leaves[1].grad
    assert gradient is not None and gradient.isfinite().all()
    expected_grad = torch.full((vocab,), 2.0 / vocab) * 2.0**14
    expected_grad[:2] -= 2.0**14
    assert ((gradient[:, 0].float() - expected_grad).abs() <= 6e-4 * expected_grad.abs()).all()


def test_fp16_chunk_of_one_label_does_not_overflow() -> None:
    """The sum over the tokens, 4096 x 3, is scaled by 8: more than fp16 holds, whatever the loss scale."""
    num_tokens, vocab = 4096, 3
    x, table = (tensor.half().requires_grad_() for tensor in (torch.full((num_tokens, 2), 3.0), torch.zeros(vocab, 2)))
    with torch.no_grad():
        x[:, 1] = torch.linspace(-1.0, 1.0, num_tokens) / 64  # small beside the largest, and of both signs
    targets, weights = torch.zeros(num_tokens, dtype=torch.long), torch.full((num_tokens,), 1.5)
    linear_cross_entropy(x, table, targets, weights, vocab_size=vocab, chunk_tokens=num_tokens).mul(2.0**-4).backward()
    gradient, factor = table.grad, torch.tensor([-2.0, 1.0, 1.0]).unsqueeze(-1) * 1.5 / 3 / 16
    expected_grad = factor * x.detach().double().sum(dim=0)
    assert gradient is not None and gradient.isfinite().all()
    assert ((gradient.double() - expected_grad).abs() <= 1e-3 * expected_grad.abs() + 2e-6 * num_tokens).all()


def check_labels_outside_vocabulary(rank: int, size: int) -> None:
    group = group_of_all_ranks(rank, size)
    args: Any = SimpleNamespace(z_loss=0.0, vocab_size=7, make_vocab_size_divisible_by=1)
    for at_once, label in ((4, -100), (4, 7), (0, 7), (0, -1)):
        x, table = torch.ones(3, 1, 2), torch.zeros(vocab_range(7, group, 1)[0], 2)
        lazy = LazyLogits(x, table, None, at_once)
        labels, mask = torch.tensor([[1, 2, label]]), torch.tensor([[1.0, 1.0, 0.5]])
        with pytest.raises(
            ValueError, match=f"must be between 0 and 6, got {label} at the first of 1 invalid tokens.* loss_mask to 0"
        ):
            model_loss(lazy if at_once else materialize_logits(lazy), labels, mask, args, ParallelContext(group))
        if at_once or size > 1:
            mask[0, 2] = 0.0
            logits = lazy if at_once else materialize_logits(lazy)
            total, count = model_loss(logits, labels, mask, args, ParallelContext(group))
            assert count == 2.0 and abs(total - 2 * math.log(7)) <= 1e-6


@pytest.mark.parametrize("size", [1, 2])
def test_label_outside_vocabulary_raises_if_counted(size: int) -> None:
    run_ranks(size, check_labels_outside_vocabulary, size) if size > 1 else check_labels_outside_vocabulary(0, 1)


def test_invalid_label_on_device_gives_nan_without_sync() -> None:
    """A tensor on the device "meta" cannot be read by the host at all."""
    targets, weights = torch.tensor([0, 7, 7, -1]), torch.tensor([1.0, 1.0, 0.0, 0.5])
    assert validate_targets(weights.to("meta"), targets.to("meta"), 7).is_meta
    checked = validate_targets(weights, targets, 7, is_on_host=False)
    assert checked.isnan().tolist() == [False, True, False, True] and checked[2] == 0.0


def test_frozen_inputs_get_no_gradient() -> None:
    case = Case(64, 1, 5, has_bias=True)
    _, (x_grad, table_grad, bias_grad) = run_reference(case)
    x, table, bias, targets, weights = make_inputs(case)
    for trained_idx, expected_grad in enumerate((x_grad, table_grad, bias_grad)):
        leaves = [tensor.detach().requires_grad_(idx == trained_idx) for idx, tensor in enumerate((x, table, bias))]
        total = linear_cross_entropy(
            leaves[0], leaves[1], targets, weights, vocab_size=64, chunk_tokens=5, bias=leaves[2]
        )
        (total * UPSTREAM).backward()
        assert [leaf.grad is not None for leaf in leaves] == [idx == trained_idx for idx in range(3)]
        gradient = leaves[trained_idx].grad
        assert gradient is not None and (gradient - expected_grad).abs().max() <= 1e-13 * expected_grad.abs().max()


def test_second_backward_raises() -> None:
    total, _ = run_loss(CASES[0], Group((0,), 0))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten by the first backward.*--loss-chunk-tokens 0"):
        total.backward()


def test_no_tokens_give_zero_loss_and_gradients() -> None:
    leaves = [torch.ones(0, 2, H).requires_grad_(), torch.ones(9, H).requires_grad_()]
    total = linear_cross_entropy(
        leaves[0], leaves[1], torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2), vocab_size=9, chunk_tokens=4
    )
    total.backward()
    assert total == 0.0 and leaves[1].grad is not None and not leaves[1].grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_peak_memory_is_chunk_plus_gradients(dtype: torch.dtype) -> None:
    n, h, vocab, at_once = 512, 16, 4096, 32
    x, table = (torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((n, h), (vocab, h)))
    targets, weights = torch.zeros(n, dtype=torch.long), torch.ones(n)

    def measure_peak(make_loss: Callable[[], torch.Tensor]) -> int:
        x.grad = table.grad = None
        with LiveMemoryTracker("cpu") as alive:
            make_loss().backward()
        return alive.peak_bytes

    full_peak = measure_peak(lambda: vocab_parallel_cross_entropy(F.linear(x, table), targets, vocab_size=vocab).sum())
    chunked_peak = measure_peak(
        lambda: linear_cross_entropy(x, table, targets, weights, vocab_size=vocab, chunk_tokens=at_once)
    )
    logit_bytes = n * vocab * 4  # in fp32
    gradient_bytes = (n + vocab) * h * (4 + dtype.itemsize)
    chunk_bytes = at_once * vocab * (4 + 2 * dtype.itemsize % 8)
    assert full_peak >= logit_bytes
    assert chunked_peak <= chunk_bytes + gradient_bytes + 64 * n, (
        "a few numbers for each token beside a chunk and the gradients"
    )
    assert full_peak - chunked_peak >= 0.8 * logit_bytes


def aligned_columns(columns: int, device: torch.device) -> int:
    return -(-columns // 8) * 8


def run_rank_aligned(rank: int, size: int) -> dict[Case, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.mpu.linear_cross_entropy.aligned_width", aligned_columns)
        return run_rank(rank, size)


@functools.cache
def aligned_rank_results(size: int) -> list[dict[Case, Any]]:
    return run_ranks(size, run_rank_aligned, size) if size > 1 else [run_rank_aligned(0, 1)]


@pytest.mark.parametrize("size", [1, 2])
def test_alignment_columns_do_not_change_results(size: int) -> None:
    """Padded rows of the table, which hold 50 here, are columns beside the logits then."""
    for plain, padded in zip(rank_results(size), aligned_rank_results(size), strict=True):
        for case in CASES:
            (total, total_without_grad, gradients), (actual, actual_without_grad, actual_gradients) = (
                plain[case],
                padded[case],
            )
            assert (
                (actual - total).abs() <= 1e-13 * total.abs()
                and actual == actual_without_grad
                and total_without_grad == total
            )
            for actual_grad, expected_grad in zip(actual_gradients, gradients, strict=True):
                assert actual_grad.shape == expected_grad.shape and (
                    actual_grad - expected_grad
                ).abs().max() <= 1e-13 * max(expected_grad.abs().max(), 1e-3)


class RecordProducts(TorchDispatchMode):
    """Notes of each matrix product whether the rows of its factors and of what it writes begin at 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(("aten.mm", "aten.addmm")):
            matrices = [matrix for matrix in (*args, result) if isinstance(matrix, torch.Tensor) and matrix.dim() == 2]
            stride_bytes = [max(matrix.stride()) * matrix.itemsize for matrix in matrices]
            side_bytes = [side * matrices[0].itemsize for matrix in matrices for side in matrix.shape]
            self.products.append((name, all(bytes_apart % 16 == 0 for bytes_apart in stride_bytes + side_bytes)))
        return result


@pytest.mark.parametrize("vocab", [50257, 25129, 32000, 50260])
@pytest.mark.parametrize("at_once", [0, 48])
def test_head_products_are_aligned_off_cpu(vocab: int, at_once: int) -> None:
    """On the device "meta", which has shapes alone."""
    x = torch.empty(64, 2, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    table, bias = (torch.empty(*s, dtype=x.dtype, device="meta", requires_grad=True) for s in ((vocab, 32), (vocab,)))
    labels, mask = torch.zeros(2, 64, dtype=torch.long, device="meta"), torch.ones(2, 64, device="meta")
    args: Any = SimpleNamespace(z_loss=0.0, vocab_size=vocab, make_vocab_size_divisible_by=1)
    lazy = LazyLogits(x, table, bias, at_once)
    with RecordProducts() as products:
        total, _ = model_loss(lazy if at_once else materialize_logits(lazy), labels, mask, args, ParallelContext())
        total.backward()
    assert len(products.products) >= 3 and all(is_aligned for _, is_aligned in products.products), products.products
    assert table.grad is not None and table.grad.shape == table.shape


def test_16_bit_products_write_fp32_logits_if_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch has that product on CUDA alone: here a stand-in has its name."""
    case = Case(101, 1, 5, has_bias=True)
    x, table, bias, targets, weights = make_inputs(case)
    tensors = [tensor.bfloat16() for tensor in (x, table / 20, bias)]
    expected_losses = F.cross_entropy(
        F.linear(*(tensor.double() for tensor in tensors)).flatten(0, 1), targets.flatten(), reduction="none"
    )
    monkeypatch.setattr("megatron.mpu.linear_cross_entropy.supports_fp32_output", lambda x: True)
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mm.dtype_out", lambda a, b, dtype, *, out: out.copy_(a.double() @ b.double()), "CPU")
        total = linear_cross_entropy(
            tensors[0], tensors[1], targets, weights, vocab_size=101, chunk_tokens=5, bias=tensors[2]
        )
    finally:
        library._destroy()
    assert abs(total - (expected_losses * weights.flatten()).sum()) <= 1e-6 * total
