"""The rows of the canary: each function that the project calls on CUDA only, compared with the CPU in fp64.

A row is a function that receives the device and returns one line of text. It raises AssertionError if a value is wrong,
and ``NeedsCuda`` if the call does not exist on a CPU. To add a call, write such a function below ``@row(NAME)``; the
rows run in the order of this file, and those of Triton kernels are in ``canary_kernels.py``. The inputs are rounded to
the device's dtype first, so that the reference computes from equal numbers and only the device's own rounding remains.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.canary_compare import (
    BF16,
    FP32,
    FP64,
    NeedsPackage,
    Row,
    compare,
    compare_with_fp64,
    kernel_names,
    random,
    relative_error,
    require_cuda,
    run_with_scalar,
    without_tuning,
)
from benchmarks.gpu.canary_kernels import KERNEL_ROWS

ROWS: list[Row] = []


def row(name: str, *, is_judged: bool = True) -> Callable[[Callable[[torch.device], str]], Callable[..., str]]:
    """Decorate a function to add it to ``ROWS``."""

    def add(function: Callable[[torch.device], str]) -> Callable[[torch.device], str]:
        ROWS.append(Row(name, function, is_judged))
        return function

    return add


# Matrix products that write fp32 sums of bf16 factors.


@row("addmm with out_dtype fp32 into a slot")
def addmm_out_dtype(device: torch.device) -> str:
    """As --gradient-accumulation-fusion does: overwrite a view of a flat buffer, then add to it."""
    require_cuda(device)
    return _add_products(device, (48, 40), (48, 64), (64, 40))


@row("baddbmm with out_dtype fp32 into slots")
def baddbmm_out_dtype(device: torch.device) -> str:
    """As for a weight whose rows are interleaved: batched slots."""
    require_cuda(device)
    return _add_products(device, (2, 48, 40), (2, 48, 64), (2, 64, 40))


def _add_products(device: torch.device, out: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> str:
    from tds.linear_function import add_product

    factors = [(random(2 * idx, *a, dtype=BF16), random(2 * idx + 1, *b, dtype=BF16)) for idx in range(2)]
    numel = int(torch.Size(out).numel())
    flat = torch.full((numel + 32,), 7.0, device=device)
    slot = flat[16 : 16 + numel].view(out)
    for idx, (left, right) in enumerate(factors):
        add_product(slot, left.to(device, BF16), right.to(device, BF16), is_first=idx == 0)
    assert bool((flat[:16] == 7).all()) and bool((flat[-16:] == 7).all()), "the product wrote beyond its slot"
    return compare({"out": slot}, {"out": sum(left @ right for left, right in factors)}, FP32)  # type: ignore[dict-item]


@row("addmm with out_dtype fp32 and a transposed factor of one column")
def addmm_expanded(device: torch.device) -> str:
    """Gradient of a weight from one row per micro-batch, whose factors have strides of 1 and 0."""
    require_cuda(device)
    return _add_products(device, (48, 40), (48, 1), (1, 40))


@row("mm with out_dtype fp32 and out=")
def mm_out_dtype(device: torch.device) -> str:
    """As for logits of a chunk."""
    require_cuda(device)
    x, table = random(0, 40, 64, dtype=BF16), random(1, 128, 64, dtype=BF16)
    buffer = torch.empty(40, 128, device=device)
    torch.mm(x.to(device, BF16), table.to(device, BF16).t(), out_dtype=FP32, out=buffer)
    return compare({"out": buffer}, {"out": x @ table.t()}, FP32)


@row("chunked cross-entropy")
def chunked_cross_entropy(device: torch.device) -> str:
    """The loss over chunks of logits with a vocabulary that is not aligned."""
    from megatron.mpu.linear_cross_entropy import linear_cross_entropy

    tokens, vocab = 96, 211
    inputs = {"x": random(0, tokens, 64, dtype=BF16), "table": random(1, vocab, 64, dtype=BF16, scale=0.2)}
    targets = torch.arange(tokens) * 7 % vocab

    def loss(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(tokens, device=x.device) / tokens
        total = linear_cross_entropy(x, table, targets.to(x.device), weights, vocab_size=vocab, chunk_tokens=40)
        return total[0] if isinstance(total, tuple) else total

    def plain(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ table.t(), targets)

    actual = run_with_scalar(loss, inputs, device, BF16)
    return compare(actual, run_with_scalar(plain, inputs, torch.device("cpu"), FP64), BF16)


# Products of experts.


@row("grouped_mm with an expert without rows")
def grouped_empty_expert(device: torch.device) -> str:
    """Forward, gradient of the rows and gradients of the weights; the expert without rows gets zeros."""
    return _grouped(device, [40, 0, 24, 64], rows=128)


@row("grouped_mm with rows after the last expert")
def grouped_dropped_rows(device: torch.device) -> str:
    """Slots of dropped choices, whose values are undefined and must not reach the weights."""
    return _grouped(device, [30, 0, 17, 51], rows=128)


@row("grouped_mm of weights in one storage")
def grouped_stacked(device: torch.device) -> str:
    """The weights are views of one tensor, which the product reads without a copy."""
    return _grouped(device, [40, 0, 24, 64], rows=128, is_stacked=True)


@row("grouped_mm with first and last expert without rows")
def grouped_outer_experts(device: torch.device) -> str:
    """Offsets that begin with 0 and end with equal numbers."""
    return _grouped(device, [0, 100, 28, 0], rows=128)


@row("grouped_mm with 0 rows (guarded)")
def grouped_no_rows(device: torch.device) -> str:
    """``select_implementation`` must choose the loop."""
    return _grouped(device, [0, 0, 0, 0], rows=0, expected="loop")


@row("grouped_mm with sizes not divisible by 8 (guarded)")
def grouped_odd_sizes(device: torch.device) -> str:
    """``select_implementation`` must choose the loop, because CUDA's kernel requires rows of 16 bytes."""
    return _grouped(device, [40, 0, 24, 64], rows=128, sizes=(60, 44), expected="loop")


