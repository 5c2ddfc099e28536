"""Attention by each path, forward and backward, against the formula written out; and which kernel of torch ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron.ops import attention
from megatron.ops.biased_attention import biased_attention, without_future
from megatron.ops.causal_attention import causal_self_attention
from megatron.ops.positions import alibi_bias, alibi_slopes, within_documents
from tests.gpu.near import ALLOWED, DTYPES, assert_near, leaf, moved, name_of, noise

pytestmark = pytest.mark.gpu
B, A, D = 2, 4, 16
CPU = torch.device("cpu")
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FUSED = {SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION}
OF_MASKS = {SDPBackend.EFFICIENT_ATTENTION}
OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": SDPBackend.FLASH_ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": SDPBackend.FLASH_ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": SDPBackend.CUDNN_ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": SDPBackend.EFFICIENT_ATTENTION,
    "aten::_scaled_dot_product_attention_math": SDPBackend.MATH,
}
KERNELS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "fmha",
}
"""What the names of CUDA's kernels hold."""


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return ``softmax(q k^T scale + added) v``, a key and value for each query head."""
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    scores = torch.einsum("baid,bajd->baij", query, key) * scale + added
    return torch.einsum("baij,bajd->baid", scores.softmax(-1), value)


def hidden(mask: torch.Tensor) -> torch.Tensor:
    """Return what is added to scores: nothing where ``mask`` is True, else what leaves no share."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)


