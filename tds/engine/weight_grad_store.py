"""Deferral of weight gradients, so that the previous stage receives its output gradients sooner.

A ``WeightGradStore`` defers three types of work from a ``BackwardInput`` to its ``BackwardWeight``:

* Calls of ``tds.linear_function.linear`` in layers of this project, and of ``torch.nn.functional.linear`` in users'
  layers, on a leaf weight or on views of one, such as gate and value of a gated layer. The input and the output
  gradient are saved.
* Modules with ``backward_dw()``, such as the layers of Transformer Engine and Megatron-LM, and our experts.
* With "backward_split": "graph", all weight gradients that autograd's graph allows to defer (``graph_split``). The full
  graph is retained.

While a store is active, both linear functions run as this module's autograd function. In a ``BackwardInput``, the
function returns only the input gradient and saves the tensors that the gradients of weight and bias need. These
gradients are accumulated later through the ``AccumulateGrad`` nodes of weight and bias, so hooks run as usual and sums
are bitwise equal.

``tds.linear_function.linear`` looks up the active store. Users' layers, such as ``nn.Linear``, call
``torch.nn.functional.linear``. This name is replaced in torch's module while a store is active, so that a user's model
needs no change. A ``TorchFunctionMode`` would not work: it is off inside ``backward``, where recompute runs layers
again, and on GPUs the backward runs in another thread.

A module's ``backward_dw()`` computes its weight gradients for the oldest backward whose weight gradients are pending,
and stores them in ``grad``. The engine calls it on the outermost module that has it, once per forward in a micro-batch.
A module that can also compute weight gradients in its backward has an attribute ``delay_wgrad``, which the engine sets
to True during forwards whose backward is split. A module without it, such as ``te.Linear(delay_wgrad_compute=True)``,
always defers, so the engine calls its ``backward_dw()`` after full backwards too.

All other layers compute their weight gradients together with their input gradients;
``WeightGradStore.describe_split`` reports their parameters.

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
from tds.linear_function import (
    deferring_weight_grads,
    is_plain_product,
    leaf_of,
    multiply,
    multiply_grad,
    percentage_of,
)
from tds.param_info import info_of

Key = tuple[int, int]


class DeferredWork(Protocol):
    """Work that is deferred to a ``BackwardWeight``."""

    def leaves(self) -> Sequence[torch.Tensor]:
        """Return the weights whose gradients this work computes."""

    def run(self) -> None:
        """Accumulate the weights' gradients through their ``AccumulateGrad`` nodes."""


@dataclass(frozen=True, slots=True)
class _LinearCall:
    """One call of a linear function: its input, output gradient, and weight and bias, which may be views of leaves.

    ``has_row_order``: the weight was row-major when the call was recorded. Afterwards ZeRO 3 frees its memory.
    """

    x: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    has_row_order: bool

    @property
    def trained(self) -> list[torch.Tensor]:
        """Weight and bias, as far as they require gradients."""
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None and tensor.requires_grad]

    def leaves(self) -> list[torch.Tensor]:
        return [leaf for tensor in self.trained if (leaf := leaf_of(tensor)) is not None]

    def run(self) -> None:
        grads = self.weight_grads()
        torch.autograd.backward([get_gradient_edge(tensor) for tensor in grads], list(grads.values()))

    def weight_grads(self) -> dict[torch.Tensor, torch.Tensor]:
        """Compute the products that autograd or ``tds.linear_function`` would compute.

        Autograd computes the gradient of a non-contiguous weight as a transposed product.

        Shapes:
            x    [..., input_size]
            grad [..., output_size]
        """
        rows, inputs = self.grad.reshape(-1, self.grad.shape[-1]), self.x.reshape(-1, self.x.shape[-1])
        grads: dict[torch.Tensor, torch.Tensor] = {}
        for tensor in self.trained:
            if tensor is self.bias:
                grads[tensor] = rows.sum(0)
            elif (add_product := info_of(tensor).add_product) is not None:
                add_product(rows, inputs)
            elif self.has_row_order:
                grads[tensor] = rows.t().mm(inputs)
            else:
                grads[tensor] = inputs.t().mm(rows).t()
        return grads


@dataclass(frozen=True, slots=True)
class _ViewCalls:
    """Calls on views of one leaf weight. One backward computes its gradient, so that its hooks run once."""

    calls: list[_LinearCall]

    def leaves(self) -> list[torch.Tensor]:
        return list(dict.fromkeys(leaf for call in self.calls for leaf in call.leaves()))

    def run(self) -> None:
        grads = {tensor: grad for call in self.calls for tensor, grad in call.weight_grads().items()}
        torch.autograd.backward([get_gradient_edge(tensor) for tensor in grads], list(grads.values()))