def _grouped(
    device: torch.device,
    counts: list[int],
    *,
    rows: int,
    sizes: tuple[int, int] = (64, 96),
    expected: str = "grouped",
    is_stacked: bool = False,
) -> str:
    from megatron.ops import grouped
    from megatron.ops.stacked_weights import share_storage, stacked

    input_size, output_size = sizes
    x = random(0, rows, input_size, dtype=BF16)
    weights = [random(1 + idx, output_size, input_size, dtype=BF16, scale=0.2) for idx in range(len(counts))]
    factor = random(9, rows, output_size, dtype=BF16)
    num_used = sum(counts)
    if device.type == "cpu":  # a CPU has this product, too, but the project does not use it there
        grouped.IMPLEMENTATION = grouped.GROUPED
    try:
        leaf = x.to(device, BF16).requires_grad_()
        leaves = [torch.nn.Parameter(weight.to(device, BF16)) for weight in weights]
        if is_stacked:
            share_storage(leaves)
            assert stacked(leaves).data_ptr() == leaves[0].data_ptr(), "the product would copy the weights"
        selected = grouped.select_implementation(leaf, output_size)
        assert selected == expected, f"the implementation is {selected}, expected {expected}"
        counts_on_device = torch.tensor(counts, device=device)
        out = grouped.grouped_linear(leaf, leaves, counts_on_device)
        out.backward(factor.to(device, BF16))
    finally:
        grouped.IMPLEMENTATION = None
    pairs = zip(x[:num_used].split(counts), factor[:num_used].split(counts), weights, strict=True)
    outputs, x_grads, weight_grads = [], [], []
    for rows_of_expert, row_grads, weight in pairs:
        outputs.append(rows_of_expert @ weight.t())
        x_grads.append(row_grads @ weight)
        weight_grads.append(row_grads.t() @ rows_of_expert)
    for count, leaf_weight in zip(counts, leaves, strict=True):
        assert leaf_weight.grad is not None, "a weight has no gradient"
        assert count or not leaf_weight.grad.any(), "an expert without rows has a gradient"
    assert leaf.grad is not None
    if not num_used:
        return f"{selected}: no rows, gradients of zeros"
    actual = {
        "out": out[:num_used],
        "dx": leaf.grad[:num_used],
        "dweights": torch.stack([leaf_weight.grad for leaf_weight in leaves]),  # type: ignore[misc]
    }
    expected_tensors = {"out": torch.cat(outputs), "dx": torch.cat(x_grads), "dweights": torch.stack(weight_grads)}
    return f"{selected}: {compare(actual, expected_tensors, BF16)}"


