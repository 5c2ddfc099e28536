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
from megatron.mpu.cross_entropy import known_or_nan, vocab_parallel_cross_entropy
from megatron.mpu.linear_cross_entropy import linear_cross_entropy
from tests.helpers.alive import Alive
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random, whole_world

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


def parts(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [7, 2, h], table [v, h], bias [v], targets and weights [7, 2]."""
    targets = torch.randint(0, case.vocab, SHAPE, generator=torch.Generator().manual_seed(5))
    weights = {
        "none": torch.zeros(SHAPE),
        "some": (torch.arange(N).view(SHAPE) % 3 > 0).float(),
        "weighed": torch.arange(N).view(SHAPE) / 4.0,
    }[case.mask]
    table = random(2, case.vocab, H) * 20.0  # logits far apart, so that a missing subtraction of the largest shows
    return random(1, *SHAPE, H), table, random(3, case.vocab), targets, weights


def loss(case: Case, group: Group, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum and the leaves x, table and bias of this rank."""
    x, table, bias, targets, weights = parts(case)
    rows, start, num_real = vocab_range(case.vocab, group, case.divisible_by)
    own_table, own_bias = (torch.full((rows, *one.shape[1:]), PADDING, dtype=torch.float64) for one in (table, bias))
    own_table[:num_real], own_bias[:num_real] = table[start : start + num_real], bias[start : start + num_real]
    leaves = [one.to(dtype).requires_grad_() for one in (x, own_table, own_bias)]
    total = linear_cross_entropy(
        copy_to_tensor_region(leaves[0], group), leaves[1], targets, weights,
        vocab_size=case.vocab, at_once=case.at_once, bias=leaves[2] if case.has_bias else None,
        divisible_by=case.divisible_by, group=group,
    )  # fmt: skip
    return total, leaves if case.has_bias else leaves[:2]


def of_rank(rank: int, size: int) -> dict[Case, Any]:
    group = whole_world(rank, size)
    results = {}
    for case in CASES:
        total, leaves = loss(case, group)
        (total * UPSTREAM).backward()
        with torch.no_grad():
            without, _ = loss(case, group)
        results[case] = (total.detach(), without, [leaf.grad for leaf in leaves])
    return results


@functools.cache
def seen(size: int) -> list[dict[Case, Any]]:
    return run_ranks(size, of_rank, size) if size > 1 else [of_rank(0, 1)]


def expected(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum and the gradients of x, table and bias of one process."""
    *values, targets, weights = parts(case)
    leaves = [one.requires_grad_() for one in values]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if case.has_bias else None)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    total = (losses * weights.flatten()).sum()
    (total * UPSTREAM).backward()
    return total.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.vocab}-{case.at_once}-{case.mask}")
def test_sum_and_gradients_equal_those_of_torch_however_the_tokens_and_words_are_cut(case: Case, size: int) -> None:
    total, (of_x, *of_words) = expected(case)
    for rank, results in enumerate(seen(size)):
        own, without, (own_of_x, *own_of_words) = results[case]
        assert own == without, "the same sum without gradients"
        assert (own - total).abs() <= 1e-13 * total.abs()
        assert (own_of_x - of_x).abs().max() <= 1e-13 * of_x.abs().max()
        _, start, num_real = vocab_range(case.vocab, Group(tuple(range(size)), rank), case.divisible_by)
        for observed, whole in zip(own_of_words, of_words, strict=True):
            wanted = whole[start : start + num_real]
            assert ((observed[:num_real] - wanted).abs() <= 1e-13 * whole.abs().max()).all()
            assert observed[num_real:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_numbers_of_16_bits_are_summed_up_in_32(dtype: torch.dtype) -> None:
    """With chunks of one token the table's gradient is a sum over 14 of them."""
    case = Case(64, 1, 1, has_bias=True)
    x, table, bias, targets, weights = parts(case)
    leaves = [(one / 20).to(dtype).requires_grad_() for one in (x * 20, table, bias)]
    wanted = [one.detach().double().requires_grad_() for one in leaves]
    logits = F.linear(*wanted).flatten(0, 1)
    target = (F.cross_entropy(logits, targets.flatten(), reduction="none") * weights.flatten()).sum()
    total = linear_cross_entropy(leaves[0], leaves[1], targets, weights, vocab_size=64, at_once=1, bias=leaves[2])
    assert total.dtype == torch.float32
    (total * 1024).backward()
    target.backward()
    step = torch.finfo(dtype).eps
    assert abs(total - target) <= step * 4 * target
    for one, two in zip(leaves, wanted, strict=True):
        assert one.grad is not None and two.grad is not None and one.grad.dtype == dtype
        assert (one.grad.double() / 1024 - two.grad).abs().max() <= 2.5 * step * two.grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("number", [0, 5])
def test_no_gradient_holds_what_its_memory_held(number: int, dtype: torch.dtype) -> None:
    table = random(1, 8, 3).to(dtype).requires_grad_()
    x, targets = random(2, number, 3).to(dtype).requires_grad_(), torch.arange(number)
    torch.use_deterministic_algorithms(True)  # memory that is not set holds NaN
    try:
        linear_cross_entropy(x, table, targets, torch.ones(number), vocab_size=6, at_once=2, divisible_by=8).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert table.grad is not None and x.grad is not None
    assert table.grad.isfinite().all() and x.grad.isfinite().all()
    assert table.grad[6:].count_nonzero() == 0 and table.grad[:6].count_nonzero() == (18 if number else 0)


def test_many_small_parts_of_a_gradient_add_up_in_16_bits() -> None:
    """In bf16 a sum of ones stops at 256."""
    number, table = 320, torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    x, targets = torch.ones(number, 1, dtype=torch.bfloat16), torch.zeros(number, dtype=torch.long)
    linear_cross_entropy(x, table, targets, torch.full((number,), 2.0), vocab_size=2, at_once=1).backward()
    assert table.grad is not None and table.grad.flatten().tolist() == [-number, number]


def test_in_fp16_neither_small_probabilities_nor_a_large_loss_scale_are_lost() -> None:
    """A probability of 1 / 30476 is 550.5 times the smallest number of fp16."""
    vocab = 30476
    x, table = torch.ones(2, 1), torch.zeros(vocab, 1)
    leaves = [one.half().requires_grad_() for one in (x, table)]
    total = linear_cross_entropy(leaves[0], leaves[1], torch.tensor([0, 1]), torch.ones(2), vocab_size=vocab, at_once=1)
    (total * 2.0**14).backward()
    gradient = leaves[1].grad
    assert gradient is not None and gradient.isfinite().all()
    wanted = torch.full((vocab,), 2.0 / vocab) * 2.0**14
    wanted[:2] -= 2.0**14
    assert ((gradient[:, 0].float() - wanted).abs() <= 6e-4 * wanted.abs()).all()


def test_in_fp16_a_chunk_of_one_label_and_large_hidden_states_does_not_overflow() -> None:
    """The sum over the tokens, 4096 x 3, is scaled by 8: more than fp16 holds, whatever the loss scale."""
    number, vocab = 4096, 3
    x, table = (one.half().requires_grad_() for one in (torch.full((number, 2), 3.0), torch.zeros(vocab, 2)))
    with torch.no_grad():
        x[:, 1] = torch.linspace(-1.0, 1.0, number) / 64  # small beside the largest, and of both signs
    targets, weights = torch.zeros(number, dtype=torch.long), torch.full((number,), 1.5)
    linear_cross_entropy(x, table, targets, weights, vocab_size=vocab, at_once=number).mul(2.0**-4).backward()
    gradient, factor = table.grad, torch.tensor([-2.0, 1.0, 1.0]).unsqueeze(-1) * 1.5 / 3 / 16
    wanted = factor * x.detach().double().sum(dim=0)
    assert gradient is not None and gradient.isfinite().all()
    assert ((gradient.double() - wanted).abs() <= 1e-3 * wanted.abs() + 2e-6 * number).all()


def outside(rank: int, size: int) -> None:
    group = whole_world(rank, size)
    sizes: Any = SimpleNamespace(z_loss=0.0, vocab_size=7, make_vocab_size_divisible_by=1)
    for at_once, label in ((4, -100), (4, 7), (0, 7), (0, -1)):
        x, table = torch.ones(3, 1, 2), torch.zeros(vocab_range(7, group, 1)[0], 2)
        lazy = LazyLogits(x, table, None, at_once)
        labels, mask = torch.tensor([[1, 2, label]]), torch.tensor([[1.0, 1.0, 0.5]])
        with pytest.raises(ValueError, match=f"must be 0 to 6, got {label} at the first of 1 tokens.* loss_mask to 0"):
            model_loss(lazy if at_once else materialize_logits(lazy), labels, mask, sizes, ParallelContext(group))
        if at_once or size > 1:
            mask[0, 2] = 0.0
            logits = lazy if at_once else materialize_logits(lazy)
            total, count = model_loss(logits, labels, mask, sizes, ParallelContext(group))
            assert count == 2.0 and abs(total - 2 * math.log(7)) <= 1e-6


@pytest.mark.parametrize("size", [1, 2])
def test_a_label_outside_the_vocabulary_raises_where_its_token_counts(size: int) -> None:
    run_ranks(size, outside, size) if size > 1 else outside(0, 1)


def test_off_the_cpu_such_a_label_makes_no_number_and_waits_for_nothing() -> None:
    """A tensor on the device "meta" cannot be read by the host at all."""
    targets, weights = torch.tensor([0, 7, 7, -1]), torch.tensor([1.0, 1.0, 0.0, 0.5])
    assert known_or_nan(weights.to("meta"), targets.to("meta"), 7).is_meta
    found = known_or_nan(weights, targets, 7, is_on_host=False)
    assert found.isnan().tolist() == [False, True, False, True] and found[2] == 0.0


def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same() -> None:
    case = Case(64, 1, 5, has_bias=True)
    _, (of_x, of_table, of_bias) = expected(case)
    x, table, bias, targets, weights = parts(case)
    for number, wanted in enumerate((of_x, of_table, of_bias)):
        leaves = [one.detach().requires_grad_(index == number) for index, one in enumerate((x, table, bias))]
        total = linear_cross_entropy(leaves[0], leaves[1], targets, weights, vocab_size=64, at_once=5, bias=leaves[2])
        (total * UPSTREAM).backward()
        assert [leaf.grad is not None for leaf in leaves] == [index == number for index in range(3)]
        gradient = leaves[number].grad
        assert gradient is not None and (gradient - wanted).abs().max() <= 1e-13 * wanted.abs().max()


def test_a_second_backward_raises() -> None:
    total, _ = loss(CASES[0], Group((0,), 0))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by the first backward"):
        total.backward()


def test_no_tokens_give_a_sum_and_gradients_of_zero() -> None:
    leaves = [torch.ones(0, 2, H).requires_grad_(), torch.ones(9, H).requires_grad_()]
    total = linear_cross_entropy(
        leaves[0], leaves[1], torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2), vocab_size=9, at_once=4
    )
    total.backward()
    assert total == 0.0 and leaves[1].grad is not None and not leaves[1].grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_the_peak_is_a_chunk_and_the_gradients_instead_of_logits_and_their_gradient(dtype: torch.dtype) -> None:
    n, h, vocab, at_once = 512, 16, 4096, 32
    x, table = (torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((n, h), (vocab, h)))
    targets, weights = torch.zeros(n, dtype=torch.long), torch.ones(n)

    def peak_of(of: Callable[[], torch.Tensor]) -> int:
        x.grad = table.grad = None
        with Alive("cpu") as alive:
            of().backward()
        return alive.peak

    whole = peak_of(lambda: vocab_parallel_cross_entropy(F.linear(x, table), targets, vocab_size=vocab).sum())
    chunked = peak_of(lambda: linear_cross_entropy(x, table, targets, weights, vocab_size=vocab, at_once=at_once))
    logits = n * vocab * 4  # in fp32
    gradients = (n + vocab) * h * (4 + dtype.itemsize)
    chunk = at_once * vocab * (4 + 2 * dtype.itemsize % 8)
    assert whole >= logits
    assert chunked <= chunk + gradients + 64 * n, "a few numbers for each token beside a chunk and the gradients"
    assert whole - chunked >= 0.8 * logits


def as_off_the_cpu(columns: int, place: torch.device) -> int:
    return -(-columns // 8) * 8


def aligned_of_rank(rank: int, size: int) -> dict[Case, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.mpu.linear_cross_entropy.aligned", as_off_the_cpu)
        return of_rank(rank, size)


@functools.cache
def seen_aligned(size: int) -> list[dict[Case, Any]]:
    return run_ranks(size, aligned_of_rank, size) if size > 1 else [aligned_of_rank(0, 1)]


@pytest.mark.parametrize("size", [1, 2])
def test_columns_that_align_the_products_change_no_sum_and_no_gradient(size: int) -> None:
    """Padded rows of the table, which hold 50 here, are columns beside the logits then."""
    for plain, padded in zip(seen(size), seen_aligned(size), strict=True):
        for case in CASES:
            (total, without, gradients), (own, own_without, own_gradients) = plain[case], padded[case]
            assert (own - total).abs() <= 1e-13 * total.abs() and own == own_without and without == total
            for one, two in zip(own_gradients, gradients, strict=True):
                assert one.shape == two.shape and (one - two).abs().max() <= 1e-13 * max(two.abs().max(), 1e-3)


class Products(TorchDispatchMode):
    """Notes of each matrix product whether the rows of its factors and of what it writes begin at 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(("aten.mm", "aten.addmm")):
            matrices = [one for one in (*args, made) if isinstance(one, torch.Tensor) and one.dim() == 2]
            strides = [max(one.stride()) * one.itemsize for one in matrices]
            sizes = [side * matrices[0].itemsize for one in matrices for side in one.shape]
            self.seen.append((name, all(bytes_apart % 16 == 0 for bytes_apart in strides + sizes)))
        return made


@pytest.mark.parametrize("vocab", [50257, 25129, 32000, 50260])
@pytest.mark.parametrize("at_once", [0, 48])
def test_off_the_cpu_every_product_of_the_head_is_aligned_whatever_the_vocabulary(vocab: int, at_once: int) -> None:
    """On the device "meta", which has shapes alone."""
    x = torch.empty(64, 2, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    table, bias = (torch.empty(*s, dtype=x.dtype, device="meta", requires_grad=True) for s in ((vocab, 32), (vocab,)))
    labels, mask = torch.zeros(2, 64, dtype=torch.long, device="meta"), torch.ones(2, 64, device="meta")
    sizes: Any = SimpleNamespace(z_loss=0.0, vocab_size=vocab, make_vocab_size_divisible_by=1)
    lazy = LazyLogits(x, table, bias, at_once)
    with Products() as products:
        total, _ = model_loss(lazy if at_once else materialize_logits(lazy), labels, mask, sizes, ParallelContext())
        total.backward()
    assert len(products.seen) >= 3 and all(is_aligned for _, is_aligned in products.seen), products.seen
    assert table.grad is not None and table.grad.shape == table.shape


def test_where_torch_can_16_bit_products_are_written_in_32_and_logits_keep_all_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch has that product on CUDA alone: here a stand-in has its name."""
    case = Case(101, 1, 5, has_bias=True)
    x, table, bias, targets, weights = parts(case)
    given = [one.bfloat16() for one in (x, table / 20, bias)]
    wanted = F.cross_entropy(
        F.linear(*(one.double() for one in given)).flatten(0, 1), targets.flatten(), reduction="none"
    )
    monkeypatch.setattr("megatron.mpu.linear_cross_entropy.writes_wide", lambda x: True)
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mm.dtype_out", lambda a, b, dtype, *, out: out.copy_(a.double() @ b.double()), "CPU")
        total = linear_cross_entropy(given[0], given[1], targets, weights, vocab_size=101, at_once=5, bias=given[2])
    finally:
        library._destroy()
    assert abs(total - (wanted * weights.flatten()).sum()) <= 1e-6 * total
