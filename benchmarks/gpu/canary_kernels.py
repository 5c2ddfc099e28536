"""Rows of the canary for the Triton kernels of layers and of the loss, compared with the CPU in fp64.

On a CPU the rows test the plain path. With ``TRITON_INTERPRET=1`` and Triton installed, they run the kernels there, in
Triton's interpreter. A row fails if its kernels are not launched although Triton is available.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.canary_compare import BF16, FP32, FP64, Row, compare, compare_with_fp64, random
from megatron import triton_launch
from megatron.torch_compat import has_triton

KERNEL_ROWS: list[Row] = []
KernelRow = Callable[[torch.device], str]


def kernel_row(name: str, *kernels: str) -> Callable[[KernelRow], KernelRow]:
    """Decorate a function to add it to ``KERNEL_ROWS``, as a row that must launch ``kernels`` and no others."""

    def add(function: KernelRow) -> KernelRow:
        def run(device: torch.device) -> str:
            with recording_launches() as launches:
                is_available = triton_launch.is_available(device)
                text = function(device)
            assert is_available or device.type != "cuda", "Triton is not installed"
            expected = kernels if is_available else ()
            assert set(launches) == set(expected), f"launched {sorted(set(launches))}, expected {sorted(expected)}"
            return f"{len(launches)} launches: {text}" if is_available else f"plain path: {text}"

        KERNEL_ROWS.append(Row(name, run))
        return function

    return add


@contextmanager
def recording_launches() -> Iterator[list[str]]:
    """Yield the names of the kernels that the block launches. Allow kernels on the CPU in Triton's interpreter."""
    names: list[str] = []
    launch, is_available = triton_launch.launch, triton_launch.is_available

    def record_launch(kernel: str, *args: Any, **options: Any) -> None:
        names.append(kernel.partition(":")[2])
        launch(kernel, *args, **options)

    triton_launch.launch = record_launch
    if os.environ.get("TRITON_INTERPRET") == "1" and has_triton():
        triton_launch.is_available = lambda device: True
    try:
        yield names
    finally:
        triton_launch.launch, triton_launch.is_available = launch, is_available


def join(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return all elements of ``outputs`` as one vector."""
    return torch.cat([output.flatten() for output in outputs])


# Quantization to FP8.


@kernel_row(
    "quantization to FP8",
    "row_maxima_kernel",
    "column_maxima_kernel",
    "quantize_rows_kernel",
    "quantize_columns_kernel",
)
def fp8_quantization(device: torch.device) -> str:
    """Bytes and maxima of rows and columns equal those of torch's operators on the CPU, also for NaN and zeros."""
    from megatron.mpu import fp8_quantize

    def bits(x: torch.Tensor) -> torch.Tensor:
        """Return the bits of ``x`` as integers; 1 for every NaN, whose sign is not defined."""
        return x.view(torch.uint8 if x.itemsize == 1 else torch.int32).masked_fill(x.float().isnan(), 1)

    def quantize(x: torch.Tensor) -> list[torch.Tensor]:
        rows, columns = fp8_quantize.row_maxima(x), fp8_quantize.column_maxima(x)
        quantized = fp8_quantize.quantize_rows(x, rows), fp8_quantize.quantize_columns(x, columns)
        return [bits(tensor) for tensor in (rows, columns, *quantized)]

    x = random(0, 70, 5000, dtype=BF16).to(BF16) * torch.logspace(-20, 4, 70).unsqueeze(1).to(BF16)
    x[3], x[5, 7], x[6, 9] = 0.0, float("nan"), float("inf")
    actual = quantize(x.to(device))
    with plain_path():
        expected = quantize(x)
    equal = [torch.equal(a.cpu(), b) for a, b in zip(actual, expected, strict=True)]
    assert all(equal), f"equal row maxima, column maxima, rows, columns: {equal} (allowed: equal bytes only)"
    return "the same bytes as on the CPU"


@contextmanager
def plain_path() -> Iterator[None]:
    """Compute with torch's operators in the block, also in Triton's interpreter."""
    is_available, triton_launch.is_available = triton_launch.is_available, lambda device: False
    try:
        yield
    finally:
        triton_launch.is_available = is_available


# Rotary positions.

NUM_GROUPS, HEADS_PER_GROUP, HEAD_SIZE, LENGTH, BATCH_SIZE = 2, 2, 48, 37, 2
NUM_HEADS = NUM_GROUPS * HEADS_PER_GROUP


@kernel_row("rotary positions of packed heads", "rotary_kernel")
def rotary_packed(device: torch.device) -> str:
    """Grouped queries, keys and values of one tensor; backward writes their gradient in one pass."""
    from megatron.ops.fused_rotary import split_and_rotate
    from megatron.ops.positions import Rotary, apply_rotary, rotary_cos_sin

    def plain(groups: torch.Tensor) -> torch.Tensor:
        heads = groups.split([HEADS_PER_GROUP, 1, 1], dim=3)
        query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in heads)
        angles = rotary_cos_sin(Rotary(head_size=HEAD_SIZE), query)
        return join((apply_rotary(query, *angles), apply_rotary(key, *angles), value))

    def call(groups: torch.Tensor) -> torch.Tensor:
        if not triton_launch.is_available(device):
            return plain(groups)
        angles = rotary_cos_sin(Rotary(head_size=HEAD_SIZE), groups.select(3, 0).permute(1, 2, 0, 3))
        return join(split_and_rotate(groups, *angles))

    groups = random(0, LENGTH, BATCH_SIZE, NUM_GROUPS, HEADS_PER_GROUP + 2, HEAD_SIZE, dtype=BF16)
    return compare_with_fp64(call, plain, {"packed": groups}, random(1, groups.numel(), dtype=BF16), device)