# Kernels in Triton.


@row("Triton dropout, masks of Philox to the bit")
def triton_dropout(device: torch.device) -> str:
    """Layout-independent dropout with a residual, forward and backward, against the masks of the CPU."""
    require_cuda(device)
    from megatron.mpu.philox_dropout import PhiloxDropout
    from megatron.mpu.random import DropoutKey

    assert importlib.util.find_spec("triton"), "Triton is not installed"
    num_elements = 0
    for width in (21, 1100):
        x, residual, grad = (random(seed, 33, 2, width, dtype=FP32).float() for seed in range(3))
        results = []
        for current in (device, torch.device("cpu")):
            streams = PhiloxDropout(2, 7)
            streams.position = DropoutKey(5, 1, 4)
            leaf = x.to(current).requires_grad_()
            assert streams.uses_kernel(leaf) == (current.type == "cuda"), "the kernel is not used"
            out = streams.dropout(leaf, 0.3, training=True, layer=2, site="mlp output", residual=residual.to(current))
            out.backward(grad.to(current))
            results.append((out.detach().cpu(), leaf.grad.cpu()))  # type: ignore[union-attr]
        (out, x_grad), (expected_out, expected_grad) = results
        assert torch.equal(x_grad != 0, expected_grad != 0), "the mask differs from the CPU's"
        assert torch.equal(out, expected_out) and torch.equal(x_grad, expected_grad), "outputs differ from the CPU's"
        num_elements += out.numel()
    return f"{num_elements} elements bitwise equal"


ROWS.extend(KERNEL_ROWS)


# Attention.


def _attention_row(name: str, head_size: int, groups: int, *, has_mask: bool) -> None:
    @row(name)
    def run(device: torch.device) -> str:
        from megatron.ops.attention import attention

        heads, s = 4, 192
        inputs = {
            tensor: random(idx, 2, heads if tensor == "q" else groups, s, head_size, dtype=BF16)
            for idx, tensor in enumerate("qkv")
        }
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        mask[:, 5:9] = False
        mask[:5, :5] |= torch.eye(5, dtype=torch.bool)
        used_mask = mask if has_mask else torch.ones(s, s, dtype=torch.bool).tril()

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, mask=mask.to(q.device) if has_mask else None)

        def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (tensor.repeat_interleave(heads // groups, 1) for tensor in (k, v))
            scores = (q @ k.transpose(2, 3) * head_size**-0.5).masked_fill(~used_mask, float("-inf"))
            return scores.softmax(-1) @ v

        factor = random(7, 2, heads, s, head_size, dtype=BF16)
        text = compare_with_fp64(call, plain, inputs, factor, device)
        tensors = [tensor.to(device, BF16) for tensor in inputs.values()]
        return f"{text}; {kernel_names(lambda: call(*tensors), ('flash', 'fmha', 'attention', 'cudnn', 'sdpa'))}"


_attention_row("causal attention, d = 64", 64, 4, has_mask=False)
_attention_row("causal attention, d = 128", 128, 4, has_mask=False)
_attention_row("grouped causal attention, d = 128", 128, 2, has_mask=False)
_attention_row("masked attention, d = 64", 64, 4, has_mask=True)


@row("varlen attention")
def varlen(device: torch.device) -> str:
    """Packed sequences of different lengths, one of them a single token, with grouped heads."""
    require_cuda(device)
    from megatron.torch_compat import varlen_attention

    lengths = [100, 1, 155]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    inputs = {name: random(idx, 256, 4 if name == "q" else 2, 64, dtype=BF16) for idx, name in enumerate("qkv")}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cu = ends.to(q.device, torch.int32)
        return varlen_attention(q, k, v, cu, cu, max(lengths), max(lengths), scale=0.125)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = (ids.unsqueeze(1) == ids) & torch.ones(256, 256, dtype=torch.bool).tril()
        k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
        scores = torch.einsum("qad,kad->aqk", q, k) * 0.125
        return torch.einsum("aqk,kad->qad", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)

    return compare_with_fp64(call, plain, inputs, random(7, 256, 4, 64, dtype=BF16), device)


def _document_row(name: str, length: int, **options: Any) -> None:
    @row(name)
    def run(device: torch.device) -> str:
        from megatron.ops.document_attention import document_attention, document_starts, select_implementation

        ids = (torch.arange(length) >= 300).long() + (torch.arange(length) >= 320).long()
        starts = document_starts(ids.unsqueeze(0))
        inputs = {name: random(idx, 1, 4, length, 64, dtype=BF16) for idx, name in enumerate("qkv")}
        cap = options.get("cap", 0.0)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return document_attention(q, k, v, starts.to(q.device), **options)

        def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            mask = (ids.unsqueeze(1) == ids) & torch.ones(length, length, dtype=torch.bool).tril()
            scores = q @ k.transpose(2, 3) * 0.125
            scores = cap * torch.tanh(scores / cap) if cap else scores
            return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v

        selected = select_implementation(torch.empty(0, dtype=BF16, device=device), length, 64, is_plain=not options)
        start = time.perf_counter()
        text = compare_with_fp64(call, plain, inputs, random(7, 1, 4, length, 64, dtype=BF16), device)
        return f"{selected}: {text}; {time.perf_counter() - start:.1f} s with compilation"


_document_row("attention within documents", 640)


# Norms and embeddings.


@row("RMSNorm")
def rms_norm_row(device: torch.device) -> str:
    """Output and gradients; the kernels show whether it is fused."""
    from megatron.models.common.norms import rms_norm

    inputs = {"x": random(0, 300, 512, dtype=BF16), "weight": 1 + random(1, 512, dtype=BF16, scale=0.1)}
    inputs["weight"] = inputs["weight"].to(BF16).double()

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, 1e-5)

    text = compare_with_fp64(call, plain, inputs, random(2, 300, 512, dtype=BF16), device)
    tensors = [tensor.to(device, BF16) for tensor in inputs.values()]
    return f"{text}; {kernel_names(lambda: call(*tensors), ('norm', 'rms'))}"


@row("LayerNorm")
def layer_norm_row(device: torch.device) -> str:
    """Output and gradients, which must be accumulated in fp32."""
    from megatron.models.common.norms import layer_norm

    inputs = {
        "x": random(0, 2000, 512, dtype=BF16),
        "weight": (1 + random(1, 512, scale=0.1)).to(BF16).double(),
        "bias": random(2, 512, dtype=BF16, scale=0.1),
    }

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (512,), weight, bias, 1e-5)

    return compare_with_fp64(
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        plain,
        inputs,
        random(3, 2000, 512, dtype=BF16),
        device,
    )


