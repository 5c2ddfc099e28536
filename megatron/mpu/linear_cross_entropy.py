"""The loss of hidden states by a word table, in chunks of tokens: the logits of all tokens are never there together.

| of a chunk of c tokens | shape | over the tensor group |
|---|---|---|
| logits, then their exponentials, in one piece of memory | [c, v/t] | |
| the largest, the sum of exponentials, the logit of the target | 3 x [c] | gathered, while the next logits are made |
| gradients of hidden states and table | [c, h], [v/t, h] | left to whoever made ``x`` whole |

The gradients are made in forward, where the logits are: what is returned is one number, a sum over tokens that counts
each by a weight known by then, so backward has nothing to do but multiply them by the one number that comes to it. The
product with the table is not computed again; what is kept from forward to backward is [n, h] and [v/t, h] instead of
[n, v/t]. Without gradients only the sum is computed.

Logits of 16 bits are products in 16 bits, as in a linear layer, on CUDA written in fp32 right away; all else is fp32
(fp64 for fp64), the sum of the table's gradients over chunks included. A chunk's summand is a product in 16 bits, too.
In fp16 it could overflow, a sum over the tokens that no loss scale makes smaller: a power of two, by which its hidden
states are divided, bounds it.

On GPUs a product is 2 to 4 times slower where rows do not begin at multiples of 16 bytes, as those of 50,257 logits.
So off the CPU logits have as many columns more as it takes (``aligned``), with rows of the table that are padding or
zeros: no probability, no gradient.

Source: Hsu et al. 2024, "Liger kernel", has the gradients in forward, for one rank; Wijmans et al. 2024, "Cut your
losses in large-vocabulary language models", makes the logits again in backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.mpu.cross_entropy import known_or_nan, slopes_of_softmax
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.layers import aligned, vocab_range, with_rows
from megatron.torch_compat import all_gather_single

FP16_SCALE = 8.0
"""Gradients of logits are multiplied by it in fp16, where a probability of 1e-5 has few bits, and divided in fp32."""
FP16_LARGEST = 2.0**15
"""What a chunk's summand of the table's gradient may reach in fp16, half of what fp16 holds."""


def linear_cross_entropy(
    x: torch.Tensor,
    table: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    vocab_size: int,
    at_once: int,
    bias: torch.Tensor | None = None,
    cap: float = 0.0,
    divisible_by: int = 1,
    group: Group = SINGLE,
    z_loss: float = 0.0,
) -> Any:
    """Return the sum over all positions of ``weights * -log softmax(x table^T + bias)[targets]``. Collective.

    With a ``z_loss`` return that of the z-losses, too, as ``vocab_parallel_cross_entropy``: the gradient of the first
    sum is that of both.

    With a ``cap`` each logit y is ``cap * tanh(y / cap)``; the slopes of a chunk, [c, v/t], are kept beside it.

    The gradient of ``x`` is this rank's part of a sum over the group, as that of a linear layer cut by its output rows
    is: ``copy_to_tensor_region`` or a gathering of the sequence ahead of it adds the parts up. Padded rows of the table
    get no probability and a gradient of zero. No gradient flows to ``weights``.

    Shapes:
        x       [..., h], the same on every rank of the group
        table   [v/t, h], padded rows last
        bias    [v/t] or None
        targets [...] token ids below ``vocab_size``; any number where the weight is 0
        weights [...], 0 where a token does not count
        output  a scalar in fp32 (fp64 for fp64)

    Args:
        at_once: tokens of a chunk; all ranks of the group must agree.

    Raises:
        RuntimeError: in a second backward, for the first has used the gradients up.
        ValueError: a token that counts has a target outside the vocabulary; not on a CPU: the sum is not a number.
    """
    _, start, num_real = vocab_range(vocab_size, group, divisible_by)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    given = _Given(
        targets.reshape(-1) - start, known_or_nan(weights.detach().to(wide), targets, vocab_size).reshape(-1),
        num_real, at_once, cap, group, z_loss,
        has_backward=torch.is_grad_enabled(),
    )  # fmt: skip
    return _LinearCrossEntropy.apply(x, table, bias, given)


@dataclass(frozen=True)
class _Given:
    """``targets`` count from this rank's first token; they and ``weights`` are [n]."""

    targets: torch.Tensor
    weights: torch.Tensor
    num_real: int
    at_once: int
    cap: float
    group: Group
    z_loss: float
    has_backward: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, given: _Given) -> Any:
        needs = [given.has_backward and needed for needed in ctx.needs_input_grad[:3]]
        work = _Work(x.reshape(-1, x.shape[-1]), table, bias, given, needs)
        total = work.run()
        of_table = None if work.of_table is None else work.of_table[: len(table)]
        ctx.save_for_backward(work.of_x, of_table, work.of_bias)
        ctx.shape, ctx.dtype, ctx.is_used_up = x.shape, x.dtype, False
        if not given.z_loss:
            return total
        ctx.mark_non_differentiable(work.squares)
        return total, work.squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.is_used_up:
            raise RuntimeError(
                "the gradients of a loss in chunks are made in forward and used up by the first backward. "
                "Run forward again, or make the logits whole (--loss-chunk-tokens 0)"
            )
        ctx.is_used_up = True
        factor = grads[0] / _scale(ctx.dtype)
        made = (None if one is None else _times(one, factor, ctx.dtype) for one in ctx.saved_tensors)
        of_x, of_table, of_bias = made
        return None if of_x is None else of_x.view(ctx.shape), of_table, of_bias, None


