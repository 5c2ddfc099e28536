"""Putting off the gradients of weights, so that the previous stage gets its own sooner.

While a ``WeightGradStore`` is active, ``torch.nn.functional.linear`` on a weight that is a leaf (so ``nn.Linear``, and
every parallel layer that calls it) runs as an autograd function of ours. In a ``BackwardInput`` that returns the
gradient of its input alone and notes what the weight's needs; ``BackwardWeight`` computes it later, through the same
``AccumulateGrad`` node, so that hooks and sums are as ever, to the bit. A user's model is not changed. It is the name
in torch's module that is swapped meanwhile, not a ``TorchFunctionMode`` set: a mode is off inside ``backward``, where
recompute runs layers again, and on GPUs that happens in another thread.

What is no such call (norms, embeddings, convolutions, linear layers under autocast or ``torch.compile``) has its whole
backward run with the input's; ``WeightGradStore.describe_split`` says which parameters those are.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _PutOff:
    """One linear layer's call whose weight still waits for its gradient."""

    x: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def leaves(self) -> list[torch.Tensor]:
        """Return those of weight and bias that are trained."""
        return [leaf for leaf in (self.weight, self.bias) if leaf is not None and leaf.requires_grad]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each leaf: by the products that autograd itself would take.

        Shapes:
            x    [..., input_size]
            grad [..., output_size]
        """
        rows = self.grad.reshape(-1, self.grad.shape[-1])
        made = [rows.t().mm(self.x.reshape(-1, self.x.shape[-1]))] if self.weight.requires_grad else []
        return [*made, rows.sum(0)] if self.bias is not None and self.bias.requires_grad else made


class WeightGradStore:
    """Keeps what is put off, by micro-batch and chunk."""

    def __init__(self) -> None:
        self.split: set[torch.Tensor] = set()
        self._put_off: dict[Key, list[_PutOff]] = {}
        self._current: list[_PutOff] | None = None
        self._anchor = torch.empty(0, requires_grad=True)
        self.plain: Callable[..., torch.Tensor] = F.linear

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let linear layers within be ones that can be split; needed in a backward that recomputes, too."""
        self.plain, F.linear = F.linear, self.linear
        try:
            yield
        finally:
            F.linear = self.plain

    def linear(self, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's own name for it
        """``torch.nn.functional.linear``, to be split where it can be."""
        if torch.is_grad_enabled() and can_split(input, weight, bias):
            return _SplitLinear.apply(input, self._anchor, (weight, bias), self)
        return self.plain(input, weight, bias)

    @contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Let backwards within note the gradients of weights under ``key`` instead of computing them."""
        self._current = self._put_off[key] = []
        try:
            yield
        finally:
            self._current = None

    def note(self, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take note of the gradients that ``weight`` and ``bias`` are owed."""
        if self._current is None:
            raise RuntimeError(
                "a layer must not run backward() on its own weights within forward() under a schedule that splits the "
                'backward: use "pipeline": {"schedule": "1f1b"}, or "interleaved" with chunks'
            )
        self._current.append(_PutOff(x, grad, weight, bias))
        self.split.update(each for each in (weight, bias) if each is not None)

    def waiting(self, key: Key) -> set[torch.Tensor]:
        """Return the weights and biases whose gradients are put off under ``key``."""
        return {leaf for each in self._put_off[key] for leaf in each.leaves()}

    def run(self, key: Key, on_done: Callable[[torch.Tensor], None] | None = None) -> None:
        """Compute what was put off under ``key`` and add it to the gradients; ``on_done`` hears of each leaf's last."""
        every = self._put_off.pop(key)
        left = Counter(leaf for each in every for leaf in each.leaves())
        for each in every:
            leaves = each.leaves()
            torch.autograd.backward([get_gradient_edge(leaf) for leaf in leaves], each.gradients())
            left.subtract(leaves)
            for leaf in leaves:
                if on_done is not None and not left[leaf]:
                    on_done(leaf)

    def clear(self) -> None:
        """Forget what a call that failed has left."""
        self._put_off.clear()
        self._current = None

    def describe_split(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """Return in words which of the named ``parameters`` are split."""
        whole = {name: p.numel() for name, p in parameters.items() if p.requires_grad and p not in self.split}
        every = sum(p.numel() for p in parameters.values() if p.requires_grad)
        if not whole:
            return "the gradients of all its weights are put off"
        share = 100 * (1 - sum(whole.values()) / max(every, 1))
        names = sorted(whole, key=lambda name: -whole[name])
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"the gradients of {share:.1f} % of its weights are put off; with the input's go those of {listed}"


def can_split(x: Any, weight: Any, bias: Any) -> bool:
    """True if the gradient of ``weight`` can be computed apart from that of ``x``."""
    plain = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    if not plain or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return False
    if not (weight.is_leaf and weight.requires_grad and weight.dim() == 2 and x.dtype == weight.dtype):
        return False
    return bias is None or (isinstance(bias, torch.Tensor) and bias.is_leaf)


class _SplitLinear(torch.autograd.Function):
    """``F.linear`` that tells its splitter, in the backward, what weight and bias are owed.

    The leaves (weight, bias) come in a tuple, where autograd does not see them: it would run their hooks before there
    is a gradient. ``anchor`` makes the output require one in their place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, leaves: Any, splitter: WeightGradStore
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.leaves = leaves  # themselves: recompute hands back detached copies of what is saved
        ctx.splitter = splitter
        return splitter.plain(x, *leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.leaves
        ctx.splitter.note(x, grad, weight, bias)
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = grad.reshape(-1, grad.shape[-1]).mm(weight).view(x.shape)
        return of_input, None, None, None
