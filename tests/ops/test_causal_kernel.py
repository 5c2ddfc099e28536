"""Causal attention in fp32 on a CPU, against its formula in fp64, and where it is taken and where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppCodeCache
from torch.utils.flop_counter import FlopCounterMode

from megatron.ops import causal_attention
from megatron.ops.causal_attention import causal_self_attention, heads_of
from tests.helpers.whole import random
from tests.ops.causal import formula, outcome, packed_of

pytestmark = pytest.mark.skipif(
    not causal_attention.is_built(),
    reason="needs a C++ compiler and a processor that the kernel is for: AVX2 or AVX-512",
)
KERNEL = torch.ops.megatron_tds.causal_kernel
SHAPES = {
    "one position": (1, 2, 1, 16),
    "less than a block, no whole vector": (11, 3, 5, 6),
    "whole blocks": (128, 1, 3, 32),
    "a rest": (201, 2, 3, 48),
}
BOUND = 4 * torch.finfo(torch.float32).eps
NUM_TURNS = 20


def by_kernel(packed: torch.Tensor) -> torch.Tensor:
    """Return the output [b, a, s, d], as ``causal_self_attention`` does."""
    return KERNEL(packed)[0].permute(1, 2, 0, 3)


def by_blocks(packed: torch.Tensor) -> torch.Tensor:
    """Return the same by torch's operators."""
    return causal_attention._forward(packed).permute(1, 2, 0, 3)


def operators(packed: torch.Tensor) -> tuple[Any, list[str]]:
    """Return the attention in a graph of its own, and the names of what the graph calls once it has run."""
    torch._dynamo.reset()
    names: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(causal_self_attention, backend=keep, dynamic=False, fullgraph=True)
    compiled(packed)
    return compiled, names


