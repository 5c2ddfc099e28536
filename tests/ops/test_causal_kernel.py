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
from megatron.ops.causal_attention import causal_self_attention, split_packed
from tests.helpers.whole import random_tensor
from tests.ops.causal import formula, make_packed, run_with_gradient

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
NUM_REPEATS = 20


def run_kernel(packed: torch.Tensor) -> torch.Tensor:
    """Return the output [b, a, s, d], as ``causal_self_attention`` does."""
    return KERNEL(packed)[0].permute(1, 2, 0, 3)


def run_blocks(packed: torch.Tensor) -> torch.Tensor:
    """Return the same by torch's operators."""
    return causal_attention._forward(packed).permute(1, 2, 0, 3)


def compile_and_list_operators(packed: torch.Tensor) -> tuple[Any, list[str]]:
    """Return the attention in a graph of its own, and the names of what the graph calls once it has run."""
    torch._dynamo.reset()
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(causal_self_attention, backend=record, dynamic=False, fullgraph=True)
    compiled(packed)
    return compiled, names


def with_threads(num_threads: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` of so many threads of torch's.

    They belong to a thread of Python that ends. Those of this one would be missing in processes that other tests fork,
    which wait for them for ever.
    """

    def work() -> Any:
        torch.set_num_threads(num_threads)
        return function(*args)

    with ThreadPoolExecutor(1) as executor:
        try:
            return executor.submit(work).result()
        finally:
            executor.submit(torch.set_num_threads, 1).result()  # MKL has one number for all


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", SHAPES)
def test_output_and_gradient_match_formula(name: str) -> None:
    packed = make_packed(*SHAPES[name]).float()
    for actual, expected in zip(
        run_with_gradient(run_kernel, packed), run_with_gradient(formula, packed.double()), strict=True
    ):
        assert actual.dtype == torch.float32
        assert (actual - expected).norm() <= BOUND * expected.norm()
        assert (actual - expected).abs().max() <= 2 * BOUND * expected.abs().max()


def test_compiled_layers_use_kernel_in_fp32_only() -> None:
    packed = make_packed(*SHAPES["a rest"]).float()
    compiled, names = compile_and_list_operators(packed)
    assert any("megatron_tds.causal_kernel" in name for name in names), names
    assert all(
        torch.equal(*pair)
        for pair in zip(run_with_gradient(compiled, packed), run_with_gradient(run_kernel, packed), strict=True)
    )
    _, names = compile_and_list_operators(packed.double())
    assert any("megatron_tds.causal_self_attention" in name for name in names)
    assert not any("causal_kernel" in name for name in names)


def test_eager_layers_use_kernel_in_fp32_only() -> None:
    packed = make_packed(*SHAPES["a rest"]).float()
    for x, operator in ((packed, KERNEL), (packed.double(), torch.ops.megatron_tds.causal_self_attention)):
        with FlopCounterMode(display=False) as counter:
            causal_self_attention(x)
        assert list(counter.get_flop_counts()["Global"]) == [operator]


def test_dropout_and_other_devices_skip_kernel() -> None:
    packed = make_packed(8, 1, 2, 16).float()
    graphs: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda x: causal_self_attention(x, dropout=0.5), backend=record)(packed)
    torch.compile(causal_self_attention, backend=record)(packed.to("meta"))
    assert len(graphs) == 2 and not any("causal_kernel" in code for code in graphs)


def test_results_do_not_depend_on_number_of_threads() -> None:
    packed = make_packed(*SHAPES["a rest"]).float()
    expected = with_threads(1, run_with_gradient, run_kernel, packed)
    for _ in range(NUM_REPEATS):  # on a busy machine the threads need not meet in each
        assert all(
            torch.equal(*pair)
            for pair in zip(expected, with_threads(3, run_with_gradient, run_kernel, packed), strict=True)
        )


def test_heads_and_samples_are_independent() -> None:
    """To the bit, so that ranks which hold some of the heads, or some of the samples, compute what one does."""
    packed = make_packed(*SHAPES["a rest"]).float()
    context, queries = KERNEL(packed)
    grad = random_tensor(7, *context.shape).float()
    full_results = context, torch.ops.megatron_tds.causal_kernel_backward(grad, packed, queries)
    subset = packed[:, 1:, 1:].contiguous()
    context, queries = KERNEL(subset)
    subset_results = context, torch.ops.megatron_tds.causal_kernel_backward(grad[:, 1:, 1:], subset, queries)
    assert all(
        torch.equal(subset_result, full_result[:, 1:, 1:])
        for subset_result, full_result in zip(subset_results, full_results, strict=True)
    )


def test_later_tokens_do_not_affect_earlier_outputs() -> None:
    packed = make_packed(*SHAPES["a rest"]).float()
    for position in (7, 64, 100):
        changed = packed.clone()
        changed[position] += 1.0
        output, changed_output = run_kernel(packed), run_kernel(changed)
        assert torch.equal(output[:, :, :position], changed_output[:, :, :position])
        assert (output[:, :, position:] != changed_output[:, :, position:]).any(dim=-1).all()


@pytest.mark.parametrize("factor", [1e3, 1e5])
def test_huge_scores_select_one_key(factor: float) -> None:
    """Their rounding stays out of the exponent: d^-0.5 is no power of 2 here, and the largest score counts as 1."""
    packed = make_packed(70, 1, 2, 48).float()
    packed[:, :, :, :2] *= factor
    actual, expected = run_with_gradient(run_kernel, packed), run_with_gradient(formula, packed.double())
    assert all(tensor.isfinite().all() for tensor in actual)
    assert (actual[0] - expected[0]).norm() <= BOUND * expected[0].norm()
    assert (actual[1] - expected[1])[..., 2, :].norm() <= BOUND * expected[1][..., 2, :].norm()


def test_nan_in_query_or_key_gives_nan() -> None:
    packed = make_packed(70, 1, 2, 16).float()
    for qkv_idx in (0, 1):
        broken = packed.clone()
        broken[66, 0, 1, qkv_idx, 3] = float("nan")
        output, gradient = run_with_gradient(run_kernel, broken)
        assert output[0, 1, 66].isnan().all() and output[0, 0].isfinite().all() and output[0, 1, :66].isfinite().all()
        assert gradient[66, 0, 1].isnan().any() and gradient[:, :, 0].isfinite().all()


def test_backward_saves_input_and_two_values_per_query() -> None:
    s, b, a, d = SHAPES["a rest"]
    saved_shapes: list[torch.Size] = []
    packed = make_packed(s, b, a, d).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_shapes.append(x.shape) or x, lambda x: x):  # type: ignore[func-returns-value]
        run_kernel(packed)
    assert saved_shapes == [packed.shape, torch.Size([2, b * a, s])]


def test_kernel_passes_opcheck_and_output_is_contiguous() -> None:
    packed = make_packed(*SHAPES["less than a block, no whole vector"]).float()
    torch.library.opcheck(causal_attention.forward, (packed.requires_grad_(),))
    assert run_kernel(packed).permute(2, 0, 1, 3).is_contiguous(), "as the next product reads it"


def test_kernel_and_blocks_count_equal_flops() -> None:
    packed = make_packed(*SHAPES["a rest"]).float()
    counts = []
    for function in (run_kernel, run_blocks):
        with FlopCounterMode(display=False) as counter:
            run_with_gradient(function, packed)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.fixture
def unbuilt() -> Iterator[None]:
    """Build it anew, and again after the test."""
    causal_attention._library.cache_clear()
    yield
    causal_attention._library.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_failed_build_falls_back_to_blocks_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: str, **_: Any) -> None:
        assert "causal_forward" in source
        raise RuntimeError("no such header")

    monkeypatch.setattr(CppCodeCache, "load", broken)
    packed = make_packed(*SHAPES["a rest"]).float()
    messages: list[str] = []
    monkeypatch.setattr(causal_attention.log, "warn_once", messages.append)
    compiled, names = compile_and_list_operators(packed)
    assert len(messages) == 1 and "uses torch's operators" in messages[0] and "could not be built, " in messages[0]
    assert messages[0].endswith("(g++, or the compiler in CXX): no such header")
    assert any("megatron_tds.causal_self_attention" in name for name in names)
    expected = run_with_gradient(run_blocks, packed)
    for function in (compiled, causal_self_attention):
        assert all(torch.equal(*pair) for pair in zip(run_with_gradient(function, packed), expected, strict=True))


@pytest.mark.usefixtures("unbuilt")
def test_missing_compiler_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(causal_attention.log, "info", messages.append)
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/compiler")}):
        assert not causal_attention.is_built() and not causal_attention.is_built()
    assert len(messages) == 1 and "needs a C++ compiler" in messages[0] and "/no/compiler" in messages[0]


def test_library_uses_vectors_of_this_processor() -> None:
    library = causal_attention._library()
    assert library is not None
    assert library.causal_vectors() == {"AVX512": 512, "AVX2": 256}[torch.backends.cpu.get_cpu_capability()]


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_kernel_is_built_for_measured_processors_only(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """For all of a kind the same, in a cache that several machines may see; and without torch's trials of vectors."""
    load_calls: list[dict[str, Any]] = []

    def load(source: str, **kwargs: Any) -> Any:
        load_calls.append(kwargs | {"width": torch._inductor.config.cpp.simdlen})
        raise RuntimeError("enough")

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(CppCodeCache, "load", load)
    assert not causal_attention.is_built()
    if capability == "DEFAULT":
        assert load_calls == []
        return
    (load_kwargs,) = load_calls
    assert load_kwargs.get("needs_vec_isa") is False or load_kwargs["width"] == 1, (
        "torch 2.11 is told of a width that none has"
    )
    assert f"-DCPU_CAPABILITY_{capability}" in load_kwargs["extra_flags"]
    assert any(flag.startswith("-march=") and flag != "-march=native" for flag in load_kwargs["extra_flags"])


def test_fewer_workspaces_than_threads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make_packed(8, 2, 6, 4).float()
    expected = KERNEL(packed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert all(torch.equal(*pair) for pair in zip(with_threads(3, KERNEL, packed), expected, strict=True))


def test_library_error_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def causal_numbers(self, *_: Any) -> int:
            return 1

        def causal_forward(self, *_: Any) -> bytes:
            return b"could not create a primitive"

    monkeypatch.setattr(causal_attention, "_library", Failing)
    with pytest.raises(
        RuntimeError, match=r"causal_forward in causal_kernel.cpp failed for shape \(8, 2, 6, 3, 4\): could not create"
    ):
        KERNEL(make_packed(8, 2, 6, 4).float())


def test_kernel_matches_torch_at_realistic_size() -> None:
    packed = make_packed(512, 1, 2, 64).float()
    query, key, value = split_packed(packed)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert (run_kernel(packed) - expected).norm() <= 2 * BOUND * expected.norm()
