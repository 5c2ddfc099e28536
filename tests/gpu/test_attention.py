"""Attention by each path, forward and backward, against the formula written out; and which kernel of torch ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron.ops import attention
from megatron.ops.biased_attention import biased_attention, mask_future
from megatron.ops.causal_attention import causal_self_attention
from megatron.ops.positions import alibi_bias, alibi_slopes, mask_other_documents
from tests.gpu.near import DTYPES, TOLERANCES, assert_near, make_leaf, name_of, random_values, to_device

pytestmark = pytest.mark.gpu
B, A, D = 2, 4, 16
CPU = torch.device("cpu")
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FUSED_BACKENDS = {SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION}
MASK_BACKENDS = {SDPBackend.EFFICIENT_ATTENTION}
OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": SDPBackend.FLASH_ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": SDPBackend.FLASH_ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": SDPBackend.CUDNN_ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": SDPBackend.EFFICIENT_ATTENTION,
    "aten::_scaled_dot_product_attention_math": SDPBackend.MATH,
}
KERNEL_NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "fmha",
}
"""What the names of CUDA's kernels hold."""


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return ``softmax(q k^T scale + added) v``, a key and value for each query head."""
    heads_per_group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads_per_group, 1), value.repeat_interleave(heads_per_group, 1)
    scores = torch.einsum("baid,bajd->baij", query, key) * scale + bias
    return torch.einsum("baij,bajd->baid", scores.softmax(-1), value)


def mask_bias(mask: torch.Tensor) -> torch.Tensor:
    """Return what is added to scores: nothing where ``mask`` is True, else what leaves no share."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)


