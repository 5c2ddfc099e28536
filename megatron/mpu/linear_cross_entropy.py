"""Cross-entropy of hidden states times a word table, in chunks of tokens.

Logits for all tokens are never in memory at the same time. Tensors for a chunk of c tokens:

| tensor | shape | communication over the tensor group |
|---|---|---|
| logits, then their exponentials in the same memory | [c, v/t] | none |
| maximum, sum of exponentials, logit of the target | 3 x [c] | gathered while the next chunk's logits are computed |
| gradients of hidden states and table | [c, h], [v/t, h] | none; the producer of ``x`` reduces its gradient |

Forward computes the gradients while it has the logits. The loss is a scalar, a sum over tokens with weights known in
forward, so backward only multiplies the gradients by the loss gradient. The product with the table is not recomputed,
and [n, h] and [v/t, h] are saved for backward instead of [n, v/t]. Without gradients only the sum is computed.

Precision: everything except the products of 16-bit inputs is computed in fp32 (fp64 for fp64), including the sum of the
table's gradients over chunks.

| product of 16-bit inputs | on CUDA | on other devices |
|---|---|---|
| logits | written in fp32 | in 16 bits, as in a linear layer |
| gradient of the table | accumulated in fp32 by the product | in 16 bits for each chunk, then added in fp32 |
| gradient of hidden states | in 16 bits | in 16 bits |

A 16-bit product for the table gradient is a sum over tokens that could overflow in fp16 at any loss scale. Therefore
the hidden states in this product are divided by a power of two.

On CUDA, Triton kernels compute the softmax in two passes over the logits (``megatron.mpu.chunk_softmax``). With fp32
logits and a bf16 gradient they move 10 bytes per logit; torch operators move 38. Logits in bf16 would save another 4
bytes, but would be rounded to 8 bits.

On GPUs a product is 2 to 4 times slower if rows do not start at multiples of 16 bytes, as with 50,257 logits. On
devices other than the CPU, the logits therefore have additional columns (``aligned_width``), computed from padding rows
of the table or from zeros. They have no probability and no gradient.

Source: Hsu et al. 2024, "Liger kernel", computes gradients in forward on one rank; Wijmans et al. 2024, "Cut your
losses in large-vocabulary language models", recomputes the logits in backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.mpu.chunk_softmax import FusedSoftmax, TorchSoftmax
from megatron.mpu.cross_entropy import softmax_grad_scale, validate_targets
from megatron.mpu.fused_cross_entropy import uses_kernels
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import aligned_width, resize_rows, vocab_range
from megatron.torch_compat import all_gather_single
from tds.linear_function import add_product

FP16_SCALE = 8.0
"""Scale of the logits' gradients in fp16, where a probability of 1e-5 has few bits; divided out in fp32."""
FP16_BOUND = 2.0**15
"""Bound of a chunk's contribution to the table's gradient in fp16: half of the largest fp16 number."""


def linear_cross_entropy(
    x: torch.Tensor,
    table: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    bias: torch.Tensor | None = None,
    cap: float = 0.0,
    divisible_by: int = 1,
    group: Group = SINGLE,
    z_loss: float = 0.0,
    has_kernels: bool = True,
    losses: torch.Tensor | None = None,
) -> Any:
    """Sum ``weights * -log softmax(x table^T + bias)[targets]`` over all positions. Collective.

    With a ``z_loss`` the weighted z-loss sum is returned as a second tensor. As in ``vocab_parallel_cross_entropy``,
    this second sum is not differentiable, and backward through the first sum computes the gradient for both.

    With a ``cap`` each logit y becomes ``cap * tanh(y / cap)``. Without kernels, derivatives for a chunk's capped
    logits, [c, v/t], need additional memory.

    The gradient for ``x`` is a partial sum on each rank, as in a linear layer sharded by output rows. Backward of the
    preceding ``copy_to_tensor_region`` or sequence gather reduces it. Padded table rows get no probability and a zero
    gradient. No gradient flows to ``weights``.

    Shapes:
        x       [..., h], the same on every rank of the group
        table   [v/t, h], padded rows last
        bias    [v/t] or None
        targets [...] token ids below ``vocab_size``; any value if the weight is 0
        weights [...], 0 for ignored tokens
        losses  [...], contiguous, in the dtype of the output
        output  a scalar in fp32 (fp64 for fp64)

    Args:
        chunk_tokens: tokens per chunk, the same on all ranks of the group.
        has_kernels: use the Triton kernels on CUDA if Triton is installed.
        losses: receives the cross-entropy of each position, without weights, if given.

    Raises:
        RuntimeError: in a second backward, because the first one overwrites the gradients.
        ValueError: on a CPU, a token with non-zero weight has a target outside the vocabulary. On other devices the sum
            is NaN instead.
    """
    _, start, num_real = vocab_range(vocab_size, group, divisible_by)
    wide_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    args = _LossArgs(
        targets.reshape(-1) - start, validate_targets(weights.detach().to(wide_dtype), targets, vocab_size).reshape(-1),
        num_real, chunk_tokens, cap, group, z_loss, None if losses is None else losses.view(-1),
        has_backward=torch.is_grad_enabled(),
        uses_kernels=uses_kernels(x, has_kernels),
    )  # fmt: skip
    return _LinearCrossEntropy.apply(x, table, bias, args)