@row("embedding gradient of a token that occurs 2,000 times")
def embedding_repeats(device: torch.device) -> str:
    """CUDA's sum in bf16, against fp64; a sum in bf16 is 17 % too small (fp32: 2e-3)."""
    from megatron.mpu.embedding_lookup import embedding_lookup

    ids = torch.cat([torch.full((2000,), 3), torch.arange(48)])
    grads = random(0, len(ids), 64, dtype=BF16, scale=0.05) + 0.02
    grads = grads.to(BF16).double()
    table = random(1, 50, 64, dtype=BF16).to(device, BF16).requires_grad_()
    embedding_lookup(ids.to(device), table).backward(grads.to(device, BF16))
    expected = torch.zeros(50, 64, dtype=FP64).index_add_(0, ids, grads)
    assert table.grad is not None
    return compare({"row": table.grad[3], "table": table.grad}, {"row": expected[3], "table": expected}, BF16, 0.5)


# Copies and streams.


@row("uploads of micro-batches on their own stream")
def uploads(device: torch.device) -> str:
    """20 pinned buffers that are uploaded while the device computes; freed copies must not be overwritten too early."""
    from megatron import device as devices

    pinned = devices.host_memory((256, 1024), torch.int64, device)
    sums, num_uploads = [], 20
    busy = torch.randn(1024, 1024, device=device) if device.type == "cuda" else torch.zeros(1)
    for idx in range(num_uploads):
        source = pinned.clone() if device.type == "cpu" else pinned.clone().pin_memory()
        source.fill_(idx)
        copies, token = devices.start_upload({"tokens": source}, device)
        for _ in range(10):
            busy = busy @ busy if busy.dim() == 2 else busy
            busy = busy / busy.norm().clamp_min(1) if busy.dim() == 2 else busy
        devices.await_upload(copies.values(), device, token)
        sums.append(copies["tokens"].sum())
        del copies
    actual = torch.stack(sums).cpu()
    assert torch.equal(actual, torch.arange(num_uploads) * pinned.numel()), f"sums are {actual.tolist()}"
    return f"{num_uploads} uploads, all values right"


