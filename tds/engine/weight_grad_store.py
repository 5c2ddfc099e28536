"""Putting off the gradients of weights, so that the previous stage gets its own sooner.

Three kinds of work wait in a ``WeightGradStore`` from a ``BackwardInput`` to its ``BackwardWeight``:

* calls of ``tds.linear_function.linear`` in our layers, and of ``torch.nn.functional.linear`` in the user's, on a leaf
  weight: the input and the gradient of the output are kept;
* modules with ``backward_dw()``, as Transformer Engine's and Megatron's layers and our experts have it;
* with "backward_split": "graph" what autograd's graph allows (``graph_split``): the whole graph is kept.

While a store is active, both run as an autograd function of ours. In a ``BackwardInput`` it returns the gradient of its
input only and keeps what the gradients of weight and bias need. Each gradient is accumulated through its weight's
``AccumulateGrad`` node, so that hooks and sums are the usual ones, to the bit.

``tds.linear_function.linear`` asks for the active store. Users' layers, ``nn.Linear`` above all, call
``torch.nn.functional.linear``: the name in torch's module is replaced meanwhile, so that a user's model needs no
change. A ``TorchFunctionMode`` would be off inside ``backward``, where recompute runs layers again, and on GPUs that
happens in another thread.

A module's ``backward_dw()`` computes the gradients of its weights for the oldest of its backwards that waits, and
leaves them in ``grad``. It is called once for each forward in a micro-batch, of the outermost module that has it. One
that may also compute them at once has an attribute ``delay_wgrad``, which is True while forwards run whose backward is
split. One without it, such as ``te.Linear(delay_wgrad_compute=True)``, always waits: behind whole backwards it is
called, too.

What none of these covers has its whole backward run with the input's; ``WeightGradStore.describe_split`` says which
parameters those are.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2; Megatron-LM's ``delay_wgrad_compute``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tds.engine import graph_split
from tds.linear_function import deferring_weight_grads, is_plain_product, share_of
from tds.param_info import info_of

Key = tuple[int, int]


class PutOff(Protocol):
    """Work that waits for its ``BackwardWeight``."""

    def leaves(self) -> Sequence[torch.Tensor]:
        """Return the weights that wait for it."""

    def run(self) -> None:
        """Add to their gradients, through their ``AccumulateGrad`` nodes."""


@dataclass(frozen=True, slots=True)
class _LinearCall:
    """One linear layer's call."""

    x: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def leaves(self) -> list[torch.Tensor]:
        return [leaf for leaf in (self.weight, self.bias) if leaf is not None and leaf.requires_grad]

    def run(self) -> None:
        """Take the products that autograd itself would take, or those of ``tds.linear_function``.

        Shapes:
            x    [..., input_size]
            grad [..., output_size]
        """
        rows, inputs = self.grad.reshape(-1, self.grad.shape[-1]), self.x.reshape(-1, self.x.shape[-1])
        made: dict[torch.Tensor, torch.Tensor] = {}
        for leaf in self.leaves():
            if leaf is self.bias:
                made[leaf] = rows.sum(0)
            elif (add_product := info_of(leaf).add_product) is not None:
                add_product(rows, inputs)
            else:
                made[leaf] = rows.t().mm(inputs)
        torch.autograd.backward([get_gradient_edge(leaf) for leaf in made], list(made.values()))