@dataclass(frozen=True)
class _LossArgs:
    """Arguments of the loss.

    ``targets`` [n] are relative to the first token id in this rank's shard, whose table has ``num_real`` rows without
    padding. ``weights`` are [n]. ``losses`` [n] receives the loss of each token, if given. ``has_backward``: gradients
    are enabled. ``uses_kernels``: Triton kernels compute the softmax.
    """

    targets: torch.Tensor
    weights: torch.Tensor
    num_real: int
    chunk_tokens: int
    cap: float
    group: Group
    z_loss: float
    losses: torch.Tensor | None
    has_backward: bool
    uses_kernels: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, args: _LossArgs) -> Any:
        needs = [args.has_backward and needed for needed in ctx.needs_input_grad[:3]]
        chunked_loss = _ChunkedLoss(x.reshape(-1, x.shape[-1]), table, bias, args, needs)
        total = chunked_loss.run()
        table_grad = None if chunked_loss.table_grad is None else chunked_loss.table_grad[: len(table)]
        ctx.save_for_backward(chunked_loss.x_grad, table_grad, chunked_loss.bias_grad)
        ctx.shape, ctx.dtype, ctx.is_used_up = x.shape, x.dtype, False
        if not args.z_loss:
            return total
        ctx.mark_non_differentiable(chunked_loss.total_z_loss)
        return total, chunked_loss.total_z_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.is_used_up:
            raise RuntimeError(
                "the gradients of a chunked loss are computed in forward and overwritten by the first backward. "
                "Run forward again, or disable chunking with --loss-chunk-tokens 0"
            )
        ctx.is_used_up = True
        factor = grads[0] / _grad_scale(ctx.dtype)
        scaled = (None if grad is None else _multiply(grad, factor, ctx.dtype) for grad in ctx.saved_tensors)
        x_grad, table_grad, bias_grad = scaled
        return None if x_grad is None else x_grad.view(ctx.shape), table_grad, bias_grad, None