def with_threads(number: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` of so many threads of torch's.

    They belong to a thread of Python that ends. Those of this one would be missing in processes that other tests fork,
    which wait for them for ever.
    """

    def work() -> Any:
        torch.set_num_threads(number)
        return function(*args)

    with ThreadPoolExecutor(1) as executor:
        try:
            return executor.submit(work).result()
        finally:
            executor.submit(torch.set_num_threads, 1).result()  # MKL has one number for all


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_the_formula_and_so_does_the_gradient(name: str) -> None:
    packed = packed_of(*SHAPES[name]).float()
    for own, wanted in zip(outcome(by_kernel, packed), outcome(formula, packed.double()), strict=True):
        assert own.dtype == torch.float32
        assert (own - wanted).norm() <= BOUND * wanted.norm()
        assert (own - wanted).abs().max() <= 2 * BOUND * wanted.abs().max()


def test_compiled_layers_take_it_in_fp32_and_no_others_do() -> None:
    packed = packed_of(*SHAPES["a rest"]).float()
    compiled, names = operators(packed)
    assert any("megatron_tds.causal_kernel" in name for name in names), names
    assert all(torch.equal(*pair) for pair in zip(outcome(compiled, packed), outcome(by_kernel, packed), strict=True))
    _, names = operators(packed.double())
    assert any("megatron_tds.causal_self_attention" in name for name in names)
    assert not any("causal_kernel" in name for name in names)


def test_layers_that_are_not_compiled_take_it_too() -> None:
    packed = packed_of(*SHAPES["a rest"]).float()
    for given, operator in ((packed, KERNEL), (packed.double(), torch.ops.megatron_tds.causal_self_attention)):
        with FlopCounterMode(display=False) as counter:
            causal_self_attention(given)
        assert list(counter.get_flop_counts()["Global"]) == [operator]


def test_what_is_dropped_or_not_of_a_cpu_goes_elsewhere() -> None:
    packed = packed_of(8, 1, 2, 16).float()
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda x: causal_self_attention(x, dropout=0.5), backend=keep)(packed)
    torch.compile(causal_self_attention, backend=keep)(packed.to("meta"))
    assert len(graphs) == 2 and not any("causal_kernel" in code for code in graphs)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    packed = packed_of(*SHAPES["a rest"]).float()
    one = with_threads(1, outcome, by_kernel, packed)
    for _ in range(NUM_TURNS):  # on a busy machine the threads need not meet in each
        assert all(torch.equal(*pair) for pair in zip(one, with_threads(3, outcome, by_kernel, packed), strict=True))


def test_heads_and_samples_know_nothing_of_each_other() -> None:
    """To the bit, so that ranks which hold some of the heads, or some of the samples, compute what one does."""
    packed = packed_of(*SHAPES["a rest"]).float()
    context, queries = KERNEL(packed)
    grad = random(7, *context.shape).float()
    whole = context, torch.ops.megatron_tds.causal_kernel_backward(grad, packed, queries)
    some = packed[:, 1:, 1:].contiguous()
    context, queries = KERNEL(some)
    parts = context, torch.ops.megatron_tds.causal_kernel_backward(grad[:, 1:, 1:], some, queries)
    assert all(torch.equal(own, every[:, 1:, 1:]) for own, every in zip(parts, whole, strict=True))


def test_a_later_token_changes_nothing_before_it() -> None:
    packed = packed_of(*SHAPES["a rest"]).float()
    for place in (7, 64, 100):
        other = packed.clone()
        other[place] += 1.0
        one, two = by_kernel(packed), by_kernel(other)
        assert torch.equal(one[:, :, :place], two[:, :, :place])
        assert (one[:, :, place:] != two[:, :, place:]).any(dim=-1).all()


@pytest.mark.parametrize("factor", [1e3, 1e5])
def test_scores_too_large_for_exp_choose_one_key(factor: float) -> None:
    """Their rounding stays out of the exponent: d^-0.5 is no power of 2 here, and the largest score counts as 1."""
    packed = packed_of(70, 1, 2, 48).float()
    packed[:, :, :, :2] *= factor
    own, wanted = outcome(by_kernel, packed), outcome(formula, packed.double())
    assert all(each.isfinite().all() for each in own)
    assert (own[0] - wanted[0]).norm() <= BOUND * wanted[0].norm()
    assert (own[1] - wanted[1])[..., 2, :].norm() <= BOUND * wanted[1][..., 2, :].norm()


def test_nan_in_a_query_or_a_key_gives_nan() -> None:
    packed = packed_of(70, 1, 2, 16).float()
    for part in (0, 1):
        broken = packed.clone()
        broken[66, 0, 1, part, 3] = float("nan")
        output, gradient = outcome(by_kernel, broken)
        assert output[0, 1, 66].isnan().all() and output[0, 0].isfinite().all() and output[0, 1, :66].isfinite().all()
        assert gradient[66, 0, 1].isnan().any() and gradient[:, :, 0].isfinite().all()


def test_the_input_and_two_numbers_for_each_query_are_kept() -> None:
    s, b, a, d = SHAPES["a rest"]
    kept: list[torch.Size] = []
    packed = packed_of(s, b, a, d).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):  # type: ignore[func-returns-value]
        by_kernel(packed)
    assert kept == [packed.shape, torch.Size([2, b * a, s])]


def test_a_compiler_can_work_with_it() -> None:
    packed = packed_of(*SHAPES["less than a block, no whole vector"]).float()
    torch.library.opcheck(causal_attention.forward, (packed.requires_grad_(),))
    assert by_kernel(packed).permute(2, 0, 1, 3).is_contiguous(), "as the next product reads it"


def test_its_products_are_counted_as_those_of_blocks() -> None:
    packed = packed_of(*SHAPES["a rest"]).float()
    counts = []
    for function in (by_kernel, by_blocks):
        with FlopCounterMode(display=False) as counter:
            outcome(function, packed)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.fixture
def unbuilt() -> Iterator[None]:
    """Build it anew, and again after the test."""
    causal_attention._library.cache_clear()
    yield
    causal_attention._library.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_where_it_cannot_be_built_layers_go_by_blocks_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: str, **_: Any) -> None:
        assert "causal_forward" in source
        raise RuntimeError("no such header")

    monkeypatch.setattr(CppCodeCache, "load", broken)
    packed = packed_of(*SHAPES["a rest"]).float()
    said: list[str] = []
    monkeypatch.setattr(causal_attention.log, "warn_once", said.append)
    compiled, names = operators(packed)
    assert len(said) == 1 and "uses torch's operators" in said[0] and "could not be built, " in said[0]
    assert said[0].endswith("(g++, or the compiler in CXX): no such header")
    assert any("megatron_tds.causal_self_attention" in name for name in names)
    wanted = outcome(by_blocks, packed)
    for function in (compiled, causal_self_attention):
        assert all(torch.equal(*pair) for pair in zip(outcome(function, packed), wanted, strict=True))


@pytest.mark.usefixtures("unbuilt")
def test_without_a_compiler_that_is_said_once_and_is_no_warning_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(causal_attention.log, "info", said.append)
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/compiler")}):
        assert not causal_attention.is_built() and not causal_attention.is_built()
    assert len(said) == 1 and "needs a C++ compiler" in said[0] and "/no/compiler" in said[0]


def test_it_has_the_vectors_of_this_processor() -> None:
    library = causal_attention._library()
    assert library is not None
    assert library.causal_vectors() == {"AVX512": 512, "AVX2": 256}[torch.backends.cpu.get_cpu_capability()]


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_it_is_built_for_processors_that_it_was_measured_on(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """For all of a kind the same, in a cache that several machines may see; and without torch's trials of vectors."""
    given: list[dict[str, Any]] = []

    def load(source: str, **how: Any) -> Any:
        given.append(how | {"width": torch._inductor.config.cpp.simdlen})
        raise RuntimeError("enough")

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(CppCodeCache, "load", load)
    assert not causal_attention.is_built()
    if capability == "DEFAULT":
        assert given == []
        return
    (how,) = given
    assert how.get("needs_vec_isa") is False or how["width"] == 1, "torch 2.11 is told of a width that none has"
    assert f"-DCPU_CAPABILITY_{capability}" in how["extra_flags"]
    assert any(flag.startswith("-march=") and flag != "-march=native" for flag in how["extra_flags"])


def test_fewer_rooms_than_threads_are_shared_by_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_of(8, 2, 6, 4).float()
    wanted = KERNEL(packed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert all(torch.equal(*pair) for pair in zip(with_threads(3, KERNEL, packed), wanted, strict=True))


def test_an_error_of_the_library_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def causal_numbers(self, *_: Any) -> int:
            return 1

        def causal_forward(self, *_: Any) -> bytes:
            return b"could not create a primitive"

    monkeypatch.setattr(causal_attention, "_library", Failing)
    with pytest.raises(
        RuntimeError, match=r"causal_forward of causal_kernel.cpp on \(8, 2, 6, 3, 4\): could not create"
    ):
        KERNEL(packed_of(8, 2, 6, 4).float())


def test_it_is_torchs_attention_at_a_size_of_use() -> None:
    packed = packed_of(512, 1, 2, 64).float()
    query, key, value = heads_of(packed)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert (by_kernel(packed) - wanted).norm() <= 2 * BOUND * wanted.norm()