def _times(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``gradient * factor``, multiplied in the format of ``factor``; the memory of ``gradient`` may be taken."""
    return gradient.to(factor.dtype).mul_(factor).to(dtype)


def _scale(dtype: torch.dtype) -> float:
    return FP16_SCALE if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class _Begun:
    """A chunk whose numbers of all ranks, [t, 3, c], are on their way.

    ``exponentials`` are of this rank, [c, v/t]; ``room`` is their memory, which may have columns more.
    """

    rows: slice
    room: torch.Tensor
    exponentials: torch.Tensor
    slopes: torch.Tensor | None  # of capped logits, where gradients are made
    local: torch.Tensor
    is_here: torch.Tensor
    own: torch.Tensor
    every: torch.Tensor
    handle: Any


class _Work:
    """One forward: its memory, and what it adds up.

    Args:
        needs: whether gradients of x, table and bias are made.
    """

    def __init__(
        self, x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, given: _Given, needs: list[bool]
    ) -> None:
        self.x, self.given = x, given
        self.width = aligned(given.num_real, x.device)
        self.table = with_rows(table, self.width)
        self.bias = None if bias is None else with_rows(bias, self.width)
        self.wide = given.weights.dtype
        self.total, self.squares = given.weights.new_zeros(()), given.weights.new_zeros(())
        self.of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        rows = max(len(table), self.width)
        self.of_table = table.new_empty((rows, table.shape[1]), dtype=self.wide) if needs[1] else None
        if self.of_table is not None:
            untouched = self.width if len(x) and table.dtype == self.wide else 0  # the first product sets the rest
            self.of_table[untouched:].zero_()
        self.of_bias = torch.zeros_like(bias, dtype=self.wide) if needs[2] and bias is not None else None

    def run(self) -> torch.Tensor:
        """Return the sum; a chunk's numbers travel while the next one's logits are made."""
        waiting: deque[_Begun] = deque()
        most = 2 if self.given.group.size > 1 else 1
        tokens = min(self.given.at_once, len(self.x))
        room = [self.table.new_empty((tokens, self.width), dtype=self.wide) for _ in range(most)]
        for number, rows in enumerate(self._chunks()):
            waiting.append(self._begin(rows, room[number % most]))
            if len(waiting) == most:
                self._end(waiting.popleft())
        while waiting:
            self._end(waiting.popleft())
        return self.total

    def _chunks(self) -> Iterator[slice]:
        for first in range(0, len(self.x), self.given.at_once):
            yield slice(first, min(first + self.given.at_once, len(self.x)))

    def _begin(self, rows: slice, room: torch.Tensor) -> _Begun:
        room = room[: rows.stop - rows.start]
        logits = self._logits(self.x[rows], room)  # [c, v/t]
        slopes = self._cap(logits) if self.given.cap else None
        targets = self.given.targets[rows]
        is_here = (targets >= 0) & (targets < self.given.num_real)
        local = targets.masked_fill(~is_here, 0).unsqueeze(-1)
        if self.given.num_real:
            largest = logits.amax(dim=-1)
            at_target = logits.gather(-1, local).squeeze(-1).masked_fill(~is_here, 0.0)
        else:
            largest, at_target = self.total.new_full((len(logits),), float("-inf")), self.total.new_zeros(len(logits))
        exponentials = logits.sub_(largest.unsqueeze(-1)).exp_()
        own = torch.stack([largest, exponentials.sum(dim=-1), at_target])  # [3, c]
        every, handle = self._gathered(own)
        return _Begun(rows, room, exponentials, slopes, local, is_here, own, every, handle)

    def _logits(self, x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Return the logits [c, v/t] in ``room``, which has columns beside them where the product is to be aligned."""
        out = room if x.dtype == room.dtype else None
        if out is None and writes_wide(x):
            made = torch.mm(x, self.table.t(), out_dtype=room.dtype, out=room)
            made = made if self.bias is None else made.add_(self.bias)
        elif self.bias is None:
            made = torch.mm(x, self.table.t(), out=out)
        else:
            made = torch.addmm(self.bias, x, self.table.t(), out=out)
        return (made if made is room else room.copy_(made))[:, : self.given.num_real]

    def _cap(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Cap ``logits`` in place; return by how much each of them grows with what it was, if that is asked for."""
        tangents = logits.div_(self.given.cap).tanh_()
        slopes = 1.0 - tangents.square() if self._needs_gradients() else None
        tangents.mul_(self.given.cap)
        return slopes

    def _needs_gradients(self) -> bool:
        return any(one is not None for one in (self.of_x, self.of_table, self.of_bias))

    def _gathered(self, own: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return where ``own`` of all ranks will be, [t, 3, c], and what to wait for, if anything."""
        group = self.given.group
        if group.size == 1:
            return own.unsqueeze(0), None
        every = own.new_empty((group.size * len(own), own.shape[1]))
        handle = all_gather_single(every, own, group=group.handle, async_op=True)
        return every.view(group.size, *own.shape), handle

    def _end(self, begun: _Begun) -> None:
        if begun.handle is not None:
            begun.handle.wait()
        weights = self.given.weights[begun.rows]
        largest, sums, at_target = begun.every.unbind(1)  # 3 x [t, c]
        top = largest.amax(dim=0)
        denominator = (sums * (largest - top).exp()).sum(dim=0)
        losses = denominator.log() + top - at_target.sum(dim=0)
        self.total += (losses * weights).sum()
        z_loss, log_z = self.given.z_loss, denominator.log() + top
        if z_loss:
            self.squares += (z_loss * log_z.square() * weights).sum()
        if self._needs_gradients():
            factor = weights * _scale(self.x.dtype)
            of_softmax = factor * slopes_of_softmax(log_z, z_loss) if z_loss else factor
            self._add_gradients(begun, factor, of_softmax * (begun.own[0] - top).exp() / denominator)

    def _add_gradients(self, begun: _Begun, factor: torch.Tensor, of_exponentials: torch.Tensor) -> None:
        """Make the exponentials the gradient of the logits, and of it the others."""
        wide = begun.exponentials.mul_(of_exponentials.unsqueeze(-1))  # [c, v/t], softmax times weight
        if self.given.num_real:
            wide.scatter_add_(-1, begun.local, -(factor * begun.is_here).unsqueeze(-1))
        if begun.slopes is not None:
            wide.mul_(begun.slopes)
        x = self.x[begun.rows]
        of_logits = self._aligned_gradient(begun.room, wide, x.dtype)  # [c, width]
        if self.of_x is not None:
            torch.mm(of_logits, self.table, out=self.of_x[begun.rows])
        if self.of_table is not None:
            power = _power(x, self.given.weights[begun.rows]) if x.dtype == torch.float16 else None
            _add_product(self.of_table[: self.width], of_logits.t(), x, power, is_first=begun.rows.start == 0)
        if self.of_bias is not None:
            self.of_bias[: self.given.num_real] += wide.sum(dim=0)

    def _aligned_gradient(self, room: torch.Tensor, wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of the logits in the format of the products, with zeros in the columns beside them."""
        if self.width == self.given.num_real:
            return wide.to(dtype)
        if dtype == room.dtype:
            made = room
        else:
            made = room.new_empty(room.shape, dtype=dtype)
            made[:, : self.given.num_real].copy_(wide)
        made[:, self.given.num_real :].zero_()
        return made


def writes_wide(x: torch.Tensor) -> bool:
    """Return whether torch can write a product of 16 bits on this device in fp32: logits keep all their bits."""
    return x.device.type == "cuda" and "dtype_out" in torch.ops.aten.mm.overloads()


def _power(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the power of two, 1 or more, that ``x`` is divided by in the product with a chunk's gradient of logits.

    A column of that gradient adds up to ``FP16_SCALE`` times the sum of weights at most, and a number of the product to
    as much times the largest of ``x``, which stays 1 or more where 4096 tokens count once each.
    """
    bound = FP16_SCALE * weights.abs().sum() * x.abs().amax().to(weights.dtype)
    return torch.exp2((bound / FP16_LARGEST).log2().ceil().clamp(min=0))


def _add_product(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, power: torch.Tensor | None = None, *, is_first: bool
) -> None:
    """Add ``a b`` to ``total``; 16-bit factors are multiplied in 16 bits, ``b`` divided by ``power`` meanwhile.

    Args:
        is_first: ``total`` holds nothing yet where formats are the same.
    """
    if total.dtype == b.dtype:
        torch.addmm(total, a, b, beta=0 if is_first else 1, out=total)
    elif power is not None:
        total.addcmul_(torch.mm(a, (b / power.to(total.dtype).expand(len(b), 1)).to(b.dtype)), power)
    else:
        total += torch.mm(a, b)