def _multiply(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``gradient * factor`` in ``dtype``, multiplied in the dtype of ``factor``; may overwrite ``gradient``."""
    if gradient.device.type == "cpu":
        return gradient.to(factor.dtype).mul_(factor).to(dtype)
    out = gradient if gradient.dtype == dtype else gradient.new_empty(gradient.shape, dtype=dtype)
    # one kernel that converts on reading and writing; a factor without dimensions would be rounded to 16 bits
    return torch.mul(gradient, factor.view(1), out=out)


def _grad_scale(dtype: torch.dtype) -> float:
    return FP16_SCALE if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class _PendingChunk:
    """A chunk of tokens ``rows`` whose softmax statistics are being gathered from all ranks.

    ``gathered_stats`` [t, 3, c] contains every rank's ``statistics`` once ``handle`` is done.
    """

    rows: slice
    softmax: TorchSoftmax | FusedSoftmax
    gathered_stats: torch.Tensor
    handle: Any


class _ChunkedLoss:
    """Buffers and running sums in one forward.

    Args:
        needs: whether to compute gradients for x, the table and the bias.
    """

    def __init__(
        self, x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, args: _LossArgs, needs: list[bool]
    ) -> None:
        self.x, self.args = x, args
        self.width = aligned_width(args.num_real, x.device)
        self.table = resize_rows(table, self.width)
        self.bias = None if bias is None else resize_rows(bias, self.width)
        self.wide_dtype = args.weights.dtype
        self.factors = args.weights * _grad_scale(x.dtype)
        self.total, self.total_z_loss = args.weights.new_zeros(()), args.weights.new_zeros(())
        self.x_grad = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        num_rows = max(len(table), self.width)
        self.table_grad = table.new_empty((num_rows, table.shape[1]), dtype=self.wide_dtype) if needs[1] else None
        if self.table_grad is not None:
            # the first chunk overwrites the table's rows if the product accumulates, so only the others are zeroed
            is_overwritten = len(x) and accumulates_in_product(x, self.wide_dtype)
            self.table_grad[self.width if is_overwritten else 0 :].zero_()
        self.bias_grad = torch.zeros_like(bias, dtype=self.wide_dtype) if needs[2] and bias is not None else None

    def run(self) -> torch.Tensor:
        """Compute the weighted loss sum. The gather for a chunk overlaps with the next chunk's logits."""
        pending: deque[_PendingChunk] = deque()
        max_in_flight = 2 if self.args.group.size > 1 else 1
        max_tokens = min(self.args.chunk_tokens, len(self.x))
        buffers = [self.table.new_empty((max_tokens, self.width), dtype=self.wide_dtype) for _ in range(max_in_flight)]
        for idx, rows in enumerate(self._chunks()):
            pending.append(self._start_chunk(rows, buffers[idx % max_in_flight]))
            if len(pending) == max_in_flight:
                self._finish_chunk(pending.popleft())
        while pending:
            self._finish_chunk(pending.popleft())
        return self.total

    def _chunks(self) -> Iterator[slice]:
        for first in range(0, len(self.x), self.args.chunk_tokens):
            yield slice(first, min(first + self.args.chunk_tokens, len(self.x)))

    def _start_chunk(self, rows: slice, buffer: torch.Tensor) -> _PendingChunk:
        args, x, buffer = self.args, self.x[rows], buffer[: rows.stop - rows.start]
        inputs = buffer, args.targets[rows], args.num_real
        softmax: TorchSoftmax | FusedSoftmax
        if args.uses_kernels:
            self._write_logits(x, None, buffer)
            softmax = FusedSoftmax(*inputs, bias=self.bias, cap=args.cap)
        else:
            self._write_logits(x, self.bias, buffer)
            softmax = TorchSoftmax(*inputs, cap=args.cap, needs_gradient=self._needs_gradients())
        return _PendingChunk(rows, softmax, *self._start_gather(softmax.statistics))

    def _write_logits(self, x: torch.Tensor, bias: torch.Tensor | None, buffer: torch.Tensor) -> None:
        """Write ``x table^T + bias`` to ``buffer`` [c, width], whose additional columns align the product."""
        out = buffer if x.dtype == buffer.dtype else None
        if out is None and supports_fp32_output(x):
            logits = torch.mm(x, self.table.t(), out_dtype=buffer.dtype, out=buffer)
            logits = logits if bias is None else logits.add_(bias)
        elif bias is None:
            logits = torch.mm(x, self.table.t(), out=out)
        else:
            logits = torch.addmm(bias, x, self.table.t(), out=out)
        if logits is not buffer:
            buffer.copy_(logits)

    def _needs_gradients(self) -> bool:
        return any(grad is not None for grad in (self.x_grad, self.table_grad, self.bias_grad))

    def _start_gather(self, local_stats: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start an all-gather of ``local_stats`` [3, c]; return its output [t, 3, c] and handle.

        The handle is None if the group has one rank.
        """
        group = self.args.group
        if group.size == 1:
            return local_stats.unsqueeze(0), None
        gathered = local_stats.new_empty((group.size * len(local_stats), local_stats.shape[1]))
        handle = all_gather_single(gathered, local_stats, group=group.handle, async_op=True)
        return gathered.view(group.size, *local_stats.shape), handle

    def _finish_chunk(self, chunk: _PendingChunk) -> None:
        if chunk.handle is not None:
            chunk.handle.wait()
        weights, z_loss = self.args.weights[chunk.rows], self.args.z_loss
        max_logits, exp_sum, target_logits = _combine_statistics(chunk.gathered_stats)  # 3 x [c]
        log_z = exp_sum.log() + max_logits
        losses = log_z - target_logits
        self.total += (losses * weights).sum()
        if self.args.losses is not None:
            self.args.losses[chunk.rows] = losses
        if z_loss:
            self.total_z_loss += (z_loss * log_z.square() * weights).sum()
        if self._needs_gradients():
            factor = self.factors[chunk.rows]
            softmax_factor = factor * softmax_grad_scale(log_z, z_loss) if z_loss else factor
            if self.args.group.size > 1:
                softmax_factor = softmax_factor * (chunk.softmax.statistics[0] - max_logits).exp()
            self._add_gradients(chunk, factor, softmax_factor / exp_sum)

    def _add_gradients(self, chunk: _PendingChunk, factor: torch.Tensor, exp_factor: torch.Tensor) -> None:
        """Compute the logits' gradient; accumulate gradients for x, table and bias.

        Args:
            factor: [c], token weights, times the fp16 scale.
            exp_factor: [c], factor that converts a token's exponentials into its softmax times ``factor`` (with a
                z-loss also times ``softmax_grad_scale``).
        """
        x = self.x[chunk.rows]
        logits_grad = chunk.softmax.gradient(factor, exp_factor, x.dtype)  # [c, width]
        if self.x_grad is not None:
            torch.mm(logits_grad, self.table, out=self.x_grad[chunk.rows])
        if self.table_grad is not None:
            can_overflow = x.dtype == torch.float16 and not accumulates_in_product(x, self.wide_dtype)
            divisor = _fp16_divisor(x, self.args.weights[chunk.rows]) if can_overflow else None
            _add_product(self.table_grad[: self.width], logits_grad.t(), x, divisor, is_first=chunk.rows.start == 0)
        if self.bias_grad is not None:
            self.bias_grad[: self.args.num_real] += chunk.softmax.bias_gradient()


def _combine_statistics(statistics: torch.Tensor) -> Sequence[torch.Tensor]:
    """Combine per-rank softmax statistics, [t, 3, c], into statistics over all columns, 3 x [c]."""
    if len(statistics) == 1:
        return statistics[0].unbind()
    local_maxima, exp_sums, target_logits = statistics.unbind(1)  # 3 x [t, c]
    max_logits = local_maxima.amax(dim=0)
    exp_sum = (exp_sums * (local_maxima - max_logits).exp()).sum(dim=0)
    return max_logits, exp_sum, target_logits.sum(dim=0)


def supports_fp32_output(x: torch.Tensor) -> bool:
    """Return True if torch can write 16-bit matrix products in fp32, without rounding, on the device of ``x``."""
    return x.device.type == "cuda"


def accumulates_in_product(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if products of matrices like ``x`` can be added to a ``dtype`` matrix."""
    return x.dtype == dtype or supports_fp32_output(x)


def _fp16_divisor(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the power of two, at least 1, that ``x`` is divided by so that the table gradient fits fp16.

    The table gradient is the product of the logits' gradient with ``x``. A column of the logits' gradient sums to at
    most ``FP16_SCALE`` times the weight sum. Multiplied by the largest element of ``x``, this bounds each element of
    the product. With 4096 tokens of weight 1, elements up to 1 need no division.
    """
    bound = FP16_SCALE * weights.abs().sum() * x.abs().amax().to(weights.dtype)
    return torch.exp2((bound / FP16_BOUND).log2().ceil().clamp(min=0))


def _add_product(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, divisor: torch.Tensor | None = None, *, is_first: bool
) -> None:
    """Add the product ``a b`` to ``total``.

    Args:
        divisor: divides ``b`` before a 16-bit product and multiplies the product afterwards; None: 1.
        is_first: this is the first product. If products are accumulated in place, ``total`` is uninitialized and is
            overwritten.
    """
    if accumulates_in_product(b, total.dtype):
        add_product(total, a, b, is_first=is_first)
    elif divisor is not None:
        total.addcmul_(torch.mm(a, (b / divisor.to(total.dtype).expand(len(b), 1)).to(b.dtype)), divisor)
    else:
        total += torch.mm(a, b)