@kernel_row("rotary positions per sample, of half of each head", "rotary_kernel")
def rotary_separate(device: torch.device) -> str:
    """Queries and keys of separate tensors, as after their norms."""
    from megatron.ops.fused_rotary import rotate
    from megatron.ops.positions import Rotary, apply_rotary, rotary_cos_sin

    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH).flip(0) + 5])
    rotary = Rotary(head_size=HEAD_SIZE, percent=0.5)
    inputs = {
        "query": random(0, BATCH_SIZE, NUM_HEADS, LENGTH, HEAD_SIZE, dtype=BF16),
        "key": random(1, LENGTH, BATCH_SIZE, NUM_GROUPS, HEAD_SIZE, dtype=BF16),
    }

    def plain(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        angles = rotary_cos_sin(rotary, query, positions, LENGTH + 5)
        return join((apply_rotary(query, *angles), apply_rotary(key.permute(1, 2, 0, 3), *angles)))

    def call(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if not triton_launch.is_available(device):
            return plain(query, key)
        angles = rotary_cos_sin(rotary, query, positions.to(device), LENGTH + 5)
        return join(rotate(query, key.permute(1, 2, 0, 3), *angles))

    factor = random(2, sum(tensor.numel() for tensor in inputs.values()), dtype=BF16)
    return compare_with_fp64(call, plain, inputs, factor, device)


# Gated activations.

FFN_SIZE = 1003
"""Odd, so that programs process parts of two rows."""
GATED_KERNELS = ("gated_forward_kernel", "gated_backward_kernel")


def activate(name: str, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the gated activation ``name`` by torch's operators."""
    return (F.gelu(gate, approximate="tanh") if name == "gated-gelu" else F.silu(gate)) * value


def _gated_rows(name: str) -> None:
    def run_kernel(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from megatron.ops.gated_activation import gated_activation

        is_available = triton_launch.is_available(gate.device)
        return gated_activation(name, gate, value) if is_available else activate(name, gate, value)

    @kernel_row(f"{name} of interleaved columns", *GATED_KERNELS)
    def interleaved(device: torch.device) -> str:
        """Gate and value are views of one product, which the kernels read and whose gradient they write."""
        from megatron.ops.gated_activation import split

        return compare_with_fp64(
            lambda pairs: run_kernel(*split(pairs)),
            lambda pairs: activate(name, *pairs.unflatten(-1, (-1, 2)).unbind(-1)),
            {"pairs": random(0, 5, 2, 2 * FFN_SIZE, dtype=BF16, scale=2)},
            random(1, 5, 2, FFN_SIZE, dtype=BF16),
            device,
        )

    @kernel_row(f"{name} of two tensors", *GATED_KERNELS)
    def separate(device: torch.device) -> str:
        """Gate and value of different tensors, which are interleaved first."""
        return compare_with_fp64(
            run_kernel,
            lambda gate, value: activate(name, gate, value),
            {"gate": random(0, 5, 2, FFN_SIZE, dtype=BF16, scale=2), "value": random(1, 5, 2, FFN_SIZE, dtype=BF16)},
            random(2, 5, 2, FFN_SIZE, dtype=BF16),
            device,
        )

    @kernel_row(f"feed-forward layer with {name} and interleaved rows", *GATED_KERNELS)
    def layer(device: torch.device) -> str:
        """One product with the weight whose even rows are gates and whose odd rows are values."""
        from megatron.models.common.model_args import ModelArgs
        from megatron.models.common.parallel_context import ParallelContext
        from megatron.models.common.transformer import MLP

        hidden, ffn = 64, 96
        args = ModelArgs(
            num_layers=1, hidden_size=hidden, num_attention_heads=1, vocab_size=8, max_position_embeddings=8,
            kv_hidden_size=hidden, ff_hidden_size=ffn, hidden_bias=False, activation=name,
        )  # fmt: skip
        mlp = MLP(args, ParallelContext()).to(device)
        inputs = {
            "x": random(0, 17, 2, hidden, dtype=BF16),
            "up": random(1, 2 * ffn, hidden, dtype=BF16, scale=0.2),
            "down": random(2, hidden, ffn, dtype=BF16, scale=0.2),
        }

        def call(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            weights = {"up.weight": up, "down.weight": down}
            output: torch.Tensor = torch.func.functional_call(mlp, weights, (x,))
            return output

        def plain(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return activate(name, x @ up[0::2].t(), x @ up[1::2].t()) @ down.t()

        return compare_with_fp64(call, plain, inputs, random(3, 17, 2, hidden, dtype=BF16), device)


_gated_rows("gated-silu")
_gated_rows("gated-gelu")


# Residual connection and norm.


def _norm_row(name: str, *, is_centred: bool = False, is_offset: bool = False) -> None:
    @kernel_row(name, "norm_forward_kernel", "norm_backward_kernel")
    def run(device: torch.device) -> str:
        from megatron.models.common.norms import LayerNorm, RMSNorm, add_and_norm
        from megatron.models.common.parallel_context import ParallelContext

        width = 1000
        norm: Any = LayerNorm(width, 1e-5) if is_centred else RMSNorm(width, 1e-5, is_offset)
        norm.to(device)
        inputs = {
            "x": random(0, 33, 2, width, dtype=BF16),
            "branch": random(1, 33, 2, width, dtype=BF16),
            "weight": (float(not is_offset) + random(2, width, scale=0.1)).to(BF16).double(),
        }
        if is_centred:
            inputs["bias"] = random(3, width, dtype=BF16, scale=0.1)

        def call(x: torch.Tensor, branch: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            for parameter, value in zip(("weight", "bias"), weights, strict=False):
                delattr(norm, parameter)
                setattr(norm, parameter, value)
            return join(add_and_norm(norm, x, branch, ParallelContext()))

        def plain(x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
            total = x + branch
            total = total + (total.detach().to(BF16).double() - total.detach())  # the residual is rounded
            scale = 1 + weight if is_offset else weight
            if is_centred:
                return join((total, F.layer_norm(total, (width,), scale, *biases, 1e-5)))
            return join((total, F.rms_norm(total, (width,), scale, 1e-5)))

        return compare_with_fp64(call, plain, inputs, random(4, 2 * 33 * 2 * width, dtype=BF16), device)


_norm_row("residual and RMSNorm")
_norm_row("residual and RMSNorm with offset", is_offset=True)
_norm_row("residual and LayerNorm", is_centred=True)


# Cross-entropy.

NUM_TOKENS, NUM_COLUMNS, WIDTH = 50, 5003, 5008
"""Logits: more than one block of columns, the last ones of which are excluded."""
STATISTICS_FACTOR = 10.0
"""Factor of the fp32 tolerance: the error of an exponential is the absolute error of its argument."""


def _softmax_row(
    name: str, dtype: torch.dtype, grad_dtype: torch.dtype, *, has_bias: bool = False, cap: float = 0.0
) -> None:
    @kernel_row(name, "statistics_kernel", "gradient_kernel")
    def run(device: torch.device) -> str:
        from megatron.mpu.chunk_softmax import FusedSoftmax, TorchSoftmax

        logits, factor = random(0, NUM_TOKENS, WIDTH, dtype=dtype, scale=2), random(1, NUM_TOKENS, dtype=FP32)
        logits[:, NUM_COLUMNS:] = 64.0
        bias = random(2, WIDTH, dtype=dtype) if has_bias else torch.zeros(WIDTH, dtype=FP64)
        targets = torch.arange(NUM_TOKENS) * 97 % NUM_COLUMNS
        targets[:2] = torch.tensor([-3, NUM_COLUMNS + 1])  # tokens of other ranks' shards of the vocabulary
        expected_statistics, expected_gradient = softmax_in_fp64(logits + bias, targets, factor, cap)
        device_logits = logits.to(device, dtype)
        softmax: TorchSoftmax | FusedSoftmax
        if triton_launch.is_available(device):
            device_bias = bias.to(device, dtype) if has_bias else None
            softmax = FusedSoftmax(device_logits, targets.to(device), NUM_COLUMNS, bias=device_bias, cap=cap)
        else:
            wide_logits = (logits + bias).to(device, FP32)
            softmax = TorchSoftmax(wide_logits, targets.to(device), NUM_COLUMNS, cap=cap, needs_gradient=True)
        exp_factor = (factor / expected_statistics[1]).to(device, FP32)
        gradient = softmax.gradient(factor.to(device, FP32), exp_factor, grad_dtype)
        assert not gradient[:, NUM_COLUMNS:].any(), "excluded columns have a gradient"
        names = ("maximum", "sum", "target's logit")
        text = compare(
            dict(zip(names, softmax.statistics, strict=True)),
            dict(zip(names, expected_statistics, strict=True)),
            FP32,
            STATISTICS_FACTOR,
        )
        tolerance_factor = STATISTICS_FACTOR if grad_dtype == FP32 else 1.0
        gradient_text = compare({"gradient": gradient}, {"gradient": expected_gradient}, grad_dtype, tolerance_factor)
        return f"{text}, {gradient_text}"


def softmax_in_fp64(
    logits: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the statistics [3, c] and the gradient [c, width] of ``chunk_softmax`` in fp64.

    Shapes:
        logits  [c, width]
        targets [c]; outside of the first ``NUM_COLUMNS`` columns for tokens of other ranks
        factor  [c]
    """
    capped = cap * torch.tanh(logits / cap) if cap else logits
    real = capped[:, :NUM_COLUMNS]
    is_local = (targets >= 0) & (targets < NUM_COLUMNS)
    one_hot = F.one_hot(targets.where(is_local, 0), NUM_COLUMNS) * is_local.unsqueeze(1)
    maximum = real.amax(1)
    exp_sum = (real - maximum.unsqueeze(1)).exp().sum(1)
    gradient = factor.unsqueeze(1) * (real.softmax(1) - one_hot)
    if cap:
        gradient = gradient * (1 - (real / cap).square())
    return torch.stack([maximum, exp_sum, (real * one_hot).sum(1)]), F.pad(gradient, (0, WIDTH - NUM_COLUMNS))


_softmax_row("cross-entropy of bf16 logits", BF16, BF16)
_softmax_row("cross-entropy of fp32 logits with a bf16 gradient", FP32, BF16)
_softmax_row("cross-entropy of fp32 logits, gradient in their memory", FP32, FP32)
_softmax_row("cross-entropy of fp32 logits with bias and soft-cap", FP32, BF16, has_bias=True, cap=20.0)


@kernel_row("cross-entropy with z-loss of all logits at once", "statistics_kernel", "gradient_kernel")
def cross_entropy_with_z_loss(device: torch.device) -> str:
    """The loss without chunks, whose logits are saved for backward."""
    from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy

    z_loss = 0.01
    targets = (torch.arange(NUM_TOKENS) * 97 % NUM_COLUMNS).view(-1, 2)

    def call(logits: torch.Tensor) -> torch.Tensor:
        losses, _ = vocab_parallel_cross_entropy(logits, targets.to(device), vocab_size=NUM_COLUMNS, z_loss=z_loss)
        return losses.to(logits.dtype)

    def plain(logits: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        z_losses = z_loss * logits.logsumexp(-1).square()
        return losses + z_losses - z_losses.detach()  # only the gradient contains the z-loss

    logits = random(0, *targets.shape, NUM_COLUMNS, dtype=BF16, scale=2)
    return compare_with_fp64(call, plain, {"logits": logits}, random(1, *targets.shape, dtype=BF16), device)


@kernel_row("fp32 gradient of the head's table over chunks", "statistics_kernel", "gradient_kernel")
def table_gradient(device: torch.device) -> str:
    """Products that add a chunk's gradient of the table to the fp32 sum; the first one overwrites it.

    The gradients of the logits are rounded to bf16, as in the products.
    """
    from megatron.mpu.linear_cross_entropy import accumulates_in_product, linear_cross_entropy

    tokens, vocab, hidden = 96, 211, 64
    x, table = random(0, tokens, hidden, dtype=BF16), random(1, vocab, hidden, dtype=BF16, scale=0.2)
    targets, weights = torch.arange(tokens) * 7 % vocab, 1 + random(2, tokens, dtype=FP32, scale=0.1)
    weights = weights.to(FP32).double()
    leaf, table_leaf = (tensor.to(device, BF16).requires_grad_() for tensor in (x, table))
    loss = linear_cross_entropy(
        leaf, table_leaf, targets.to(device), weights.to(device, FP32), vocab_size=vocab, chunk_tokens=40
    )
    _, gradient, _ = loss.grad_fn.saved_tensors
    assert gradient.dtype == FP32, f"the gradient of the table is {gradient.dtype}"
    logits_gradient = weights.unsqueeze(1) * ((x @ table.t()).softmax(1) - F.one_hot(targets, vocab))
    expected = logits_gradient.to(BF16).double().t() @ x
    # 100 times the fp32 tolerance: fp32 and fp64 round a few of the logits' gradients to different bf16 numbers
    is_exact = accumulates_in_product(leaf, FP32)
    text = compare({"dtable": gradient}, {"dtable": expected}, FP32 if is_exact else BF16, 100 if is_exact else 1)
    return f"{text}, accumulated {'by the products' if is_exact else 'after 16-bit products'}"