def make_segments(s: int) -> torch.Tensor:
    """Return documents [B, s] of two samples, the second one whole."""
    return torch.stack([torch.arange(s) // max(s // 3, 1), torch.zeros(s, dtype=torch.long)])


def make_inputs(s: int, s_k: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value in fp64 that ``dtype`` can hold."""
    return [
        random_values(i, B, h, n, D, dtype=dtype) for i, (h, n) in enumerate(((A, s), (groups, s_k), (groups, s_k)))
    ]


def self_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what ``causal_self_attention`` makes of parts that lie as a layer's product has them."""
    return causal_self_attention(torch.stack([tensor.permute(2, 0, 1, 3) for tensor in (q, k, v)], dim=3))


def distance_bias(dtype: torch.dtype, s: int) -> torch.Tensor:
    return random_values(9, A, 2 * s - 1, dtype=dtype)


AttentionPath = tuple[Callable[..., torch.Tensor], Callable[[int, int], torch.Tensor], float, int, Any]
"""What is called with (query, key, value, mask or None); what the formula adds; its scale; groups; mask."""


def causal_bias(s: int, s_k: int) -> torch.Tensor:
    return mask_bias(torch.ones(s, s_k, dtype=torch.bool).tril())


def document_bias(s: int, _: int) -> torch.Tensor:
    return mask_bias(attention.document_mask(make_segments(s)))


def alibi_document_bias(s: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the bias of ALiBi within documents: [B, A, s, s]."""
    slopes, positions = torch.tensor(alibi_slopes(A), dtype=torch.float64), torch.arange(s)
    return mask_other_documents(alibi_bias(slopes, positions.unsqueeze(0), positions, dtype), make_segments(s))


SCALED = D**-0.5
PATHS: dict[str, AttentionPath] = {
    "causal self-attention": (lambda q, k, v, _: self_attention(q, k, v), causal_bias, SCALED, A, None),
    "causal": (lambda q, k, v, _: attention.attention(q, k, v), causal_bias, SCALED, A, None),
    "causal, grouped": (lambda q, k, v, _: attention.attention(q, k, v), causal_bias, SCALED, 2, None),
    "everything": (
        lambda q, k, v, _: attention.attention(q, k, v, is_causal=False),
        lambda s, k: torch.zeros(s, k), SCALED, A, None,
    ),
    "documents": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask), document_bias, SCALED, A,
        lambda s, _: attention.document_mask(make_segments(s)),
    ),
    "documents, grouped": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask), document_bias, SCALED, 2,
        lambda s, _: attention.document_mask(make_segments(s)),
    ),
    "alibi": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask.to(q.dtype)),
        lambda s, _: alibi_document_bias(s).clamp(min=-1e30), SCALED, A,
        lambda s, _: alibi_document_bias(s, torch.float32),
    ),
    "documents, dropped": (
        lambda q, k, v, mask: attention.attention(q, k, v, mask=mask, drop=lambda x: x), document_bias, SCALED, A,
        lambda s, _: attention.document_mask(make_segments(s)),
    ),
    "grouped, dropped": (
        lambda q, k, v, _: attention.attention(q, k, v, drop=lambda x: x), causal_bias, SCALED, 2, None,
    ),
}  # fmt: skip


def forward_backward(
    call: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    extra_args: list[Any],
    torch_device: torch.device,
    dtype: Any,
) -> dict[str, torch.Tensor]:
    """Return what ``call`` gives and the gradients of ``inputs``, all on ``torch_device``."""
    leaves = [make_leaf(tensor, torch_device, dtype) for tensor in inputs]
    out = call(*leaves, *(to_device(arg, torch_device) for arg in extra_args))
    out.backward(random_values(77, *out.shape, dtype=torch.bfloat16).to(out.dtype).to(torch_device))
    names = ("of query", "of key", "of value", "of bias")
    return {"output": out.detach()} | {n: x.grad for n, x in zip(names, leaves, strict=False) if x.grad is not None}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("s", [61, 64, 192])
@pytest.mark.parametrize("path", PATHS)
def test_path_matches_formula(path: str, s: int, dtype: torch.dtype, torch_device: torch.device) -> None:
    call, make_bias, scale, groups, make_mask = PATHS[path]
    inputs = make_inputs(s, s, groups, dtype)
    mask_tensor = None if make_mask is None else make_mask(s, s)
    if path == "alibi":  # as the path rounds it
        expected_bias = mask_tensor.to(dtype).double().clamp(min=-1e30)
    else:
        expected_bias = make_bias(s, s)
    actual = forward_backward(call, inputs, [mask_tensor], torch_device, dtype)
    expected = forward_backward(
        lambda q, k, v: reference_attention(q, k, v, expected_bias, scale), inputs, [], CPU, torch.float64
    )
    assert_near(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("s", [61, 192])
@pytest.mark.parametrize("is_causal", [False, True], ids=["both directions", "causal"])
def test_distance_bias_and_its_gradient_match_formula(
    is_causal: bool, s: int, dtype: torch.dtype, torch_device: torch.device
) -> None:
    inputs = [0.5 * tensor for tensor in make_inputs(s, s, A, dtype)] + [distance_bias(dtype, s)]
    bias_idx = torch.arange(s).unsqueeze(0) - torch.arange(s).unsqueeze(1) + s - 1  # [s, s]: which number is added
    mask = attention.segment_mask(make_segments(s), make_segments(s))

    def biased(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        return biased_attention(q, k, v, mask_future(bias) if is_causal else bias, mask=visible)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        visible = mask & torch.ones(s, s, dtype=torch.bool).tril() if is_causal else mask
        return reference_attention(q, k, v, bias[:, bias_idx] + mask_bias(visible), 1.0)

    actual = forward_backward(biased, inputs, [mask], torch_device, dtype)
    assert_near(actual, forward_backward(reference, inputs, [], CPU, torch.float64), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("low", [0.0, -40.0], ids=["", "low scores"])
@pytest.mark.parametrize(("s", "s_k"), [(1, 5), (61, 61), (64, 64), (192, 192), (320, 320), (37, 192), (64, 129)])
def test_gradients_are_finite_for_any_shape_and_fully_masked_queries(
    s: int, s_k: int, low: float, dtype: torch.dtype, torch_device: torch.device
) -> None:
    """cuDNN's, for one, are none with a mask where s % 128 is 64; and -inf in a whole row would give NaN to any."""
    inputs = make_inputs(s, s_k, A, dtype)
    visible = torch.arange(s_k) < torch.tensor([[s_k], [max(s_k // 2, 1)]])
    mask = visible.view(B, 1, 1, s_k).expand(B, 1, s, s_k).clone()
    mask[1, :, s // 2 :] = False  # queries that may look nowhere
    score_bias = torch.full((B, 1, s, s_k), low, dtype=torch.float64)

    def by_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        bias = attention.additive_mask(visible, q.dtype) + low
        return attention.attention(q, k, v, mask=bias, is_causal=False)

    actual = forward_backward(by_bias, inputs, [mask], torch_device, dtype)
    assert all(torch.isfinite(tensor).all() for tensor in actual.values())
    uniform = biased_attention(
        *(make_leaf(tensor, torch_device, dtype) for tensor in inputs), mask=to_device(mask, torch_device)
    ).detach()
    masked_output = uniform[1, :, s // 2 :].cpu().double()
    if dtype != torch.float16:  # where a score above 8 still counts beside the lowest number
        mean = inputs[2][1].mean(dim=1, keepdim=True).expand_as(masked_output)
        assert_near({"blind": masked_output}, {"blind": mean}, dtype)
    first_sample = {name: tensor[0] for name, tensor in actual.items()}  # the sample in which all look somewhere
    expected = forward_backward(
        lambda q, k, v: reference_attention(q, k, v, mask_bias(mask) + score_bias, SCALED),
        inputs,
        [],
        CPU,
        torch.float64,
    )
    assert_near(first_sample, {name: tensor[0] for name, tensor in expected.items()}, dtype)


def chosen_backends(run: Callable[[], Any], device_type: str) -> tuple[set[SDPBackend], list[str]]:
    """Return the kernels that torch chose within ``run``, by the operators it called, and CUDA's own names for them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
    events = profile.events() or []
    backends = {OPERATORS[event.name] for event in events if event.name in OPERATORS}
    return backends, sorted({event.name for event in events if event.device_type != torch.autograd.DeviceType.CPU})


EXPECTED_BACKENDS: dict[str, tuple[tuple[torch.dtype, ...], set[SDPBackend]]] = {
    "causal self-attention": (SIXTEEN_BITS, FUSED_BACKENDS),
    "causal": (SIXTEEN_BITS, FUSED_BACKENDS),
    "causal, grouped": (SIXTEEN_BITS, FUSED_BACKENDS),
    "everything": (SIXTEEN_BITS, FUSED_BACKENDS),
    "documents": ((*SIXTEEN_BITS, torch.float32), MASK_BACKENDS),
    "alibi": ((*SIXTEEN_BITS, torch.float32), MASK_BACKENDS),
    "documents, grouped": (SIXTEEN_BITS, {*MASK_BACKENDS, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}),
}
"""What a path must go to on a GPU. Keys that a group shares, with a mask, only torch's own steps take until some
release: all scores are in memory then, which is allowed here and told."""


@pytest.mark.parametrize(
    ("path", "dtype"),
    [(path, dtype) for path, (dtypes, _) in EXPECTED_BACKENDS.items() for dtype in dtypes],
    ids=name_of,
)
def test_attention_runs_fused_kernel(
    path: str,
    dtype: torch.dtype,
    torch_device: torch.device,
    device_type: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Forward and backward of heads of 64; what ran is told in the report (``--junitxml``)."""
    if device_type == "sim":
        pytest.skip("the simulated device brings its own attention")
    call, _, _, groups, make_mask = PATHS[path]
    heads = (A, groups, groups)
    s = 512 if device_type == "cuda" else 64
    leaves = [make_leaf(random_values(i, B, h, s, 64), torch_device, dtype) for i, h in enumerate(heads)]
    mask_tensor = None if make_mask is None else to_device(make_mask(s, s), torch_device)

    def run() -> None:
        call(*leaves, mask_tensor).sum().backward()

    run()
    backends, kernel_names = chosen_backends(run, device_type)
    record_property("kernel", f"{path}, {name_of(dtype)}: {', '.join(sorted(backend.name for backend in backends))}")
    if device_type == "cpu":  # torch has two there, and this project a third in fp32
        assert backends <= {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH} and (backends or dtype == torch.float32)
        return
    has_flash = torch.cuda.get_device_capability() >= (8, 0)  # Ampere; V100 and T4 have torch's older kernels
    allowed_backends = EXPECTED_BACKENDS[path][1] if has_flash else {*MASK_BACKENDS, SDPBackend.MATH}
    assert len(backends) == 1 and backends <= allowed_backends
    name_fragment = KERNEL_NAMES.get(next(iter(backends)))
    if kernel_names and name_fragment is not None:  # none where the machine lets nobody profile its kernels
        assert any(name_fragment in name.lower() for name in kernel_names), kernel_names


def test_cudnn_is_disabled_only_for_masks(torch_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is switched off while a mask goes to torch, and only then."""
    original, is_enabled = torch.nn.functional.scaled_dot_product_attention, []

    def record_call(*args: Any, **kwargs: Any) -> torch.Tensor:
        is_enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record_call)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    q, k, v = (tensor.to(torch_device, torch.float32) for tensor in make_inputs(8, 8, A, torch.float32))
    attention.attention(q, k, v, mask=to_device(attention.document_mask(make_segments(8)), torch_device))
    attention.attention(q, k, v)
    assert is_enabled == [False, before] and torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_kernel_dropout_keeps_mean_and_repeats_for_seed(dtype: torch.dtype, torch_device: torch.device) -> None:
    q, k, v = (random_values(i, 4, 8, 64, 64).to(torch_device, dtype) for i in range(3))
    ones = torch.ones_like(v)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return attention.attention(q, k, ones, is_causal=False, dropout=0.25).double()

    first_draw = draw(3)
    assert torch.equal(first_draw, draw(3)) and not torch.equal(first_draw, draw(4))
    assert abs(float(first_draw.mean()) - 1.0) < 0.02, "what is left is scaled up"
    assert float(first_draw.std()) > 10 * TOLERANCES[torch.float32], "something is dropped"