@dataclass(frozen=True, slots=True)
class _ModuleCalls:
    """A module's forwards in one micro-batch; the module has ``backward_dw()``."""

    module: Any
    num_calls: int

    def leaves(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def run(self) -> None:
        """Sum the gradients of all calls.

        ``grad`` is set to None before each call, because some modules only write to an empty ``grad``.
        """
        parameters = self.leaves()
        previous_grads = [parameter.grad for parameter in parameters]
        grads: dict[torch.Tensor, torch.Tensor] = {}
        for _ in range(self.num_calls):
            for parameter in parameters:
                parameter.grad = None
            self.module.backward_dw()
            for parameter in parameters:
                if parameter.grad is not None:
                    grads[parameter] = parameter.grad if parameter not in grads else grads[parameter] + parameter.grad
        for parameter, gradient in zip(parameters, previous_grads, strict=True):
            parameter.grad = gradient
        if grads:
            torch.autograd.backward([get_gradient_edge(parameter) for parameter in grads], list(grads.values()))


class DelayedModules:
    """The outermost modules of a stage with ``backward_dw()``, and their forward counts per micro-batch and chunk.

    Args:
        current_key: returns the (micro-batch, chunk) of the running training forward. It returns None during evaluation
            and recompute, whose forwards are not counted.

    Attributes:
        always_defers: at least one module defers its weight gradients in full backwards too.
    """

    def __init__(self, module: nn.Module | None, current_key: Callable[[], Key | None]) -> None:
        modules = [] if module is None else list(_outermost(module))
        self._switchable_modules = [delayed for delayed in modules if hasattr(delayed, "delay_wgrad")]
        self.always_defers = len(self._switchable_modules) < len(modules)
        self._current_key = current_key
        self._calls: dict[Key, Counter[Any]] = {}
        for delayed in modules:
            delayed.register_forward_hook(self._count_call)

    @contextmanager
    def delaying(self) -> Iterator[None]:
        """Set ``delay_wgrad`` on the modules that have it, for the forwards in the block."""
        for module in self._switchable_modules:
            module.delay_wgrad = True  # type: ignore[assignment]
        try:
            yield
        finally:
            for module in self._switchable_modules:
                module.delay_wgrad = False  # type: ignore[assignment]

    def pop_work(self, key: Key) -> list[_ModuleCalls]:
        """Remove and return the deferred work of the backward ``key``, the last module first."""
        calls = self._calls.pop(key, Counter())
        return [_ModuleCalls(module, num_calls) for module, num_calls in reversed(calls.items())]

    def clear(self) -> None:
        """Reset the forward counts."""
        self._calls.clear()

    def _count_call(self, module: Any, *_: Any) -> None:
        key = self._current_key()
        if key is not None and getattr(module, "delay_wgrad", True):
            self._calls.setdefault(key, Counter())[module] += 1


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if callable(getattr(module, "backward_dw", None)):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


class WeightGradStore:
    """Stores deferred weight-gradient work by micro-batch and chunk.

    Args:
        module: the stage's layers, which are searched for modules with ``backward_dw()``; None: there are none.
        current_key: see ``DelayedModules``.
        splits_by_graph: also defer what autograd's graph allows. None: decide at the first backward, by
            ``graph_split.defers_more``: True if split linear layers have less than half of the weight elements that
            could be deferred.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        current_key: Callable[[], Key | None] = lambda: None,
        *,
        splits_by_graph: bool | None = False,
    ) -> None:
        self.split_leaves: set[torch.Tensor] = set()
        self.modules = DelayedModules(module, current_key)
        self.splits_by_graph = splits_by_graph
        self._deferred: dict[Key, list[DeferredWork]] = {}
        self._active_work: list[DeferredWork] | None = None
        self._anchor = torch.empty(0, requires_grad=True)
        self.original_linear: Callable[..., torch.Tensor] = F.linear

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make linear layers in the block splittable. Backward passes need it too, since they may recompute layers."""
        self.original_linear, F.linear = F.linear, self.linear
        try:
            with deferring_weight_grads(self), self.modules.delaying():
                yield
        finally:
            F.linear = self.original_linear

    def linear(self, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's own name for it
        """Compute ``F.linear``, split if possible; replaces ``torch.nn.functional.linear`` for users' layers."""
        if torch.is_grad_enabled() and is_plain_product(input, weight, bias):
            return self.split_linear(input, weight, bias)
        return self.original_linear(input, weight, bias)

    def split_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = _SplitLinear.apply(x, self._anchor, (weight, bias), self)
        return product

    @contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Store the weight-gradient work of backwards in the block under ``key`` instead of running it."""
        self._active_work = self._deferred[key] = []
        try:
            yield
        finally:
            self._active_work = None
        self._deferred[key] += self.modules.pop_work(key)
        self.split_leaves.update(leaf for work in self._deferred[key] for leaf in work.leaves())

    def backward(self, roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        """Run the backward from ``roots`` inside ``deferring``, split by the graph if ``splits_by_graph`` is set.

        Args:
            roots: a loss, or gradient edges with their ``grads``.
            inputs: the leaves whose gradients the previous stage waits for; empty on the first stage.
        """
        if self.splits_by_graph is None and inputs:
            self.splits_by_graph = graph_split.defers_more(roots, inputs, self._anchor)
        if self.splits_by_graph and inputs:
            self._require_active_work().extend(graph_split.backward(roots, grads, inputs, self._anchor))
        elif roots:
            torch.autograd.backward(roots, grads)

    def record(self, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Store the work for the gradients of ``weight`` and ``bias``."""
        has_row_order = weight.stride() == (weight.shape[1], 1)
        active_work, call = self._require_active_work(), _LinearCall(x, grad, weight, bias, has_row_order)
        if weight.is_leaf:
            active_work.append(call)
            return
        for work in active_work:
            if isinstance(work, _ViewCalls) and leaf_of(work.calls[0].weight) is leaf_of(weight):
                work.calls.append(call)
                return
        active_work.append(_ViewCalls([call]))

    def _require_active_work(self) -> list[DeferredWork]:
        if self._active_work is None:
            raise RuntimeError(
                "a layer must not run backward() on its own weights within forward() under a schedule that splits the "
                'backward. Use "pipeline": {"schedule": "1f1b"}, or "interleaved" with chunks'
            )
        return self._active_work

    def deferred_leaves(self, key: Key) -> set[torch.Tensor]:
        """Return the weights and biases whose gradients are deferred under ``key``."""
        return {leaf for work in self._deferred[key] for leaf in work.leaves()}

    def run(self, key: Key, on_done: Callable[[torch.Tensor], None] | None = None) -> None:
        """Run the work deferred under ``key``; call ``on_done`` with each leaf once its gradient is complete."""
        deferred = self._deferred.pop(key)
        remaining = Counter(leaf for work in deferred for leaf in work.leaves())
        with self.active() if self.splits_by_graph else nullcontext():  # branches may recompute layers
            while deferred:
                work = deferred.pop(0)  # frees the work's tensors after each iteration
                leaves = work.leaves()
                work.run()
                remaining.subtract(leaves)
                for leaf in leaves:
                    if on_done is not None and not remaining[leaf]:
                        on_done(leaf)

    def clear(self) -> None:
        """Drop a failed call's deferred work."""
        self._deferred.clear()
        self.modules.clear()
        self._active_work = None

    def describe_split(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """Describe the percentage of deferred weights and the names of the others in one sentence."""
        share, other_names = percentage_of(self.split_leaves, parameters)
        if not other_names:
            return "all its weight gradients are deferred"
        return f"{share} % of its weight gradients are deferred; computed with the input gradients: {other_names}"


class _SplitLinear(torch.autograd.Function):
    """``F.linear`` whose backward stores the work for weight and bias in a ``WeightGradStore``, the ``splitter``.

    Weight and bias are passed in a tuple to hide them from autograd, which would otherwise run their hooks before they
    have a gradient. ``anchor`` makes the output require a gradient in their place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, leaves: Any, splitter: WeightGradStore
    ) -> torch.Tensor:
        # The leaves are attributes, because recompute would return detached copies of saved tensors. The weight is also
        # saved, so that hooks of saved tensors know that backward needs its values (ZeRO 3).
        ctx.save_for_backward(x, leaves[0])
        ctx.leaves = leaves
        ctx.splitter = splitter
        if info_of(leaves[0]).products is not None:
            return multiply(x, *leaves)
        return splitter.original_linear(x, *leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, _ = ctx.saved_tensors
        weight, bias = ctx.leaves
        ctx.splitter.record(x, grad, weight, bias)
        input_grad = None
        if ctx.needs_input_grad[0]:
            rows = grad.reshape(-1, grad.shape[-1])
            input_grad = multiply_grad(rows, weight, info_of(weight).products).view(x.shape)
        return input_grad, None, None, None