@dataclass(frozen=True, slots=True)
class _ModuleCalls:
    """The forwards of a module with ``backward_dw()`` in one micro-batch."""

    module: Any
    times: int

    def leaves(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def run(self) -> None:
        """Add up what the calls leave in ``grad``: some modules write there only where nothing is."""
        parameters = self.leaves()
        held = [parameter.grad for parameter in parameters]
        made: dict[torch.Tensor, torch.Tensor] = {}
        for _ in range(self.times):
            for parameter in parameters:
                parameter.grad = None
            self.module.backward_dw()
            for parameter in parameters:
                if parameter.grad is not None:
                    made[parameter] = parameter.grad if parameter not in made else made[parameter] + parameter.grad
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        if made:
            torch.autograd.backward([get_gradient_edge(parameter) for parameter in made], list(made.values()))


class DelayedModules:
    """The outermost modules of a stage that have ``backward_dw()``, and their forwards by micro-batch and chunk.

    Args:
        current: the (micro-batch, chunk) whose forward runs in training; None: none does, so that recompute, which is
            in a backward, and evaluation count for nothing.

    Attributes:
        always_wait: some wait for ``backward_dw()`` behind a whole backward, too.
    """

    def __init__(self, module: nn.Module | None, current: Callable[[], Key | None]) -> None:
        every = [] if module is None else list(_outermost(module))
        self._of_choice = [each for each in every if hasattr(each, "delay_wgrad")]
        self.always_wait = len(self._of_choice) < len(every)
        self._current = current
        self._calls: dict[Key, Counter[Any]] = {}
        for each in every:
            each.register_forward_hook(self._called)

    @contextmanager
    def delaying(self) -> Iterator[None]:
        """Let modules that can do either delay the gradients of their weights for forwards within."""
        for each in self._of_choice:
            each.delay_wgrad = True  # type: ignore[assignment]
        try:
            yield
        finally:
            for each in self._of_choice:
                each.delay_wgrad = False  # type: ignore[assignment]

    def waiting(self, key: Key) -> list[_ModuleCalls]:
        """Return what the backward of ``key`` has left to be done, the last module first; once."""
        calls = self._calls.pop(key, Counter())
        return [_ModuleCalls(module, times) for module, times in reversed(calls.items())]

    def clear(self) -> None:
        """Forget all forwards."""
        self._calls.clear()

    def _called(self, module: Any, *_: Any) -> None:
        key = self._current()
        if key is not None and getattr(module, "delay_wgrad", True):
            self._calls.setdefault(key, Counter())[module] += 1


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if callable(getattr(module, "backward_dw", None)):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


class WeightGradStore:
    """Keeps what is put off, by micro-batch and chunk.

    Args:
        module: the stage's layers, for those that put off by themselves; None: there are none.
        current: as of ``DelayedModules``.
        by_graph: also put off what autograd's graph allows; None: once it shows that linear layers and modules with
            ``backward_dw()`` have less than half of the weights that could be.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        current: Callable[[], Key | None] = lambda: None,
        *,
        by_graph: bool | None = False,
    ) -> None:
        self.split: set[torch.Tensor] = set()
        self.modules = DelayedModules(module, current)
        self.by_graph = by_graph
        self._put_off: dict[Key, list[PutOff]] = {}
        self._current: list[PutOff] | None = None
        self._anchor = torch.empty(0, requires_grad=True)
        self.plain: Callable[..., torch.Tensor] = F.linear

    @contextmanager
    def active(self) -> Iterator[None]:
        """Split linear layers in the block where possible; needed around backward passes that recompute, too."""
        self.plain, F.linear = F.linear, self.linear
        try:
            with deferring_weight_grads(self), self.modules.delaying():
                yield
        finally:
            F.linear = self.plain

    def linear(self, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's own name for it
        """The replacement of ``torch.nn.functional.linear`` for layers of users."""
        if torch.is_grad_enabled() and is_plain_product(input, weight, bias):
            return self.split_linear(input, weight, bias)
        return self.plain(input, weight, bias)

    def split_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x W^T + b``; its backward pass keeps what the gradients of ``weight`` and ``bias`` need."""
        product: torch.Tensor = _SplitLinear.apply(x, self._anchor, (weight, bias), self)
        return product

    @contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Let backwards within note the gradients of weights under ``key`` instead of computing them."""
        self._current = self._put_off[key] = []
        try:
            yield
        finally:
            self._current = None
        self._put_off[key] += self.modules.waiting(key)
        self.split.update(leaf for each in self._put_off[key] for leaf in each.leaves())

    def backward(self, roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        """Run autograd from ``roots``, within ``deferring``; put off by the graph what else can be.

        Args:
            roots: a loss, or gradient edges with their ``grads``.
            inputs: the leaves whose gradients the previous stage waits for; none on the first.
        """
        if self.by_graph is None and inputs:
            self.by_graph = graph_split.pays(roots, inputs, self._anchor)
        if self.by_graph and inputs:
            self._waiting_now().extend(graph_split.backward(roots, grads, inputs, self._anchor))
        elif roots:
            torch.autograd.backward(roots, grads)

    def note(self, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take note of the gradients that ``weight`` and ``bias`` are owed."""
        self._waiting_now().append(_LinearCall(x, grad, weight, bias))

    def _waiting_now(self) -> list[PutOff]:
        if self._current is None:
            raise RuntimeError(
                "a layer must not run backward() on its own weights within forward() under a schedule that splits the "
                'backward: use "pipeline": {"schedule": "1f1b"}, or "interleaved" with chunks'
            )
        return self._current

    def waiting(self, key: Key) -> set[torch.Tensor]:
        """Return the weights and biases whose gradients are put off under ``key``."""
        return {leaf for each in self._put_off[key] for leaf in each.leaves()}

    def run(self, key: Key, on_done: Callable[[torch.Tensor], None] | None = None) -> None:
        """Compute what was put off under ``key`` and add it to the gradients; ``on_done`` hears of each leaf's last."""
        every = self._put_off.pop(key)
        left = Counter(leaf for each in every for leaf in each.leaves())
        with self.active() if self.by_graph else nullcontext():  # layers may be computed again
            while every:
                each = every.pop(0)  # and let go what it holds
                leaves = each.leaves()
                each.run()
                left.subtract(leaves)
                for leaf in leaves:
                    if on_done is not None and not left[leaf]:
                        on_done(leaf)

    def clear(self) -> None:
        """Forget what a call that failed has left."""
        self._put_off.clear()
        self.modules.clear()
        self._current = None

    def describe_split(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """Return in words which of the named ``parameters`` are split."""
        share, others = share_of(self.split, parameters)
        if not others:
            return "the gradients of all its weights are put off"
        return f"the gradients of {share} % of its weights are put off; with the input's go those of {others}"


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