@row("activations to the host and back")
def host_copies(device: torch.device) -> str:
    """As --checkpoint-in-cpu does, while the memory of the source is used again."""
    from megatron import device as devices

    saved = []
    for idx in range(8):
        source = torch.full((256, 1024), float(idx), device=device)
        target = devices.host_memory((256, 1024), FP32, device)
        devices.copy_to_host(target, source)
        del source
        torch.full((256, 1024), -1.0, device=device)  # may get the memory of the source
        saved.append(target)
    for idx, target in enumerate(saved):
        assert bool((devices.copy_from_host(target, device) == idx).all()), f"tensor {idx} came back with other values"
    return "8 tensors equal"


# Optimizers.


@row("fused AdamW")
def fused_adamw(device: torch.device) -> str:
    """Three steps in fp32, against the formula in fp64."""
    weight, grads = random(0, 1000, dtype=FP32), [random(1 + step, 1000, dtype=FP32) for step in range(3)]
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    results = []
    for current, dtype, fused in ((device, FP32, True), (torch.device("cpu"), FP64, False)):
        parameter = torch.nn.Parameter(weight.to(current, dtype))
        optimizer = torch.optim.AdamW([parameter], fused=fused, **settings)
        for grad in grads:
            parameter.grad = grad.to(current, dtype)
            optimizer.step()
        results.append(parameter.detach())
    return compare({"weight": results[0]}, {"weight": results[1]}, FP32)


@row("Newton-Schulz of Muon in bf16")
def newton_schulz_row(device: torch.device) -> str:
    """The update of a matrix, against the same steps in fp64, and its singular values."""
    from megatron.config.newton_schulz import step_coefficients
    from megatron.optim.newton_schulz import newton_schulz

    update = random(0, 96, 64, dtype=BF16)
    coefficients = step_coefficients("simple", 5)
    actual = newton_schulz(update.to(device, BF16), coefficients)
    x = (update / update.norm()).t()
    for a, b, c in coefficients:
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    values = torch.linalg.svdvals(actual.double().cpu())
    spread = f"singular values from {values.min():.2f} to {values.max():.2f}"
    assert values.min() > 0.4 and values.max() < 1.4, spread
    return f"{compare({'update': actual}, {'update': x.t()}, BF16, 3)}, {spread}"


# Communication and waits.


@row("NCCL with one rank")
def nccl_one_rank(device: torch.device) -> str:
    """All-reduce; all-gather and reduce-scatter in place, as the gradient buffer calls them; groups by split_group."""
    require_cuda(device)
    from datetime import timedelta

    import torch.distributed as dist

    from megatron.torch_compat import all_gather_single, reduce_scatter_single
    from tds import torch_api

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = random(0, 4096, dtype=FP32).float()
        tensor = expected.to(device)
        dist.all_reduce(tensor)
        reduce_scatter_single(tensor[:4096], tensor)
        all_gather_single(tensor, tensor[:4096])
        assert torch.equal(tensor.cpu(), expected), "a collective of one rank changed values"
        torch_api.open_world(device)
        options = torch_api.nccl_options(4, timedelta(seconds=60))
        group = torch_api.split_world([[0]], device, "nccl", options, timedelta(seconds=60))
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        assert torch.equal(tensor.cpu(), expected), "a collective of the split group changed values"
    finally:
        dist.destroy_process_group()
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}: in place and in a split group"


@row("detection of host waits")
def item_watch(device: torch.device) -> str:
    """``.item()`` is detected, and a sum is not."""
    require_cuda(device)
    from benchmarks.gpu.workers import record_waits

    x = torch.ones(8, device=device)
    with record_waits() as quiet_waits:
        x.sum()
    with record_waits() as waits:
        x.sum().item()
    assert len(waits) == 1 and not quiet_waits, f"{len(waits)} waits of .item(), {len(quiet_waits)} of a sum"
    return "one wait of .item(), none of a sum"


# After the other rows, because its first compilation may take half a minute.


_document_row("attention within documents with a soft-cap (flex_attention)", 640, cap=20.0)


# Recorded only: what a later version may use.