def segments(s: int) -> torch.Tensor:
    """Return documents [B, s] of two samples, the second one whole."""
    return torch.stack([torch.arange(s) // max(s // 3, 1), torch.zeros(s, dtype=torch.long)])


def inputs_of(s: int, s_k: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value in fp64 that ``dtype`` can hold."""
    return [noise(i, B, h, n, D, dtype=dtype) for i, (h, n) in enumerate(((A, s), (groups, s_k), (groups, s_k)))]


def self_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what ``causal_self_attention`` makes of parts that lie as a layer's product has them."""
    return causal_self_attention(torch.stack([part.permute(2, 0, 1, 3) for part in (q, k, v)], dim=3))


def distances(dtype: torch.dtype, s: int) -> torch.Tensor:
    return noise(9, A, 2 * s - 1, dtype=dtype)


Path = tuple[Callable[..., torch.Tensor], Callable[[int, int], torch.Tensor], float, int, Any]
"""What is called with (query, key, value, mask or None); what the formula adds; its scale; groups; mask."""


def causal(s: int, s_k: int) -> torch.Tensor:
    return hidden(torch.ones(s, s_k, dtype=torch.bool).tril())


def documents(s: int, _: int) -> torch.Tensor:
    return hidden(attention.document_mask(segments(s)))


def alibi(s: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the bias of ALiBi within documents: [B, A, s, s]."""
    slopes, places = torch.tensor(alibi_slopes(A), dtype=torch.float64), torch.arange(s)
    return within_documents(alibi_bias(slopes, places.unsqueeze(0), places, dtype), segments(s))


SCALED = D**-0.5
PATHS: dict[str, Path] = {
    "causal self-attention": (lambda q, k, v, _: self_attention(q, k, v), causal, SCALED, A, None),
    "causal": (lambda q, k, v, _: attention.attention(q, k, v), causal, SCALED, A, None),
    "causal, grouped": (lambda q, k, v, _: attention.attention(q, k, v), causal, SCALED, 2, None),
    "everything": (
        lambda q, k, v, _: attention.attention(q, k, v, is_causal=False),
        lambda s, k: torch.zeros(s, k), SCALED, A, None,
    ),
    "documents": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask), documents, SCALED, A,
        lambda s, _: attention.document_mask(segments(s)),
    ),
    "documents, grouped": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask), documents, SCALED, 2,
        lambda s, _: attention.document_mask(segments(s)),
    ),
    "alibi": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask.to(q.dtype)),
        lambda s, _: alibi(s).clamp(min=-1e30), SCALED, A,
        lambda s, _: alibi(s, torch.float32),
    ),
    "documents, dropped": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask, drop=lambda x: x), documents, SCALED, A,
        lambda s, _: attention.document_mask(segments(s)),
    ),
    "grouped, dropped": (
        lambda q, k, v, _: attention.attention(q, k, v, drop=lambda x: x), causal, SCALED, 2, None,
    ),
}  # fmt: skip


def both_ways(
    call: Callable[..., torch.Tensor], parts: list[torch.Tensor], others: list[Any], place: torch.device, dtype: Any
) -> dict[str, torch.Tensor]:
    """Return what ``call`` gives and the gradients of ``parts``, all on ``place``."""
    leaves = [leaf(part, place, dtype) for part in parts]
    out = call(*leaves, *(moved(other, place) for other in others))
    out.backward(noise(77, *out.shape, dtype=torch.bfloat16).to(out.dtype).to(place))
    names = ("of query", "of key", "of value", "of bias")
    return {"output": out.detach()} | {n: x.grad for n, x in zip(names, leaves, strict=False) if x.grad is not None}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("s", [61, 64, 192])
@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_the_formula(path: str, s: int, dtype: torch.dtype, place: torch.device) -> None:
    call, added, scale, groups, mask = PATHS[path]
    parts = inputs_of(s, s, groups, dtype)
    given = None if mask is None else mask(s, s)
    if path == "alibi":  # as the path rounds it
        wanted_added = given.to(dtype).double().clamp(min=-1e30)
    else:
        wanted_added = added(s, s)
    found = both_ways(call, parts, [given], place, dtype)
    wanted = both_ways(lambda q, k, v: formula(q, k, v, wanted_added, scale), parts, [], CPU, torch.float64)
    assert_near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("s", [61, 192])
@pytest.mark.parametrize("is_causal", [False, True], ids=["both directions", "causal"])
def test_a_bias_by_distance_is_the_formula_with_its_own_gradient(
    is_causal: bool, s: int, dtype: torch.dtype, place: torch.device
) -> None:
    parts = [0.5 * part for part in inputs_of(s, s, A, dtype)] + [distances(dtype, s)]
    rows = torch.arange(s).unsqueeze(0) - torch.arange(s).unsqueeze(1) + s - 1  # [s, s]: which number is added
    mask = attention.segment_mask(segments(s), segments(s))

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return biased_attention(q, k, v, without_future(bias) if is_causal else bias, mask=seen)

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        seen = mask & torch.ones(s, s, dtype=torch.bool).tril() if is_causal else mask
        return formula(q, k, v, bias[:, rows] + hidden(seen), 1.0)

    found = both_ways(ours, parts, [mask], place, dtype)
    assert_near(found, both_ways(theirs, parts, [], CPU, torch.float64), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("low", [0.0, -40.0], ids=["", "low scores"])
@pytest.mark.parametrize(("s", "s_k"), [(1, 5), (61, 61), (64, 64), (192, 192), (320, 320), (37, 192), (64, 129)])
def test_gradients_are_numbers_whatever_the_shape_and_though_a_query_may_look_nowhere(
    s: int, s_k: int, low: float, dtype: torch.dtype, place: torch.device
) -> None:
    """cuDNN's, for one, are none with a mask where s % 128 is 64; and -inf in a whole row would give NaN to any."""
    parts = inputs_of(s, s_k, A, dtype)
    seen = torch.arange(s_k) < torch.tensor([[s_k], [max(s_k // 2, 1)]])
    mask = seen.view(B, 1, 1, s_k).expand(B, 1, s, s_k).clone()
    mask[1, :, s // 2 :] = False  # queries that may look nowhere
    added = torch.full((B, 1, s, s_k), low, dtype=torch.float64)

    def by_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        bias = attention.additive(seen, q.dtype) + low
        return attention.attention(q, k, v, mask=bias, is_causal=False)

    found = both_ways(by_bias, parts, [mask], place, dtype)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    uniform = biased_attention(*(leaf(part, place, dtype) for part in parts), mask=moved(mask, place)).detach()
    blind = uniform[1, :, s // 2 :].cpu().double()
    if dtype != torch.float16:  # where a score above 8 still counts beside the lowest number
        mean = parts[2][1].mean(dim=1, keepdim=True).expand_as(blind)
        assert_near({"blind": blind}, {"blind": mean}, dtype)
    own = {name: tensor[0] for name, tensor in found.items()}  # the sample in which all look somewhere
    wanted = both_ways(lambda q, k, v: formula(q, k, v, hidden(mask) + added, SCALED), parts, [], CPU, torch.float64)
    assert_near(own, {name: tensor[0] for name, tensor in wanted.items()}, dtype)


def chosen(run: Callable[[], Any], kind: str) -> tuple[set[SDPBackend], list[str]]:
    """Return the kernels that torch chose within ``run``, by the operators it called, and CUDA's own names for them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
    events = profile.events() or []
    found = {OPERATORS[event.name] for event in events if event.name in OPERATORS}
    return found, sorted({event.name for event in events if event.device_type != torch.autograd.DeviceType.CPU})


CHOICES: dict[str, tuple[tuple[torch.dtype, ...], set[SDPBackend]]] = {
    "causal self-attention": (SIXTEEN_BITS, FUSED),
    "causal": (SIXTEEN_BITS, FUSED),
    "causal, grouped": (SIXTEEN_BITS, FUSED),
    "everything": (SIXTEEN_BITS, FUSED),
    "documents": ((*SIXTEEN_BITS, torch.float32), OF_MASKS),
    "alibi": ((*SIXTEEN_BITS, torch.float32), OF_MASKS),
    "documents, grouped": (SIXTEEN_BITS, {*OF_MASKS, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}),
}
"""What a path must go to on a GPU. Keys that a group shares, with a mask, only torch's own steps take until some
release: all scores are in memory then, which is allowed here and told."""


@pytest.mark.parametrize(
    ("path", "dtype"), [(path, dtype) for path, (dtypes, _) in CHOICES.items() for dtype in dtypes], ids=name_of
)
def test_the_kernel_that_runs_is_a_fused_one(
    path: str, dtype: torch.dtype, place: torch.device, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """Forward and backward of heads of 64; what ran is told in the report (``--junitxml``)."""
    if kind == "sim":
        pytest.skip("the simulated device brings its own attention")
    call, _, _, groups, mask = PATHS[path]
    heads = (A, groups, groups)
    s = 512 if kind == "cuda" else 64
    leaves = [leaf(noise(i, B, h, s, 64), place, dtype) for i, h in enumerate(heads)]
    given = None if mask is None else moved(mask(s, s), place)

    def run() -> None:
        call(*leaves, given).sum().backward()

    run()
    found, names = chosen(run, kind)
    record_property("kernel", f"{path}, {name_of(dtype)}: {', '.join(sorted(each.name for each in found))}")
    if kind == "cpu":  # torch has two there, and this project a third in fp32
        assert found <= {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH} and (found or dtype == torch.float32)
        return
    has_flash = torch.cuda.get_device_capability() >= (8, 0)  # Ampere; V100 and T4 have torch's older kernels
    allowed = CHOICES[path][1] if has_flash else {*OF_MASKS, SDPBackend.MATH}
    assert len(found) == 1 and found <= allowed
    of_kernel = KERNELS.get(next(iter(found)))
    if names and of_kernel is not None:  # none where the machine lets nobody profile its kernels
        assert any(of_kernel in name.lower() for name in names), names


def test_a_mask_is_kept_from_cudnn(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is switched off while a mask goes to torch, and only then."""
    plain, seen = torch.nn.functional.scaled_dot_product_attention, []

    def spied(*args: Any, **how: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    q, k, v = (part.to(place, torch.float32) for part in inputs_of(8, 8, A, torch.float32))
    attention.attention(q, k, v, mask=moved(attention.document_mask(segments(8)), place))
    attention.attention(q, k, v)
    assert seen == [False, before] and torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_dropout_within_the_kernel_keeps_the_mean_and_is_the_same_for_a_seed(
    dtype: torch.dtype, place: torch.device
) -> None:
    q, k, v = (noise(i, 4, 8, 64, 64).to(place, dtype) for i in range(3))
    ones = torch.ones_like(v)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return attention.attention(q, k, ones, is_causal=False, dropout=0.25).double()

    first = drawn(3)
    assert torch.equal(first, drawn(3)) and not torch.equal(first, drawn(4))
    assert abs(float(first.mean()) - 1.0) < 0.02, "what is left is scaled up"
    assert float(first.std()) > 10 * ALLOWED[torch.float32], "something is dropped"
