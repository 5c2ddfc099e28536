"""Splitting any backward by autograd's own graph: first what leads to the inputs, later what leads to weights alone.

A node of the graph from which one edge leads to an input of the stage and another to a weight, and to nothing else, is
a **branch**: ``AddmmBackward``, say. In the backward for the inputs autograd is asked for these alone, and a node of
torch's own leaves out what nobody asks it for. The gradient that comes to a branch is kept, and for the weights the
branch runs again, asked for them alone.

It costs memory: the whole graph of a micro-batch, with all that it saved, stays until its weights' turn, where the
split of linear layers keeps two tensors for each. Not put off are weights that several branches share, those of a
branch that is an ``autograd.Function`` (it would run twice in full), vectors of branches without a matrix, such as
norms, and what reentrant recompute hides. Layers that are computed again are so twice.

Source: ``torch.distributed.pipelining`` for the idea (``stage_backward_input``, ``stage_backward_weight``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class Branch:
    """A node, the weights that it alone leads to beside an input, and the gradients that come to it."""

    node: Any
    weights: tuple[torch.Tensor, ...]
    arrived: list[Any]

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return the weights that wait."""
        return self.weights

    def run(self) -> None:
        """Add to the gradients of the weights, through their ``AccumulateGrad`` nodes."""
        given = [
            (GradientEdge(self.node, number), grad) for number, grad in enumerate(self.arrived) if grad is not None
        ]
        if given:
            torch.autograd.backward([edge for edge, _ in given], [grad for _, grad in given], inputs=self.weights)

    def keep(self, grads: tuple[Any, ...]) -> None:
        """Take note of what comes to the node; a hook of it."""
        self.arrived[:] = grads


class _Graph:
    """What can be reached from ``roots``.

    Attributes:
        order: all nodes, each behind those that it leads to.
        branches: those whose weights can be put off.
        hidden: numbers in the weights of linear layers that are split by themselves.
    """

    def __init__(self, roots: Sequence[Any], inputs: Sequence[torch.Tensor], anchor: torch.Tensor) -> None:
        self.order = list(_nodes(_node(root) for root in roots))
        wanted = {_node(get_gradient_edge(each)) for each in inputs}
        self._to_input: dict[Any, bool] = {}
        self._weights: dict[Any, frozenset[torch.Tensor]] = {}  # of a node that leads to no input
        self.hidden = 0
        self._anchor = _node(get_gradient_edge(anchor))
        for node in self.order:
            below = [each for each, _ in node.next_functions if each is not None]
            self._to_input[node] = node in wanted or any(self._to_input[each] for each in below)
            own = [node.variable] if hasattr(node, "variable") else []
            self._weights[node] = frozenset(own).union(*(self._weights[each] for each in below))
            if self._anchor in below:
                self.hidden += node.leaves[0].numel()
        self.branches = self._find_branches(anchor)

    def _find_branches(self, anchor: torch.Tensor) -> list[Branch]:
        found: list[Branch] = []
        uses: Counter[torch.Tensor] = Counter()
        for node in self.order:
            if not self._to_input[node]:
                continue
            beside = [each for each, _ in node.next_functions if each is not None and not self._to_input[each]]
            weights = frozenset[torch.Tensor]().union(*(self._weights[each] for each in beside)) - {anchor}
            uses.update(weights)
            is_own_function = isinstance(node, torch.autograd.function.BackwardCFunction)
            if not is_own_function and any(weight.dim() > 1 for weight in weights):
                found.append(Branch(node, tuple(weights), []))
        return [branch for branch in found if all(uses[weight] == 1 for weight in branch.weights)]


def pays(roots: Sequence[Any], inputs: Sequence[torch.Tensor], anchor: torch.Tensor) -> bool:
    """Return whether the graph of ``roots`` puts more weights off than its linear layers do by themselves.

    Args:
        anchor: the leaf by which those are told apart: their nodes lead to it and have ``leaves``.
    """
    graph = _Graph(roots, inputs, anchor)
    return sum(weight.numel() for branch in graph.branches for weight in branch.weights) > graph.hidden


def backward(
    roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[torch.Tensor], anchor: torch.Tensor
) -> list[Branch]:
    """Run the backward of ``roots`` but for weights that can be put off; return what is to be run for those.

    Args:
        roots: a loss, or gradient edges with their ``grads``.
        inputs: leaves whose gradients are wanted now.
        anchor: as of ``pays``; with it linear layers that are split by themselves run, too.
    """
    graph = _Graph(roots, inputs, anchor)
    put_off = {weight for branch in graph.branches for weight in branch.weights}
    now = [node.variable for node in graph.order if hasattr(node, "variable") and node.variable not in put_off]
    hooks = [branch.node.register_prehook(branch.keep) for branch in graph.branches]
    try:
        torch.autograd.backward(roots, grads or None, retain_graph=bool(hooks), inputs=now)
    finally:
        for hook in hooks:
            hook.remove()
    return graph.branches


def _node(root: Any) -> Any:
    if isinstance(root, GradientEdge):
        return root.node
    return root.grad_fn if root.grad_fn is not None else get_gradient_edge(root).node


def _nodes(roots: Iterator[Any]) -> Iterator[Any]:
    """Yield every node below ``roots`` once, behind those that it leads to."""
    seen: set[Any] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(each, False) for each, _ in node.next_functions if each is not None and each not in seen]