@row("bf16 products of 8192 x 8192", is_judged=False)
def product_rate(device: torch.device) -> str:
    """The rate to which MFU is relative."""
    require_cuda(device)
    side, repeats = 8192, 20
    a, b = (torch.randn(side, side, device=device, dtype=BF16) for _ in range(2))
    out = a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    return f"{2 * side**3 * repeats / (time.perf_counter() - start) / 1e12:.0f} TFLOP/s"


def _fp8_row(name: str, *, is_rowwise: bool) -> None:
    @row(name, is_judged=False)
    def run(device: torch.device) -> str:
        m, k, n = 256, 512, 384
        a, b = random(0, m, k, dtype=BF16), random(1, n, k, dtype=BF16)
        dim = {"dim": 1, "keepdim": True} if is_rowwise else {}
        scales = [tensor.abs().amax(**dim).reshape(-1, 1) / 448 for tensor in (a, b)]  # type: ignore[arg-type]
        a8, b8 = (
            (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            for tensor, scale in zip((a, b), scales, strict=True)
        )
        exact = (a8.double() * scales[0]) @ (b8.double() * scales[1]).t()
        scale_a, scale_b = scales[0].float(), scales[1].float().t().contiguous()
        if not is_rowwise:
            scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
        out = torch._scaled_mm(
            a8.to(device), b8.to(device).t(), scale_a=scale_a.to(device), scale_b=scale_b.to(device), out_dtype=BF16
        )
        return f"rel-F {relative_error(out, exact):.1e} of the product of fp8 numbers"


@row("linear layer with --fp8-format")
def fp8_linear(device: torch.device) -> str:
    """Output, input gradient and weight gradient, compared with the emulation on the CPU from the same bytes."""
    if lacks_fp8(device):
        return "not run: products in FP8 need compute capability 8.9"
    from megatron.mpu.fp8 import ROWWISE, use_fp8
    from megatron.mpu.groups import SINGLE
    from tds.linear_function import linear

    def run(device: torch.device) -> dict[str, torch.Tensor]:
        x, weight, grad = (
            random(seed, *shape, dtype=BF16).to(device, BF16).requires_grad_()
            for seed, shape in enumerate(((96, 256), (160, 256), (96, 160)))
        )
        use_fp8(weight, ROWWISE, SINGLE, None)
        y = linear(x, weight)
        x_grad, weight_grad = torch.autograd.grad(y, (x, weight), grad.detach())
        return {"y": y.detach(), "x grad": x_grad, "weight grad": weight_grad}

    return compare(run(device), {name: t.double() for name, t in run(torch.device("cpu")).items()}, BF16)


@row("experts with --fp8-format, one without rows")
def fp8_experts(device: torch.device) -> str:
    """``_scaled_grouped_mm`` for output and input gradient, compared with the emulation on the CPU.

    The experts have 0, 1, 33 and 31 rows, which are not multiples of 16, and the sizes are multiples of 16 only.
    """
    from megatron.mpu.fp8 import ROWWISE, has_fp8_products, use_fp8
    from megatron.mpu.fp8_weights import sharing_quantized_weights
    from megatron.mpu.groups import SINGLE
    from megatron.ops.grouped import grouped_linear
    from megatron.ops.stacked_weights import share_storage

    if not has_fp8_products(device.type, of_experts=True):
        return "not run: grouped products in FP8 need compute capability 9.x"

    def run(device: torch.device) -> dict[str, torch.Tensor]:
        counts = torch.tensor([33, 0, 1, 31], device=device)
        x, grad = (random(seed, 65, size, dtype=BF16).to(device, BF16) for seed, size in ((0, 272), (1, 176)))
        weights = [torch.nn.Parameter(random(2 + idx, 176, 272, dtype=BF16).to(device, BF16)) for idx in range(4)]
        for weight in weights:
            use_fp8(weight, ROWWISE, SINGLE, None)
        share_storage(weights)
        x.requires_grad_()

        def run_once() -> tuple[torch.Tensor, ...]:
            y = grouped_linear(x, weights, counts)
            return y.detach(), *torch.autograd.grad(y, (x, *weights), grad)

        first = run_once()
        with sharing_quantized_weights():
            run_once()
            for tensor, expected in zip(run_once(), first, strict=True):
                assert torch.equal(tensor, expected), "shared quantized weights change the values"
        y, x_grad, *weight_grads = first
        return {"y": y, "x grad": x_grad, "weight grads": torch.stack(weight_grads)}

    return compare(run(device), {name: t.double() for name, t in run(torch.device("cpu")).items()}, BF16)


def lacks_fp8(device: torch.device) -> bool:
    """Return True for a GPU without products in FP8. On a CPU, the rows test the emulation."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)


_fp8_row("fp8 product with one scale per tensor", is_rowwise=False)
_fp8_row("fp8 product with one scale per row", is_rowwise=True)


@row("grouped_mm with 0 rows, without the guard", is_judged=False)
def grouped_no_rows_unguarded(device: torch.device) -> str:
    """Whether the guard in ``select_implementation`` is needed."""
    weights = torch.randn(4, 64, 96, device=device, dtype=BF16)
    out = F.grouped_mm(weights.new_empty(0, 64), weights, offs=torch.zeros(4, dtype=torch.int32, device=device))
    return f"returns {tuple(out.shape)}"


@row("grouped_mm with sizes not divisible by 8, without the guard", is_judged=False)
def grouped_odd_sizes_unguarded(device: torch.device) -> str:
    """Whether the guard in ``select_implementation`` is needed."""
    weights = torch.randn(2, 60, 44, device=device, dtype=BF16)
    offsets = torch.tensor([8, 16], dtype=torch.int32, device=device)
    out = F.grouped_mm(torch.randn(16, 60, device=device, dtype=BF16), weights, offs=offsets)
    return f"returns {tuple(out.shape)}"


# Last, because the kernels of an optional package may take half a minute to compile.


DELTA_STARTS = ((0, 3, 64, 100), (0, 65))
"""First tokens of the documents of each sample: short ones, one of a chunk of 64 tokens, one that ends in a chunk."""
DELTA_FACTOR = 2.0
"""Factor of the tolerance for kernels that round the products within a chunk to 16 bits."""


def compare_delta_rule(
    rule: Callable[..., Any], device: torch.device, *, has_decay_per_element: bool, factor: float = 1.0
) -> str:
    """Compare a function with the interface of ``gated_delta_rule`` with that function in fp64, with documents."""
    from megatron.ops.delta_rule import gated_delta_rule

    batch, length, heads, size = len(DELTA_STARTS), 130, 2, 64
    firsts = torch.zeros(batch, length, dtype=torch.int32)
    for sample, tokens in enumerate(DELTA_STARTS):
        firsts[sample, list(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    starts = firsts.cummax(1).values.to(torch.int32)
    query, key, value = (random(seed, batch, length, heads, size) for seed in range(3))
    decay = random(3, batch, length, heads, *([size] if has_decay_per_element else []))
    inputs = {
        "query": query / 8,
        "key": F.normalize(key, dim=-1),
        "value": value,
        "log_decay": -F.softplus(decay),
        "beta": torch.sigmoid(random(4, batch, length, heads)),
    }
    inputs = {name: tensor.to(BF16).double() for name, tensor in inputs.items()}
    return compare_with_fp64(
        lambda *tensors: rule(*tensors, starts=starts.to(device))[0],
        lambda *tensors: gated_delta_rule(*tensors, starts=starts)[0],
        inputs,
        random(5, *value.shape, dtype=BF16),
        device,
        tolerance_factor=factor,
    )


def _delta_rows(name: str, *, has_decay_per_element: bool) -> None:
    @row(name)
    def plain(device: torch.device) -> str:
        """The fallback for fp32, context parallelism, and machines without fla-core."""
        from megatron.ops.delta_rule import gated_delta_rule

        return compare_delta_rule(gated_delta_rule, device, has_decay_per_element=has_decay_per_element)

    @row(f"{name} by fla-core")
    def kernels(device: torch.device) -> str:
        """Chunk kernels of fla-core, with the first of their configurations."""
        from megatron.ops.fla_delta_rule import fla_delta_rule, is_installed

        require_cuda(device)
        if not is_installed():
            raise NeedsPackage("fla-core")
        with without_tuning():
            return compare_delta_rule(
                fla_delta_rule, device, has_decay_per_element=has_decay_per_element, factor=DELTA_FACTOR
            )


_delta_rows("gated delta rule", has_decay_per_element=False)
_delta_rows("gated delta rule with a decay per element", has_decay_per_element=True)
